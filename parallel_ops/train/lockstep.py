"""Trains the same configuration with several sets of ops, so that the runs can be compared.

Each run has a process of its own, and so a peak memory of its own. The processes take turns, one step each on the same
batch, and which goes first alternates: whatever else the machine does, it does to all of them alike.
"""

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from parallel_ops.train.config import TrainConfig
from parallel_ops.train.loop import OPS, Trainer


@dataclass
class Run:
    """One model's training: per step the loss in nats per byte and the seconds; the peak memory in bytes."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_memory: int | None = None


def train(
    config: TrainConfig, names: Sequence[str] = ("plain", "fused"), on_step: Callable[[list[Run]], None] | None = None
) -> list[Run]:
    """Trains ``config`` once for each name in ``OPS``, in lock-step.

    Args:
        on_step: called with the runs so far after each step of all of them.

    Raises:
        RuntimeError: a run's process ended early (it has printed why, unless the system killed it).
    """
    runs = [Run(name) for name in names]
    workers = [_Worker(config, name) for name in names]
    try:
        for worker in workers:
            worker.receive()  # ready: model built, nothing timed yet
        pairs = list(zip(workers, runs, strict=True))
        for step in range(config.steps):
            for worker, run in pairs if step % 2 == 0 else reversed(pairs):
                result = worker.ask("step")
                run.losses.append(result.loss)
                run.seconds.append(result.seconds)
            if on_step is not None:
                on_step(runs)
        for worker, run in pairs:
            run.peak_memory = worker.ask("peak_memory")
    finally:
        for worker in workers:
            worker.stop()
    return runs


class _Worker:
    """The near end of a process that trains one model on request."""

    def __init__(self, config: TrainConfig, name: str) -> None:
        # Spawned, not forked: a fork would carry the parent's memory and break CUDA and OpenMP.
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.connection, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(config, name, far), daemon=True)
        with _interrupts_ignored():
            self.process.start()
        far.close()

    def ask(self, request: str) -> Any:
        try:
            self.connection.send(request)
        except OSError:
            self._ended()
        return self.receive()

    def receive(self) -> Any:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            self._ended()
        if isinstance(answer, MemoryError):
            raise RuntimeError(f"the {self.name} run is out of memory: {answer}")
        return answer

    def _ended(self) -> NoReturn:
        self.process.join(timeout=10)
        raise RuntimeError(f"the {self.name} run ended early (exit code {self.process.exitcode})")

    def stop(self) -> None:
        """Ends the process: it leaves at the end of the pipe, or is made to."""
        self.connection.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()


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


def _serve(config: TrainConfig, name: str, connection: Connection) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            trainer = Trainer(config, OPS[name])
            connection.send(None)
            while True:
                request = connection.recv()
                connection.send(trainer.step() if request == "step" else trainer.peak_memory())
        except (MemoryError, RuntimeError) as error:
            # torch has a class for a full GPU, but only a message for full host memory.
            if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            connection.send(MemoryError(str(error).partition("\n")[0]))
