"""Fits the three constants of a GPU generation to the rows marked as fitted."""

from dataclasses import replace

from parallel_ops.planner.efficiency import FITTED, Efficiency
from parallel_ops.planner.step import step_seconds
from parallel_ops.planner.validation.published import setting, step_from_tflops, table

_START = Efficiency(matmul=0.7, network=0.7, interference=0.5)
_STEPS = (0.1, 0.05, 0.02, 0.01)


def fit() -> Efficiency:
    """The constants, to two digits, with the smallest sum of squared relative errors of the step time of the fitted
    rows.

    Moves one constant at a time, in ever smaller steps, until none of the moves helps.
    """
    rows = [row for name in ("table 1", "table 2") for row in table("megatron")[name] if row["fitted"]]
    settings = [(*setting("megatron", row), row["tflops"]) for row in rows]

    def loss(constants: Efficiency) -> float:
        errors = (
            step_seconds(model, cluster, plan, constants) / step_from_tflops(model, plan, tflops) - 1
            for model, cluster, plan, tflops in settings
        )
        return sum(error**2 for error in errors)

    best, least = _START, loss(_START)
    for step in _STEPS:
        improved = True
        while improved:
            improved = False
            for name in FITTED:
                for change in (step, -step):
                    value = round(getattr(best, name) + change, 2)
                    if not 0 < value <= 1:
                        continue
                    tried = replace(best, **{name: value})
                    if (found := loss(tried)) < least:
                        best, least, improved = tried, found, True
    return best
