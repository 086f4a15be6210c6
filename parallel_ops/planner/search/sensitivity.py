"""Sensitivity of the choice of a plan to the constants of ``Efficiency``."""

from collections.abc import Sequence
from dataclasses import replace

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.efficiency import CONSTANTS, RATES, Efficiency
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.precision import FORMATS
from parallel_ops.planner.search.result import Sensitivity
from parallel_ops.planner.step import step_seconds

# Relative change of a constant.
CHANGE = 0.2


def _matters(name: str, model: Model, plans: Sequence[Plan]) -> bool:
    """Whether the step time of any of ``plans`` depends on a constant."""
    if name in ("grouped", "expert_host", "expert_sync", "dispatch"):
        return model.experts > 0
    if name == "host_memory":
        return any("optimizer" in plan.offload for plan in plans)
    if name == "fp8":
        return any(plan.dtype in FORMATS for plan in plans)
    return name != "tp_overlap" or any(plan.tp > 1 for plan in plans)


def sensitivity(
    model: Model, cluster: Cluster, plans: Sequence[Plan], constants: Efficiency
) -> tuple[Sensitivity, ...]:
    """For each constant that matters, the fastest of ``plans`` if it is 20 % lower and 20 % higher (shares at most 1).

    Sorted: constants that change the choice first, then by their effect on the step time.
    """
    if not plans:
        return ()

    def fastest(efficiencies: Efficiency) -> tuple[float, Plan]:
        times = [(step_seconds(model, cluster, plan, efficiencies), index) for index, plan in enumerate(plans)]
        seconds, index = min(times)
        return seconds, plans[index]

    usual, best = fastest(constants)
    found = []
    for name in CONSTANTS:
        value = getattr(constants, name)
        if not value or not _matters(name, model, plans):
            continue
        low = replace(constants, **{name: value * (1 - CHANGE)})
        high = replace(constants, **{name: value * (1 + CHANGE) if name in RATES else min(1.0, value * (1 + CHANGE))})
        spread = step_seconds(model, cluster, best, high) - step_seconds(model, cluster, best, low)
        choices = fastest(low)[1], fastest(high)[1]
        found.append(
            Sensitivity(
                constant=name, low=choices[0], high=choices[1], changes=choices != (best, best), seconds=spread / usual
            )
        )
    return tuple(sorted(found, key=lambda s: (not s.changes, -abs(s.seconds))))
