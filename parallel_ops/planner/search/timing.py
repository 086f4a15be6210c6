"""The candidates of a search with their times, counted by one process or by two."""

import contextlib
import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.search.candidates import Candidates
from parallel_ops.planner.search.options import SearchOptions, dispatched
from parallel_ops.planner.search.result import Rejections
from parallel_ops.planner.speed import without_collection
from parallel_ops.planner.step import step_seconds

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# Placements from which on a second process gains more than its start and its results cost: about a second.
MANY = 100


class Request(NamedTuple):
    """What a search counts: see ``search``. ``given``: the options before ``within_target``."""

    model: Model
    cluster: Cluster
    batch: int
    options: SearchOptions
    given: SearchOptions
    constants: Efficiency

    def candidates(self, rejected: Rejections) -> Candidates:
        """The candidates, with those that cannot run in ``rejected``."""
        return Candidates(self.model, self.cluster, self.batch, self.options, self.constants, rejected)


Timed = list[tuple[float, Plan]]


class _Counted(NamedTuple):
    """Of one placement: what was rejected since the one before, its plans with their seconds, and what was rejected of
    it; the last two are empty for a placement that another process counts, and after the last placement."""

    before: list[Any]
    timed: Timed
    rejected: list[Any]


def timed_plans(request: Request, processes: int) -> tuple[Timed, Rejections]:
    """Every plan that can run with its seconds per step, in the order of the search, and those that cannot."""
    if processes == 1 or sum(1 for _ in request.candidates(Rejections()).placements()) < MANY:
        return _joined(_counted(request))
    from multiprocessing import get_context  # takes 20 ms, which small searches and other commands are without

    # Spawned, since a fork of a process with threads may never end. It ends by itself if this one is killed.
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    other = context.Process(target=_send, args=(sender, request), daemon=True)
    other.start()
    try:
        sender.close()
        ours = _counted(request, 0)
        try:
            theirs = receiver.recv()
        except (EOFError, OSError):  # killed, say for its memory
            theirs = _counted(request, 1)
    finally:
        other.terminate()
        other.join()
        receiver.close()
    return _joined(ours, theirs)


def _send(sender: "Connection", request: Request) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process is interrupted, too, and ends this one
    with contextlib.suppress(BrokenPipeError):  # the other was killed
        sender.send(_counted(request, 1))


@without_collection()
def _counted(request: Request, half: int | None = None) -> list[_Counted]:
    """All placements, or those of every other size of TP, PP and CP."""
    rejected, found = Rejections(), []
    candidates = request.candidates(rejected)
    groups: dict[object, int] = {}
    for placed in candidates.placements():
        before, timed = rejected.taken(), []
        group = groups.setdefault((placed.tp, placed.pp, placed.cp), len(groups))
        if half is None or group % 2 == half:
            timed = _timed(request, candidates.of_placement(placed))
        found.append(_Counted(before, timed, rejected.taken()))
    return [*found, _Counted(rejected.taken(), [], [])]


def _joined(*parts: list[_Counted]) -> tuple[Timed, Rejections]:
    """The plans of all parts in the order of the search."""
    timed, rejected = [], Rejections()
    for counted in zip(*parts, strict=True):
        rejected.extend(counted[0].before)
        for part in counted:
            timed += part.timed
            rejected.extend(part.rejected)
    return timed, rejected


def _timed(request: Request, plans: Iterable[Plan]) -> Timed:
    """The plans with their seconds per step."""
    model, cluster, constants = request.model, request.cluster, request.constants
    found = []
    twins: dict[object, float] = {}
    for plan in map(dispatched(request.given, model, cluster), plans):
        if plan.pp == 1 or not plan.fsdp or plan.zero not in (1, 2):
            found.append((step_seconds(model, cluster, plan, constants), plan))
            continue
        # In a pipeline FSDP reduces gradients once per step under ZeRO-1 and 2: the same time.
        key = tuple({**vars(plan), "zero": 1}.values())
        if key not in twins:
            twins[key] = step_seconds(model, cluster, plan, constants)
        found.append((twins[key], plan))
    return found
