"""Processes that run one function after another, each on all of them, and are killed if one does not end."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any


class Processes:
    """``size`` ranks with variables of their own.

    Args:
        environment: Variables set before torch is imported, as CUDA and NCCL read theirs once.
    """

    def __init__(self, size: int, environment: Mapping[str, str]) -> None:
        self.size, self.environment = size, dict(environment)
        self._pipes: list[Connection] = []
        self._ranks: list[Any] = []

    def serve(self, size: int, environment: Mapping[str, str]) -> bool:
        """True if these processes are what a proof needs."""
        return (self.size, self.environment) == (size, dict(environment))

    def run(self, function: Callable[..., None], arguments: tuple[Any, ...], seconds: float) -> list[str]:
        """Runs ``function(rank, size, *arguments)`` on every rank.

        Returns:
            An error of each rank that raised one or ended.

        Raises:
            TimeoutError: A rank did not answer in time; all were killed.
        """
        if not self._ranks:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        errors: dict[int, str | None] = {}
        end = time.monotonic() + seconds
        while len(errors) < self.size:
            silent: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in errors}
            ready: list[Any] = wait(list(silent), max(0.0, end - time.monotonic()))
            if not ready:
                self.close()
                known = [f"; rank {rank}: {error}" for rank, error in sorted(errors.items()) if error]
                raise TimeoutError(
                    f"ranks {sorted(silent.values())} did not answer within {seconds:.0f} s{''.join(known)}"
                )
            for pipe in ready:
                rank = silent[pipe]
                try:
                    errors[rank] = pipe.recv()
                except EOFError:
                    errors[rank] = "its process is gone"
        found = [f"rank {rank}: {error}" for rank, error in sorted(errors.items()) if error]
        if found:
            self.close()  # a rank may still be in a collective that another left
        return found

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

    def close(self) -> None:
        """Kills the processes; the next call starts others."""
        for process in self._ranks:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._ranks = [], []


def _serve(pipe: Connection, rank: int, size: int) -> None:
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # the session is gone
            return
        try:
            function(rank, size, *arguments)
            pipe.send(None)
        except Exception as error:
            traceback.print_exc()
            pipe.send(f"{type(error).__name__}: {str(error).strip() or '?'}"[:400])
