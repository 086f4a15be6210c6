"""The processes of a run: one, or the ranks that train one model together."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from benchmarks.demo.matmul_floor import Products
from benchmarks.demo.runs import ALONE, COMPILED, PRODUCTS, answer, compile_now, demo_trainer
from parallel_ops.train.config import Settings
from parallel_ops.train.launch.options import Start
from parallel_ops.train.launch.rendezvous import under_torchrun
from parallel_ops.train.launch.worker import joined
from parallel_ops.train.parallelize_model import PRECISIONS
from parallel_ops.train.trainer import Trainer

# Seconds that processes have to end by themselves.
_GRACE = 5


def torchrun_ranks() -> int:
    """The processes that torchrun started; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1


def local_ranks() -> int:
    """The processes that torchrun started on this node."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def cpu_threads() -> int:
    """The threads of each run on CPUs, over all its processes of one node: ``OMP_NUM_THREADS``, or one a core.

    Under torchrun ``OMP_NUM_THREADS`` counts for each process. torchrun sets it to 1 by default, which would leave
    cores idle, so 1 means one thread a core.
    """
    threads = torch.get_num_threads()
    if torchrun_ranks() == 1:
        return threads
    if threads > 1:
        return threads * local_ranks()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Here:
    """This process as a rank of torchrun's, with the interface of ``Worker``. All ranks take the same steps."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def ask(self, request: str) -> Any:
        if request == "step":
            # The other ranks wait here while another run has its turn, instead of computing ahead on its cores.
            dist.barrier()
        return answer(self.trainer, request)

    def receive(self) -> None:
        pass

    def stop(self) -> None:
        pass


@contextlib.contextmanager
def rank_of_torchrun(settings: Settings) -> Iterator[Here]:
    """This process as a rank of torchrun's, until the block ends."""
    torch.set_num_threads(max(1, cpu_threads() // local_ranks()))
    with joined(settings, Start(), report) as (mesh, activity):
        yield Here(demo_trainer(settings, mesh=mesh, activity=activity))


class Worker:
    """The processes that train one model, step by step on request.

    Args:
        name: One of ``ALONE``, ``PRODUCTS``, or the name of a parallel run.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        # Forks of a process that has imported what all need, which takes seconds, and has done nothing else: a fork of
        # this one would carry its memory and break CUDA and OpenMP.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["parallel_ops.train.launch.worker"])
        self.name = name
        self.connections: list[Connection] = []
        self.processes = []
        ranks, threads = settings.plan.gpus, cpu_threads()
        # This process has the store, as torchrun's agent would.
        self.store: Any = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None  # type: ignore[attr-defined]
        for rank in range(ranks):
            connection, far = context.Pipe()
            environment = {} if self.store is None else {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
            arguments = name, settings, far, environment, max(1, threads // ranks)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with _interrupts_ignored():
                process.start()
            far.close()
            self.connections.append(connection)
            self.processes.append(process)

    def ask(self, request: str) -> Any:
        """See ``answer``: the loss of rank 0, the time of the slowest rank, the memory of the largest."""
        for rank, connection in enumerate(self.connections):
            try:
                connection.send(request)
            except OSError:
                self._ended(rank)
        answers = self.receive()
        if request == "step":
            return answers[0][0], max(seconds for _, seconds in answers)
        return None if None in answers else max(answers)

    def receive(self) -> list[Any]:
        """The next message of each rank. The first rank that ends raises: others may wait for it."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self.connections):
            silent = [c for rank, c in enumerate(self.connections) if rank not in answers]
            for connection in wait(silent):
                rank = self.connections.index(connection)  # type: ignore[arg-type]
                try:
                    answers[rank] = self.connections[rank].recv()
                except (EOFError, OSError):
                    self._ended(rank)
                if isinstance(answers[rank], MemoryError):
                    raise RuntimeError(f"the {self.name} run is out of memory: {answers[rank]}")
        return [answers[rank] for rank in range(len(answers))]

    def _ended(self, rank: int) -> NoReturn:
        self.processes[rank].join(timeout=10)
        which = f" on rank {rank}" if len(self.processes) > 1 else ""
        raise RuntimeError(f"the {self.name} run ended early{which} (exit code {self.processes[rank].exitcode})")

    def stop(self) -> None:
        """Ends the processes: they exit when the pipe is closed, or are terminated."""
        for connection in self.connections:
            connection.close()
        deadline = time.monotonic() + _GRACE
        for process in self.processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.terminate()
                process.join()


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started here ignore Ctrl-C, which reaches the whole process group: the parent ends its workers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _serve(name: str, settings: Settings, connection: Connection, environment: Mapping[str, str], threads: int) -> None:
    for key in ("RANK", "WORLD_SIZE"):  # of torchrun, where this run is one process beside its ranks
        os.environ.pop(key, None)
    os.environ.update(environment)
    torch.set_num_threads(threads)
    try:
        with joined(settings, Start(), report) as (mesh, activity), contextlib.suppress(EOFError, ConnectionError):
            run: Trainer | Products
            if name == PRODUCTS:
                dtype, device = PRECISIONS[settings.plan.dtype], torch.device(settings.run.device)
                run = Products(settings.config, settings.plan.global_batch, dtype, device)
            else:
                run = demo_trainer(settings, name if name in ALONE else "fused", mesh=mesh, activity=activity)
                if name in COMPILED:
                    compile_now(run)
            connection.send(None)
            while True:
                connection.send(answer(run, connection.recv()))
    except (MemoryError, RuntimeError) as error:
        # torch has a class for a full GPU, but only a message for full host memory.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        connection.send(MemoryError(str(error).partition("\n")[0]))


def report(message: str) -> None:
    """Prints the reason before ``Watch`` ends this process."""
    print(f"error: {message}", file=sys.stderr, flush=True)
