"""Trains the same model in several ways, so that the runs can be compared.

Each run has processes of its own, and so a peak memory of its own. The runs take turns, one step each on the same
batch, and the order alternates, so that other load on the machine affects all of them alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.demo.worker import Here, Worker
from parallel_ops.train.config import Settings


@dataclass
class Run:
    """One model's training: per step the loss in nats per byte and the seconds; the peak memory in bytes."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_memory: int | None = None


def train(
    each: Mapping[str, Settings],
    on_step: Callable[[list[Run]], None] | None = None,
    *,
    here: Mapping[str, Here] | None = None,
) -> list[Run]:
    """Trains every run, in lock-step.

    Args:
        each: Settings by name: one of ``ALONE`` or ``PRODUCTS`` on one process, any other name in parallel.
        on_step: Called with the runs so far after each step of all of them.
        here: Runs by name of which this process is a rank, started by torchrun; the other ranks take as many steps.

    Raises:
        RuntimeError: A process of a run ended early; it has printed the reason, unless the system killed it.
    """
    runs = [Run(name) for name in each]
    workers: list[Worker | Here] = []
    try:
        for name, settings in each.items():
            workers.append(here[name] if here and name in here else Worker(name, settings))
        for worker in workers:
            worker.receive()  # ready: model built, nothing timed yet
        pairs = list(zip(workers, runs, strict=True))
        for step in range(next(iter(each.values())).run.steps):
            for worker, run in pairs if step % 2 == 0 else reversed(pairs):
                loss, seconds = worker.ask("step")
                run.losses.append(loss)
                run.seconds.append(seconds)
            if on_step is not None:
                on_step(runs)
        for worker, run in pairs:
            run.peak_memory = worker.ask("peak_memory")
    finally:
        for worker in workers:
            worker.stop()
    return runs
