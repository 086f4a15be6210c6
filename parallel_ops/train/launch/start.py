"""Starts a run: in this process, in local processes, or as one rank of torchrun.

Exit codes: 0 finished, or stopped by SIGTERM or SIGHUP with a checkpoint; 1 the run failed; 2 invalid settings or
files, or settings that differ between ranks, before any process group; 130 stopped by Ctrl-C, with a checkpoint.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record

from parallel_ops.train.build import build_samples
from parallel_ops.train.config import Settings
from parallel_ops.train.data import vocabulary
from parallel_ops.train.data.any_samples import AnySamples
from parallel_ops.train.launch import resuming
from parallel_ops.train.launch.local import Failure, Stopped, run_here
from parallel_ops.train.launch.options import Start
from parallel_ops.train.launch.rendezvous import agent_has_store, first_rank, under_torchrun
from parallel_ops.train.launch.signals import GracefulShutdown
from parallel_ops.train.launch.watchdog import is_lost
from parallel_ops.train.launch.worker import propagate, run_rank
from parallel_ops.train.planner_bridge import Device, replan, uses_cuda
from parallel_ops.train.report import outputs
from parallel_ops.train.settings import patterns

# Seconds until every agent has noticed a node that waits to join: agents poll ten times a second.
_NOTICE = 2.0
# With a shared store an agent keeps its first address, but a joining node waits for a new one (torch 2.13).
_SHARED = "note: nodes can join later only with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun"


def fitted(settings: Settings, ranks: int, start: Start) -> Settings:
    """The settings with a plan for ``ranks`` ranks.

    Raises:
        ValueError: The plan has another number of ranks, and replanning is not enabled or finds no plan.
    """
    plan = settings.plan
    if plan.gpus == ranks:
        return settings
    sizes = " * ".join(f"{name}={getattr(plan, name)}" for name in ("dp", "cp", "tp"))
    if not (start.elastic or start.resume):
        raise ValueError(
            f"parallel: {sizes} is {plan.gpus} ranks, but there are {ranks}; change the plan, or let it be chosen anew "
            "with --elastic"
        )
    return replan(settings, ranks, Device.here(settings, ranks))


def described_change(before: Settings, after: Settings) -> str:
    """A line about a changed plan."""
    ranks = f"{after.plan.gpus} rank{'s' if after.plan.gpus > 1 else ''}"
    return f"plan for {ranks}: {after.plan.describe()} in the place of {before.plan.describe()}"


def check(settings: Settings, start: Start) -> float:
    """Checks the inputs and outputs of a run before any process group.

    Returns:
        The share of the data that was compared with the vocabulary, on the first rank; see ``vocabulary``.

    Raises:
        ValueError, OSError, ImportError, CheckpointError: Data is missing, too short or has tokens outside the
        vocabulary; files cannot be written; the device does not exist; ``resuming.check`` refuses a checkpoint.
    """
    uses_cuda(settings)
    if settings.model.freeze or settings.optimizer.groups:
        patterns.check(settings, patterns.names_of(settings))
    built = samples_of(settings)
    resuming.check(settings, start)
    outputs.check(settings)
    return compared(settings, built) if first_rank() else 1.0


def samples_of(settings: Settings) -> list[AnySamples]:
    """The samples to train on, and those to evaluate on, if any.

    Raises:
        ValueError, OSError, ImportError: Data is missing, cannot be read, or is too short.
    """
    built = [samples for samples in build_samples(settings, None) if samples is not None]
    for samples in built:
        samples.reach(1, lambda found: found())
    return built


def compared(settings: Settings, built: list[AnySamples]) -> float:
    """Compares the tokens with the model's vocabulary; returns the share of the data that was compared.

    Raises:
        ValueError: A token is outside; names the file.
    """
    return min(vocabulary.check(samples.stream, settings.config.vocab_size) for samples in built)


def run(settings: Settings, start: Start) -> Stopped:
    """Trains: under torchrun as one of its ranks, otherwise in local processes.

    Raises:
        Disagreement: Settings differ between ranks of torchrun, or are invalid on one of them.
        Failure: Another process failed. Otherwise the errors of ``Trainer``.
    """
    if under_torchrun():
        recorded: Callable[[Settings, Start], Any] = record(_under_torchrun)  # writes an error to torchrun's file
        return recorded(settings, start)
    if settings.plan.gpus == 1:
        result = run_rank(settings, start, GracefulShutdown(), lambda _: None)
        return Stopped(result, result.stopped)
    return run_here(settings, start)


@contextlib.contextmanager
def propagated() -> Iterator[None]:
    """Under torchrun an error of the block is raised on the other ranks too, which would otherwise wait."""
    try:
        yield
    except Exception as error:
        if under_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
            propagate(error)
        raise


def _report(message: str) -> None:
    """Reports the reason for the end of this process to the user and to torchrun."""
    print(f"error: {message}", file=sys.stderr)
    try:
        raise Failure(message)
    except Failure as failure:
        get_error_handler().record_exception(failure)


def _under_torchrun(settings: Settings, start: Start) -> Stopped:
    stopping = GracefulShutdown()
    if start.elastic and first_rank() and agent_has_store():
        print(_SHARED, file=sys.stderr, flush=True)
    try:
        result = run_rank(settings, start, stopping, _report)
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise Failure(str(error).partition("\n")[0]) from None
    restarts, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if start.elastic and result.stopped and stopping.stop_signal is None and restarts < most:
        # A node leaves, and its agent exits with it. This rank fails so that its own agent restarts the run with the
        # remaining nodes. When a node joins, the agent stops this rank a moment later, which is no failure.
        time.sleep(_NOTICE)
        raise Failure(f"{result.stopped} on another node after step {result.step}: restarting without it")
    return Stopped(result, result.stopped)
