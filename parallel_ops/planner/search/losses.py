"""Why a plan takes longer than another: by cause of time, and the memory that keeps it from a faster variant."""

from typing import NamedTuple

from parallel_ops.planner.feasibility import problem, quick_memory_problem
from parallel_ops.planner.plan import OFFLOAD, RECOMPUTE, unchecked
from parallel_ops.planner.results import Estimate


class Loss(NamedTuple):
    """A plan beside the first one of a search.

    Attributes:
        parts: seconds of a step that it takes more than the first (negative: less), by cause: ``"recomputation"``,
            ``"compute"``, ``"bubble"``, ``"exposed"`` communication, ``"optimizer"``. They add up to the difference.
        recompute, offload: of the variant with the next less of them, for which memory is too small; empty if there is
            none.
        excess: bytes that this variant lacks.
    """

    parts: dict[str, float]
    recompute: str = ""
    offload: str = ""
    excess: float = 0.0


def loss(first: Estimate, other: Estimate) -> Loss:
    """The loss of ``other`` against ``first``."""
    mine, theirs = _parts(first), _parts(other)
    found = Loss({name: theirs[name] - mine[name] for name in mine})
    plan = other.plan
    for recompute, offload in _less(plan.recompute, plan.offload):
        variant = unchecked(plan, recompute=recompute, offload=offload)
        if problem(other.model, other.cluster, variant):
            continue
        if (lacks := quick_memory_problem(other.model, other.cluster, variant)) is not None:
            return found._replace(recompute=recompute, offload=offload, excess=lacks.excess)
    return found


def _parts(estimate: Estimate) -> dict[str, float]:
    again = estimate.compute * (1 - estimate.model_flops / estimate.hardware_flops)
    parts = {name: getattr(estimate, name) for name in ("compute", "bubble", "exposed", "optimizer")}
    return {"recomputation": again, **parts, "compute": estimate.compute - again}


def _less(recompute: str, offload: str) -> list[tuple[str, str]]:
    """The combinations that come before one in a search, the nearest first."""
    if recompute not in RECOMPUTE or offload not in OFFLOAD:
        return []
    pairs = [(kind, kept) for kept in OFFLOAD for kind in RECOMPUTE]
    return pairs[: pairs.index((recompute, offload))][::-1]
