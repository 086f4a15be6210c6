"""Actions of a pipeline schedule.

A model is cut into ``pp * chunks`` stages, ``chunks`` on each rank, and a batch into micro-batches. Each stage computes
for each micro-batch

    F  the forward pass,                        after F of the stage before;
    I  the gradient of the stage's input,       after its own F and after I (or B) of the stage behind;
    W  the gradient of the stage's weights,     after its own I;
    B  I and W together, the whole backward pass. Its gradient leaves at the end of B, or after I
       (``Times.input_grad_first``).

A schedule is the order of these: one list of actions per rank, without times.

The split of B into I and W: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241 (which writes B for I).
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "I", "W", "B"]

# Schedules with B; the others run I and W apart throughout.
WHOLE_BACKWARD = ("gpipe", "1f1b", "interleaved", "dualpipe-v")


class Action(NamedTuple):
    """One pass of one stage over one micro-batch.

    Attributes:
        kind: F, I, W or B.
        micro_batch: from 0.
        stage: from 0 over the whole model. The chunk of the rank that it belongs to is ``stage // pp``, in both
            placements: looped (stage ``c * pp + r`` on rank ``r``) and V-shaped (stages ``r`` and ``2 * pp - 1 - r``).
        paired: an F that overlaps with the next action of the rank, a B (DualPipe's overlapped pair). Both start when
            both can, and end together.
    """

    kind: Kind
    micro_batch: int
    stage: int
    paired: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"


Schedule = list[list[Action]]


def without_pairs(schedule: Iterable[Sequence[Action]]) -> Schedule:
    """The same actions, those of DualPipe's pairs one after the other."""
    return [[action._replace(paired=False) for action in order] for order in schedule]


def v_stages(pp: int, rank: int) -> tuple[int, int]:
    """The two stages of a rank in the V-shaped placement, down the ranks and back up."""
    return rank, 2 * pp - 1 - rank


def first_micro_batches(schedule: Iterable[Sequence[Action]], micro_batches: int) -> Schedule:
    """The schedule restricted to its first ``micro_batches`` micro-batches. It must not have paired actions.

    The result can run, since no action depends on another micro-batch. A family that needs a least number of
    micro-batches can so serve fewer.
    """
    return [[action for action in order if action.micro_batch < micro_batches] for order in schedule]


def micro_batch_problem(kind: str, pp: int, micro_batches: int) -> str | None:
    """Why a schedule cannot run this number of micro-batches on ``pp`` ranks; ``None`` if it can.

    Interleaved 1F1B takes rounds of ``pp`` micro-batches, as Megatron-LM does; torch.distributed.pipelining also has
    longer rounds. DualPipe-V fills both directions first, as in github.com/deepseek-ai/DualPipe and in torch.
    """
    if kind == "interleaved" and micro_batches % pp:
        return f"interleaved 1F1B needs micro-batches in multiples of PP {pp}; there are {micro_batches}"
    if kind == "dualpipe-v" and micro_batches < 2 * pp:
        return f"DualPipe-V needs {2 * pp} micro-batches for PP {pp}; there are {micro_batches}"
    return None


def nearest_micro_batches(kind: str, pp: int, micro_batches: int) -> tuple[int, ...]:
    """The nearest numbers of micro-batches, below and above, that a schedule can run on ``pp`` ranks."""
    if micro_batch_problem(kind, pp, micro_batches) is None:
        return (micro_batches,)
    if kind == "dualpipe-v":
        return (2 * pp,)
    below = micro_batches // pp * pp
    return (below, below + pp) if below else (pp,)
