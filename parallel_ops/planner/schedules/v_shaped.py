"""ZB-V and DualPipe-V: two stages on each rank, placed down the ranks and back up, so that the last stage is on rank 0.

Rank r holds stage r and stage 2p - 1 - r. A micro-batch ends where it began, so its backward pass starts on rank 0
without a way back, and every rank holds the same amount of activations.

    ZB-V        (Qi et al., arXiv:2401.10241, section 6) no bubble where F, I and W take equal times, in the memory of
                1F1B.
    DualPipe-V  (DeepSeek-V3, arXiv:2412.19437; this form, on half the ranks: github.com/deepseek-ai/DualPipe) the F of
                one stage runs together with the B of the other, to hide the all-to-alls of experts.

Both fill their pipelines with 2p micro-batches. ZB-V also runs with fewer, with more bubble.
"""

from collections import deque

from parallel_ops.planner.schedules.action import Action, Kind, Schedule, first_micro_batches, v_stages


class _Rank:
    """The order of one rank as it is written down."""

    def __init__(self, pp: int, rank: int) -> None:
        self.stages = v_stages(pp, rank)
        self.order: list[Action] = []
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.put_off: deque[Action] = deque()

    def add(self, kind: Kind, chunk: int, *, paired: bool = False) -> None:
        """The next micro-batch of a pass of a stage."""
        counts = self.forwards if kind == "F" else self.backwards
        action = Action(kind, counts[chunk], self.stages[chunk], paired)
        counts[chunk] += 1
        self.order.append(action)
        if kind == "I":
            self.put_off.append(action._replace(kind="W"))

    def weight_gradient(self, chunk: int | None = None) -> None:
        """The W that has waited longest, of one stage or of both; nothing if none waits."""
        waiting = (action for action in self.put_off if chunk is None or action.stage == self.stages[chunk])
        if (oldest := next(waiting, None)) is not None:
            self.put_off.remove(oldest)
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
    # What is left of I goes out first; the W that were put off fill the waiting between.
    for _ in range(rank):
        out.add("I", 0)
        out.add("I", 1)
    while out.backwards[0] < micro_batches:
        out.add("I", 0)
        out.weight_gradient(0)
    for chunk in (1, 0):
        for _ in range(len(out.put_off)):
            out.weight_gradient(chunk)
    return out.order


def dualpipe_v(pp: int, micro_batches: int) -> Schedule:
    """DualPipe-V, of at least ``2 * pp`` micro-batches. A pair of F and B counts as one pass: see ``Action.paired``."""
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
        # On the last rank both stages meet: its first pair would wait for itself to come round.
        out.add("F", 0, paired=i > 0 or last > 0)
        out.add("B", 1)
        out.add("F", 1, paired=True)
        out.add("B", 0)
    for _ in range(last):
        out.add("B", 1)
        out.add("F", 1, paired=True)
        out.add("B", 0)
    # The drain: half of it with whole backward passes, then I alone, so that W are left for the waiting at the end.
    for i in range(2 * (rank + 1)):
        out.add("I" if i >= rank + 1 else "B", 1 - i % 2)
    for _ in range(last):
        out.weight_gradient()
        out.add("I", 0)
    while out.put_off:
        out.weight_gradient()
    return out.order
