"""The bubble of each schedule as a formula, for stages that take equal times and links that take none.

With F, I and W the times of one stage, p ranks, m micro-batches and v stages on a rank, each rank computes for
``m * v * (F + I + W)`` and is idle for

    GPipe, 1F1B       (p - 1) (F + I + W)           of the work (p - 1) / m, of the step (p - 1) / (m + p - 1)
    interleaved 1F1B  (p - 1) (F + I + W)           of the work (p - 1) / (v m);  m a multiple of p
    ZB-H1             (p - 1) (F + I - W)           W <= F, W <= I, m >= p
    ZB-H2             (p - 1) (F + I - 2W)          W <= F, W <= I, m >= 2p - 1;  without a barrier at the optimizer
    ZB-V, ZB-2p       0                             F = I = W, m >= 2p;  without a barrier
    DualPipe-V        (p - 1) (F + 2I - W)          W <= F = I, m >= 2p;  a pair as long as its two passes

Sources: GPipe arXiv:1811.06965; 1F1B and interleaved arXiv:2104.04473, section 2.2; zero-bubble schedules
arXiv:2401.10241, table 2 and section 6; DualPipe-V github.com/deepseek-ai/DualPipe (where B is I + W). The
conditions are those under which the formula and the simulation agree.

Real links and unequal stages need the simulation: with the timings of arXiv:2401.10241, table 9, the formula for 1F1B
misses the bubble by up to three points.
"""

from collections.abc import Sequence

from parallel_ops.planner.schedules.action import micro_batch_problem
from parallel_ops.planner.schedules.simulate import Times


def closed_form_idle(
    kind: str, pp: int, micro_batches: int, virtual_stages: int = 1, *, times: Times | None = None
) -> float:
    """How long each rank is idle in a step, in the unit of ``times``.

    Args:
        kind: a name in ``parallel_ops.planner.schedule.KINDS``.
        pp: number of pipeline ranks, p.
        micro_batches: m.
        virtual_stages: v, for interleaved 1F1B.
        times: one number each for F, I and W of a stage, and no link; 1 each where None.

    Raises:
        ValueError: ``kind`` has no formula or cannot run so many micro-batches, or these sizes and times are outside
            the formula's conditions; simulate those.
    """
    f, i, w = _numbers(kind, times or Times())
    m = micro_batches
    whole = f + i + w
    small_w = w <= min(f, i)
    formulas: dict[str, tuple[bool, str, float]] = {
        "gpipe": (True, "", whole),
        "1f1b": (True, "", whole),
        "interleaved": (True, "", whole),
        "zb-h1": (small_w and m >= pp, "W <= F, W <= I and m >= p", f + i - w),
        "zb-h2": (small_w and m >= 2 * pp - 1, "W <= F, W <= I and m >= 2p - 1", f + i - 2 * w),
        "zb-v": (f == i == w and m >= 2 * pp, "F = I = W and m >= 2p", 0.0),
        "zb-2p": (f == i == w and m >= 2 * pp, "F = I = W and m >= 2p", 0.0),
        "dualpipe-v": (
            w <= f == i,
            "W <= F = I",
            f + 2 * i - w,
        ),
    }
    if kind not in formulas:
        raise ValueError(f"closed_form: kind must be one of {', '.join(formulas)}, got {kind!r}")
    if pp < 1 or m < 1 or virtual_stages < 1:
        raise ValueError(
            f"closed_form: sizes must be at least 1, got pp {pp}, micro_batches {m}, virtual_stages {virtual_stages}"
        )
    if (reason := micro_batch_problem(kind, pp, m)) is not None:
        raise ValueError(f"closed_form: {reason}")
    holds, condition, per_rank = formulas[kind]
    if not holds and pp > 1:
        raise ValueError(f"closed_form: the formula of {kind} needs {condition}; simulate this one")
    return (pp - 1) * per_rank


def closed_form_bubble(
    kind: str, pp: int, micro_batches: int, virtual_stages: int = 1, *, times: Times | None = None
) -> float:
    """The idle share of a step, ``idle / (work + idle)``: (p - 1) / (m + p - 1) for 1F1B.

    Arguments and errors are those of ``closed_form_idle``. It is the ``bubble`` of a simulation for GPipe, 1F1B,
    interleaved 1F1B, ZB-H1 and DualPipe-V, and the ``bubble_without_barrier`` of every schedule.
    """
    times = times or Times()
    idle = closed_form_idle(kind, pp, micro_batches, virtual_stages, times=times)
    f, i, w = _numbers(kind, times)
    stages = virtual_stages if kind == "interleaved" else 2 if kind in ("zb-v", "dualpipe-v") else 1
    work = micro_batches * stages * (f + i + w)
    return idle / (work + idle) if work + idle else 0.0


def _numbers(kind: str, times: Times) -> tuple[float, float, float]:
    numbers = times.forward, times.input_grad, times.weight_grad
    if any(isinstance(number, Sequence) for number in numbers):
        raise ValueError(f"closed_form: the formula of {kind} has equal stages; simulate this one")
    if times.link != 0 or times.pair is not None:
        raise ValueError(f"closed_form: the formula of {kind} has no time of links or pairs; simulate this one")
    f, i, w = (float(number) for number in numbers if not isinstance(number, Sequence))
    return f, i, w
