"""ZB-V and DualPipe-V: two stages per rank, placed down the ranks and back up, so that the last stage is on rank 0.

Rank r holds stages r and 2p - 1 - r. The forward pass of a micro-batch ends on rank 0, where its backward pass starts
at once, and every rank holds the same amount of activations.

    ZB-V        (Qi et al., arXiv:2401.10241, section 6) no bubble if F, I and W take equal times, in the memory of
                1F1B.
    DualPipe-V  (DeepSeek-V3, arXiv:2412.19437; this form, on half the ranks: github.com/deepseek-ai/DualPipe) the F of
                one stage overlaps with the B of the other, to hide the all-to-alls of experts.

Both fill their pipelines with 2p micro-batches. ZB-V also runs with fewer, with more bubble.
"""

from collections import deque

from parallel_ops.planner.schedules.action import Action, Kind, Schedule, first_micro_batches, v_stages


class _Rank:
    """Builder of the order of one rank."""

    def __init__(self, pp: int, rank: int) -> None:
        self.stages = v_stages(pp, rank)
        self.order: list[Action] = []
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.deferred: deque[Action] = deque()

    def add(self, kind: Kind, chunk: int, *, paired: bool = False) -> None:
        """Appends the pass ``kind`` of the next micro-batch of a chunk."""
        counts = self.forwards if kind == "F" else self.backwards
        action = Action(kind, counts[chunk], self.stages[chunk], paired)
        counts[chunk] += 1
        self.order.append(action)
        if kind == "I":
            self.deferred.append(action._replace(kind="W"))

    def weight_gradient(self, chunk: int | None = None) -> None:
        """Appends the oldest deferred W, of one chunk or of both, if there is one."""
        waiting = (action for action in self.deferred if chunk is None or action.stage == self.stages[chunk])
        if (oldest := next(waiting, None)) is not None:
            self.deferred.remove(oldest)
            self.order.append(oldest)


def zb_v(pp: int, micro_batches: int) -> Schedule:
    """ZB-V."""
    padded = max(micro_batches, 2 * pp)
    return first_micro_batches((_zb_v_order(pp, rank, padded) for rank in range(pp)), micro_batches)


def _zb_v_order(pp: int, rank: int, micro_batches: int) -> list[Action]:
    out = _Rank(pp, rank)
    for _ in range(2 * (pp - rank) - 1):
        out.add("F", 0)
    for _ in range(rank):
        out.add("F", 1)
        out.add("F", 0)
    for _ in range(pp - rank):
        out.add("F", 1)
        out.add("I", 1)
        out.weight_gradient()
    while out.forwards[1] < micro_batches:
        if out.forwards[0] < micro_batches:
            out.add("F", 0)
        out.add("I", 0)
        out.weight_gradient()
        out.add("F", 1)
        out.add("I", 1)
        out.weight_gradient()
    # Drain: the remaining I first; deferred W fill the idle time.
    for _ in range(rank):
        out.add("I", 0)
        out.add("I", 1)
    while out.backwards[0] < micro_batches:
        out.add("I", 0)
        out.weight_gradient(0)
    for chunk in (1, 0):
        for _ in range(len(out.deferred)):
            out.weight_gradient(chunk)
    return out.order


def dualpipe_v(pp: int, micro_batches: int) -> Schedule:
    """DualPipe-V, for at least ``2 * pp`` micro-batches, with pairs of F and B (``Action.paired``)."""
    return [_dualpipe_v_order(pp, rank, micro_batches) for rank in range(pp)]


def _dualpipe_v_order(pp: int, rank: int, micro_batches: int) -> list[Action]:
    out = _Rank(pp, rank)
    last = pp - 1 - rank
    for _ in range(2 * last):
        out.add("F", 0)
    for _ in range(rank + 1):
        out.add("F", 0)
        out.add("F", 1)
    for _ in range(last):
        out.add("I", 1)
        out.weight_gradient()
        out.add("F", 1)
    for i in range(micro_batches - 2 * pp + rank + 1):
        # The last rank holds two consecutive stages: a first pair there would depend on itself.
        out.add("F", 0, paired=i > 0 or last > 0)
        out.add("B", 1)
        out.add("F", 1, paired=True)
        out.add("B", 0)
    for _ in range(last):
        out.add("B", 1)
        out.add("F", 1, paired=True)
        out.add("B", 0)
    # Drain: half of it with whole backward passes, then I alone, so that W fill the idle time at the end.
    for i in range(2 * (rank + 1)):
        out.add("I" if i >= rank + 1 else "B", 1 - i % 2)
    for _ in range(last):
        out.weight_gradient()
        out.add("I", 0)
    while out.deferred:
        out.weight_gradient()
    return out.order
