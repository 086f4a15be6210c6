"""Process groups for tests: ranks are processes of this machine that stay up and run one function after another."""

import atexit
import datetime
import functools
import gc
import io
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A collective that a rank never joins fails after the first; ranks that do not answer are killed after the second.
COLLECTIVE_SECONDS = 30
ANSWER_SECONDS = 120


@dataclass(frozen=True)
class Raised:
    """The exception that a rank ended with."""

    type: str
    message: str
    trace: str


class Ranks:
    """A gloo group of ``size`` processes, each with one thread. Functions must be importable from ``support``."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = _context()
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name, "store")
        self._pipes, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, size, str(store)), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(rank, *args)`` returned on each rank, or the ``Raised`` that it ended with."""
        for pipe in self._pipes:
            pipe.send_bytes(_pack((function, args)))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(ANSWER_SECONDS):
                self.close()
                ranks.cache_clear()
                raise TimeoutError(f"rank {rank} did not answer within {ANSWER_SECONDS} s")
            try:
                results.append(_unpack(pipe.recv_bytes()))
            except EOFError:
                results.append(Raised("Killed", f"rank {rank} is gone", ""))
        return results

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As ``outcomes``, of functions that must not raise."""
        results = self.outcomes(function, *args)
        for rank, result in enumerate(results):
            assert not isinstance(result, Raised), f"rank {rank}: {result.trace}"
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


@functools.cache
def _context() -> Any:
    """Processes start as forks of one that has imported what they need, which takes each of them seconds."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["parallel_ops.models"])
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


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what the process that it was forked from imported
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS),
    )
    while True:
        try:
            function, args = _unpack(pipe.recv_bytes())
        except EOFError:  # the test process is gone
            return
        try:
            result = function(rank, *args)
        except Exception as error:
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(_pack(result))
