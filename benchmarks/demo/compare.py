"""Trains the same configuration in several ways, so that the runs can be compared.

Each run has processes of its own, and so a peak memory of its own. The runs take turns, one step each on the same
batch, and which goes first alternates: whatever else the machine does, it does to all of them alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.demo.config import TrainConfig
from benchmarks.demo.runs import ALONE
from benchmarks.demo.worker import Here, Worker


@dataclass
class Run:
    """One model's training: per step the loss in nats per byte and the seconds; the peak memory in bytes."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_memory: int | None = None


def names_of(config: TrainConfig, alone: Sequence[str] = ALONE) -> list[str]:
    """The runs of a configuration: those on one process, and the parallel one where it has several ranks."""
    return [*alone, *([config.parallel] if config.ranks > 1 else [])]


def train(
    config: TrainConfig,
    names: Sequence[str] = ALONE,
    on_step: Callable[[list[Run]], None] | None = None,
    *,
    here: Here | None = None,
    others: Sequence[TrainConfig] = (),
) -> list[Run]:
    """Trains ``config`` once for each name, in lock-step.

    Args:
        names: of ``ALONE``, for a run on one process, ``products``, or ``config.parallel``: see ``names_of``.
        on_step: called with the runs so far after each step of all of them.
        here: this process's part of the parallel run, where its other ranks are processes that somebody else
            has started and that ask their own for as many steps. Without it they are started here.
        others: further configurations, whose parallel runs are among the names.

    Raises:
        RuntimeError: a run's process ended early (it has printed why, unless the system killed it).
    """
    runs = [Run(name) for name in names]
    configs = {other.parallel: other for other in others}
    workers: list[Worker | Here] = []
    try:
        for name in names:
            workers.append(
                here if here is not None and name == config.parallel else Worker(configs.get(name, config), name)
            )
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
