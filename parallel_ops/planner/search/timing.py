"""The candidates of a search with their times, counted by one process or by two."""

import contextlib
import io
import pickle
import signal
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan, restored
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


Timed = list[tuple[float, Plan]]
Parts = tuple[list[Any], list[Any]]  # see ``Rejections.taken``


class _Placements:
    """The placements of a search, in groups of the same TP, PP and CP.

    Attributes:
        groups: placements, each with what was rejected since the one before.
        rest: what was rejected after the last placement.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._candidates = Candidates(request.model, request.cluster, request.batch, request.options, request.constants)
        rejected = self._candidates.rejected
        groups: dict[object, list[tuple[Parts, Plan]]] = {}
        for placed in self._candidates.placements():
            before = rejected.taken()
            groups.setdefault((placed.tp, placed.pp, placed.cp), []).append((before, placed))
        self.groups, self.rest = list(groups.values()), rejected.taken()

    def counted(self, number: int) -> list[tuple[Timed, Parts]]:
        """Of each placement of a group: its plans with their seconds, and what was rejected of it."""
        return [
            (_timed(self._request, self._candidates.of_placement(placed)), self._candidates.rejected.taken())
            for _, placed in self.groups[number]
        ]


_Counted = dict[int, list[tuple[Timed, Parts]]]  # by number of the group
_Found = TypeVar("_Found")


def timed_plans(request: Request, processes: int) -> tuple[Timed, Rejections]:
    """Every plan that can run with its seconds per step, in the order of the search, and those that cannot."""
    placements = _Placements(request)
    many = sum(map(len, placements.groups)) >= MANY
    counted = _by_two(request, placements) if processes > 1 and many else {}
    timed, rejected = [], Rejections(request.model, request.cluster)
    for number, group in enumerate(placements.groups):
        found = counted.get(number) or placements.counted(number)
        for (before, _), (plans, parts) in zip(group, found, strict=True):
            timed += plans
            rejected.extend(*before)
            rejected.extend(*parts)
    rejected.extend(*placements.rest)
    return timed, rejected


def _by_two(request: Request, placements: _Placements) -> _Counted:
    """Groups that this process has counted from the first on, and another one from the last on, until they met.

    A group where both stop is missing, and those of the other process if that was killed, say for its memory.
    """
    from multiprocessing import get_context  # takes 20 ms, which small searches and other commands are without

    # Spawned, since a fork of a process with threads may never end. It ends by itself, too, if this one is killed.
    context = get_context("spawn")
    # The groups that either has come to. Without a lock, which a process that is killed might hold.
    reached = context.RawArray("i", (0, len(placements.groups)))
    receiver, sender = context.Pipe(duplex=False)
    other = context.Process(target=_send, args=(sender, request, reached), daemon=True)
    other.start()
    try:
        sender.close()
        found = _until_met(placements.counted, reached)
        with contextlib.suppress(EOFError, OSError):
            for number, written in receiver.recv().items():
                counted = pickle.loads(written)
                found[number] = [([(s, restored(values)) for s, values in timed], parts) for timed, parts in counted]
    finally:
        other.terminate()
        other.join()
        receiver.close()
    return found


@without_collection()
def _until_met(count: Callable[[int], _Found], reached: Any, first: Any = None) -> dict[int, _Found]:
    """What ``count`` returns of the groups in order, up to the one that the other process has come to; in the second
    process, which has the ``first``, in reverse."""
    found, numbers = {}, range(reached[1])
    for number in reversed(numbers) if first else numbers:
        reached[1 if first else 0] = number
        if reached[0] >= reached[1] or (first and not first.is_alive()):
            break
        found[number] = count(number)
    return found


def _send(sender: "Connection", request: Request, reached: Any) -> None:
    from multiprocessing import parent_process

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process is interrupted, too, and ends this one
    placements = _Placements(request)

    def written(number: int) -> bytes:
        stream = io.BytesIO()
        pickler = pickle.Pickler(stream, pickle.HIGHEST_PROTOCOL)
        # Of a plan its values, once: most of a hundred thousand plans are rejected and never read.
        pickler.dispatch_table = {Plan: lambda plan: (tuple, (tuple(vars(plan).values()),))}
        pickler.dump(placements.counted(number))
        return stream.getvalue()

    found = _until_met(written, reached, parent_process())
    with contextlib.suppress(BrokenPipeError):  # the other was killed
        sender.send(found)


def _timed(request: Request, plans: Iterable[Plan]) -> Timed:
    """The plans with their seconds per step."""
    model, cluster, constants = request.model, request.cluster, request.constants
    shared: dict[object, Any] = {}
    made = map(dispatched(request.given, model, cluster), plans)
    return [(step_seconds(model, cluster, plan, constants, shared), plan) for plan in made]
