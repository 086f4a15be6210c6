"""The processes of a run: one, or the ranks that train one model together."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from benchmarks.demo.config import TrainConfig
from benchmarks.demo.runs import ALONE, PRODUCTS, DemoTrainer, ProductsAlone, Step
from parallel_ops.comm import ParallelMesh
from parallel_ops.train.optimizer import hide_hint

# Processes that were told to end get as long, in seconds, before they are ended.
_GRACE = 5


def under_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def local_ranks() -> int:
    """The processes that torchrun started on this node."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


class Place(NamedTuple):
    """A rank of the group, its number among those of its node, which have a GPU each, and its threads on CPUs."""

    rank: int
    local_rank: int
    threads: int


def torchrun_place() -> Place:
    """The place that torchrun has for this process."""
    threads = max(1, cpu_threads() // local_ranks())
    return Place(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), threads)


def cpu_threads() -> int:
    """The threads of each run on CPUs, over all its processes of one node: ``OMP_NUM_THREADS``, or one a core.

    ``OMP_NUM_THREADS`` counts for each process under torchrun, which sets it to 1 where nobody has: that would leave
    cores idle.
    """
    threads = torch.get_num_threads()
    if not under_torchrun():
        return threads
    if threads > 1:
        return threads * local_ranks()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Here:
    """A rank in this process, asked as a worker is. All ranks are asked for the same steps."""

    def __init__(self, trainer: DemoTrainer) -> None:
        self.trainer = trainer

    def ask(self, request: str) -> Any:
        if request == "step":
            # While another run has its turn, the other ranks wait here, and do not work ahead on its cores.
            dist.barrier()
        return _answer(self.trainer, request)

    def receive(self) -> None:
        pass

    def stop(self) -> None:
        pass


class Worker:
    """The near end of the processes that train one model on request."""

    def __init__(self, config: TrainConfig, name: str) -> None:
        # Spawned, not forked: a fork would carry the parent's memory and break CUDA and OpenMP.
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.folder = tempfile.TemporaryDirectory()
        self.connections: list[Connection] = []
        self.processes = []
        threads = cpu_threads()
        for rank in range(1 if _alone(name) else config.ranks):
            connection, far = context.Pipe()
            arguments = config, name, far, rank, str(Path(self.folder.name, "store")), threads
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with _interrupts_ignored():
                process.start()
            far.close()
            self.connections.append(connection)
            self.processes.append(process)

    def ask(self, request: str) -> Any:
        """Rank 0's answer; a step took as long as its slowest rank, and memory is that of the largest.

        Args:
            request: ``"step"`` or ``"peak_memory"``.
        """
        for rank, connection in enumerate(self.connections):
            try:
                connection.send(request)
            except OSError:
                self._ended(rank)
        answers = self.receive()
        if request == "step":
            return Step(answers[0].loss, max(answer.seconds for answer in answers))
        return None if None in answers else max(answers)

    def receive(self) -> list[Any]:
        """What each rank says next. The first that has ended ends the wait for the others, which may wait for it."""
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
        """Ends the processes: they leave at the end of the pipe, or are made to."""
        for connection in self.connections:
            connection.close()
        deadline = time.monotonic() + _GRACE
        for process in self.processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.terminate()
                process.join()
        self.folder.cleanup()


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A process started here ignores Ctrl-C, which reaches the whole process group: the parent ends its workers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _serve(config: TrainConfig, name: str, connection: Connection, rank: int, store: str, threads: int) -> None:
    with contextlib.suppress(EOFError, ConnectionError), contextlib.ExitStack() as stack:
        try:
            mesh = None
            torch.set_num_threads(threads)
            if not _alone(name):
                place = Place(rank, rank, max(1, threads // config.ranks))
                config, mesh = stack.enter_context(joined(config, place, _file_store(store, config.ranks)))
            kind = name if name in ALONE else "fused"
            trainer = ProductsAlone(config) if name == PRODUCTS else DemoTrainer(config, kind, mesh=mesh)
            connection.send(None)
            while True:
                connection.send(_answer(trainer, connection.recv()))
        except (MemoryError, RuntimeError) as error:
            # torch has a class for a full GPU, but only a message for full host memory.
            if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            connection.send(MemoryError(str(error).partition("\n")[0]))


def _alone(name: str) -> bool:
    """Whether a run has one process."""
    return name == PRODUCTS or name in ALONE


def _answer(trainer: DemoTrainer | ProductsAlone, request: str) -> Any:
    return trainer.step() if request == "step" else trainer.peak_memory()


def _file_store(path: str, size: int) -> Any:
    return dist.FileStore(path, size)  # type: ignore[attr-defined]


@contextlib.contextmanager
def joined(config: TrainConfig, place: Place, store: Any = None) -> Iterator[tuple[TrainConfig, ParallelMesh]]:
    """This process as a rank of the parallel run, until the block ends.

    Args:
        store: the ``torch.distributed`` store where the ranks meet; ``None`` for the one that torchrun names.

    Yields:
        the configuration with this rank's device, and the mesh.
    """
    hide_hint()
    on_gpu = torch.device(config.device).type == "cuda"
    if on_gpu:
        device = f"cuda:{place.local_rank}"
        torch.cuda.set_device(device)
        config = dataclasses.replace(config, device=device)
    else:
        torch.set_num_threads(place.threads)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=place.rank, world_size=config.ranks)
    try:
        yield config, ParallelMesh(dp_shard=config.dp, tp=config.tp, cp=config.cp)
    finally:
        dist.destroy_process_group()
