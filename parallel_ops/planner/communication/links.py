"""Traffic of a plan by group and collective; the formulas are in ``parallel_ops/planner/communication/traffic.py``."""

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.efficiency import Efficiency, efficiency
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import Transfer
from parallel_ops.planner.search.feasibility import check
from parallel_ops.planner.step import Step


def communication(
    model: Model, cluster: Cluster, plan: Plan, *, constants: Efficiency | None = None
) -> tuple[Transfer, ...]:
    """Bytes and seconds of a step by group and collective, as one GPU of the slowest stage sees them.

    Args:
        plan: of as many GPUs as ``cluster`` has.
        constants: efficiencies of the hardware; ``None`` for those of the GPU's generation.

    Raises:
        ValueError: the plan cannot run, with the reason.
    """
    check(model, cluster, plan)
    return Step(model, cluster, plan, constants or efficiency(cluster.gpu.generation)).transfers()
