"""Processes that run one function after another, each on all of them, and are killed if one does not end."""

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

# Seconds for the other ranks to answer after one failed, where a call has no limit.
_GRACE = 60.0


class Processes:
    """``size`` ranks with variables of their own; a context that kills them.

    Args:
        environment: Variables set before torch is imported, as CUDA and NCCL read theirs once.
    """

    def __init__(self, size: int, environment: Mapping[str, str] | None = None) -> None:
        self.size, self.environment = size, dict(environment or {})
        self._pipes: list[Connection] = []
        self._ranks: list[Any] = []

    def serve(self, size: int, environment: Mapping[str, str]) -> bool:
        """True if these processes are what a proof needs."""
        return (self.size, self.environment) == (size, dict(environment))

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> list[Any]:
        """The results of ``function(rank, size, *arguments)`` on every rank.

        Raises:
            RuntimeError: A rank raised an error or ended, with the error of each; all were killed, since a rank may
                still be in a collective that another left.
            TimeoutError: A rank did not answer in time; all were killed.
        """
        if not self._ranks:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        silent: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        results, errors = [None] * self.size, list[str]()
        end = None if seconds is None else time.monotonic() + seconds
        while silent:
            ready: list[Any] = wait(list(silent), None if end is None else max(0.0, end - time.monotonic()))
            if not ready:
                self._show_stacks()
                self.close()
                limit = "in time" if seconds is None else f"within {seconds:.0f} s"
                raise TimeoutError("; ".join([f"ranks {sorted(silent.values())} did not answer {limit}", *errors]))
            for pipe in ready:
                rank = silent.pop(pipe)
                try:
                    error, results[rank] = pipe.recv()
                except EOFError:
                    error = "its process is gone"
                if error is not None:
                    errors.append(f"rank {rank}: {error}")
                    end = end or time.monotonic() + _GRACE
        if errors:
            self.close()
            raise RuntimeError("; ".join(sorted(errors)))
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        before = dict(os.environ)
        os.environ.update(self.environment)
        try:
            for rank in range(self.size):
                here, there = context.Pipe()
                process = context.Process(target=_serve, args=(there, rank, self.size), daemon=True)
                process.start()
                there.close()
                self._pipes.append(here)
                self._ranks.append(process)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _show_stacks(self) -> None:
        """Has each process write to the log where it stands."""
        for process in self._ranks:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(2.0)  # one that stands in the driver takes its signals late

    def close(self) -> None:
        """Kills the processes; the next call starts others."""
        for process in self._ranks:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._ranks = [], []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of ``function(rank, *arguments)`` on rank 0 of a gloo group with a thread each."""
    with tempfile.TemporaryDirectory() as folder, Processes(size) as ranks:
        return ranks.run(_in_group, os.path.join(folder, "store"), function, arguments)[0]


def _in_group(rank: int, size: int, store: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        return function(rank, *arguments)
    finally:
        dist.destroy_process_group()


def _serve(pipe: Connection, rank: int, size: int) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # the parent is gone
            return
        try:
            pipe.send((None, function(rank, size, *arguments)))
        except Exception as error:
            traceback.print_exc()
            pipe.send((f"{type(error).__name__}: {str(error).strip() or '?'}"[:400], None))
