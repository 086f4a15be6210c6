"""Process groups for tests: ranks are processes of this machine that stay up and run one function after another."""

import atexit
import datetime
import functools
import gc
import io
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d

# A collective that a rank never joins fails after the first; ranks that do not answer are killed after the second.
COLLECTIVE_SECONDS = 30
ANSWER_SECONDS = 120
# Gloo's handshake, where connections of one address follow each other fast: "Connection closed by peer", now and then.
NOT_FORMED = "Gloo connectFullMesh failed"


@dataclass(frozen=True)
class Raised:
    """The exception that a rank ended with."""

    type: str
    message: str
    trace: str


class NotFormed(RuntimeError):
    """Ranks could not connect to each other."""


class Ranks:
    """A gloo group of ``size`` processes, each with one thread.

    Each rank imports the file that a function is in: a test file, or one of ``support``.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name, "store")
        for rank in range(self.size):
            here, there = _context().Pipe()
            process = _context().Process(target=_serve, args=(there, rank, self.size, str(store)), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(rank, *args)`` returned on each rank, or the ``Raised`` that it ended with.

        Runs once more, in new processes, if a group could not be formed.
        """
        try:
            return self._outcomes(function, *args)
        except NotFormed:
            return self._outcomes(function, *args)

    def _outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(_pack((function, args)))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(results) < self.size:
            silent = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            ready = wait(list(silent), max(deadline - time.monotonic(), 0))
            if not ready:
                self.close()
                raised = "".join(f"; rank {r}: {got.trace}" for r, got in results.items() if isinstance(got, Raised))
                raise TimeoutError(f"ranks {sorted(silent.values())} did not answer within {ANSWER_SECONDS} s{raised}")
            for pipe in ready:
                rank = silent[pipe]
                try:
                    results[rank] = _unpack(pipe.recv_bytes())
                except EOFError:
                    results[rank] = Raised("Killed", f"rank {rank} is gone", "")
                if isinstance(results[rank], Raised) and NOT_FORMED in results[rank].message:
                    self.close()
                    raise NotFormed(results[rank].trace)
        if any(isinstance(result, Raised) and result.type == "Killed" for result in results.values()):
            self.close()  # the others may never end
        return [results[rank] for rank in range(self.size)]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As ``outcomes``, of functions that must not raise."""
        results = self.outcomes(function, *args)
        for rank, result in enumerate(results):
            if isinstance(result, Raised):
                self.close()  # its ranks may wait for each other
                raise AssertionError(f"rank {rank}: {result.trace}")
        return results

    def close(self) -> None:
        """Ends the processes. The next call starts others."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()


@functools.cache
def _context() -> Any:
    """Processes start as forks of one that has imported what they need, which takes each of them seconds."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        ["parallel_ops.models", "parallel_ops.train", "torch._inductor.compile_fx", "pytest", "hypothesis"]
    )
    return context


@functools.cache
def ranks(size: int) -> Ranks:
    """The group of this size: started once for all tests of the process, since importing torch takes seconds."""
    group = Ranks(size)
    atexit.register(group.close)
    return group


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _share_a_device() -> None:
    """All groups of gloo in this process have one device and one thread each.

    By default each group has a device of its own, whose thread wakes 100 times a second for as long as the group
    lives. Late in a run each of 4 ranks had 64 groups, of the meshes of the modules before.
    """
    gloo = distributed_c10d.ProcessGroupGloo
    create, device = gloo.__init__, gloo.create_default_device()

    def create_on_it(
        self: Any, store: Any, rank: int, size: int, timeout: datetime.timedelta, **given: Any
    ) -> None:  # torch 2.14 gives enable_reconfigure too
        options = gloo._Options()
        options._devices, options._timeout, options._threads = [device], timeout, 1
        for name, value in given.items():
            setattr(options, name, value)
        create(self, store, rank, size, options)

    gloo.__init__ = create_on_it


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what the process that it was forked from imported
    _share_a_device()
    while True:
        try:
            function, args = _unpack(pipe.recv_bytes())
        except EOFError:  # the test process is gone
            return
        try:
            if not dist.is_initialized():
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(store, size),
                    rank=rank,
                    world_size=size,
                    timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS),
                )
            result = function(rank, *args)
        except Exception as error:
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(_pack(result))
