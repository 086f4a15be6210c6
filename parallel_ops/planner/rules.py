"""Rules of thumb. Each is a named function that returns why a plan breaks the rule, or None.

Source of the first four: Narayanan et al., arXiv:2104.04473, "takeaways" 1 to 3 and section 3.3.
"""

from collections.abc import Callable
from dataclasses import replace

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.software import constants_of
from parallel_ops.planner.feasibility import problem, quick_memory_problem
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import leaves_node
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.step import step_seconds

Rule = Callable[[Model, Cluster, Plan, Efficiency], str | None]

MICRO_BATCHES = (1, 2, 4, 8, 16)
# Differences below 2 % are not reported.
NOTABLE = 0.98


def tensor_parallel_inside_node(model: Model, cluster: Cluster, plan: Plan, constants: Efficiency) -> str | None:
    """Tensor-parallel groups stay inside a node: they communicate in every layer."""
    if plan.tp > 1 and cluster.topology == "fat-tree" and leaves_node(cluster, plan, "tp"):
        return f"TP {plan.tp} leaves the node of {cluster.node_size} GPUs"
    return None


def pipeline_across_nodes(model: Model, cluster: Cluster, plan: Plan, constants: Efficiency) -> str | None:
    """Pipeline parallelism crosses nodes only once tensor parallelism fills a node."""
    if plan.pp > 1 and plan.tp * plan.cp < cluster.node_size and plan.tp * plan.cp * plan.pp > cluster.node_size:
        larger = plan.tp * 2
        if larger <= cluster.node_size and model.num_heads % larger == 0 and not model.experts:
            return f"PP {plan.pp} crosses nodes while TP {plan.tp} leaves room in a node of {cluster.node_size} GPUs"
    return None


def model_parallel_just_fits(model: Model, cluster: Cluster, plan: Plan, constants: Efficiency) -> str | None:
    """Model parallelism is just large enough: with half of it and twice the data parallelism the plan does not fit."""
    for name in ("pp", "tp"):
        size = getattr(plan, name)
        if name == "tp" and plan.expert_tp > size // 2:
            continue
        if size % 2 or plan.global_batch % (2 * plan.dp * plan.micro_batch):
            continue
        changes = {name: size // 2, "dp": 2 * plan.dp}
        if name == "pp" and size == 2:
            changes |= {"schedule": "1f1b", "virtual_stages": 1}
        if name == "tp" and size == 2:
            changes |= {"sequence_parallel": False}
        smaller = replace(plan, layers_per_chunk=(), **changes)
        if problem(model, cluster, smaller) is None and quick_memory_problem(model, cluster, smaller) is None:
            return f"{name.upper()} {size // 2} with twice the DP would fit too"
    return None


def enough_micro_batches(model: Model, cluster: Cluster, plan: Plan, constants: Efficiency) -> str | None:
    """At least four micro-batches per pipeline stage keep the bubble small (arXiv:1811.06965, section 3.2)."""
    if plan.pp > 1 and plan.schedule in ("gpipe", "1f1b") and plan.micro_batches < 4 * plan.pp:
        return f"{plan.micro_batches} micro-batches for PP {plan.pp}; the bubble is small from {4 * plan.pp} on"
    return None


def sequence_parallel_with_tensor_parallel(
    model: Model, cluster: Cluster, plan: Plan, constants: Efficiency
) -> str | None:
    """Tensor parallelism is used with sequence parallelism: the same traffic in less memory (arXiv:2205.05198, section
    4.2.2)."""
    if plan.tp > 1 and not plan.sequence_parallel:
        return f"TP {plan.tp} without sequence parallelism keeps activations that could be sharded"
    return None


def micro_batch_of_least_time(model: Model, cluster: Cluster, plan: Plan, constants: Efficiency) -> str | None:
    """The micro-batch that makes ``(b' / b + p - 1) t(b)`` least: large matmuls against a small bubble (eq. 1)."""
    seconds = step_seconds(model, cluster, plan, constants)
    best, least = plan.micro_batch, seconds
    for size in MICRO_BATCHES:
        if size == plan.micro_batch or plan.global_batch % (plan.dp * size):
            continue
        other = replace(plan, micro_batch=size)
        if problem(model, cluster, other) or quick_memory_problem(model, cluster, other):
            continue
        if (found := step_seconds(model, cluster, other, constants)) < least * NOTABLE:
            best, least = size, found
    if best == plan.micro_batch:
        return None
    return f"micro-batches of {best} would take {1 - least / seconds:.0%} less time"


def recompute_last(model: Model, cluster: Cluster, plan: Plan, constants: Efficiency) -> str | None:
    """Full recomputation is used only if the plan does not fit without it (arXiv:2205.05198, section 5)."""
    if plan.recompute == "full":
        without = replace(plan, recompute="selective")
        if quick_memory_problem(model, cluster, without) is None:
            return "full recomputation, though selective recomputation would fit"
    return None


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        tensor_parallel_inside_node,
        pipeline_across_nodes,
        model_parallel_just_fits,
        enough_micro_batches,
        micro_batch_of_least_time,
        sequence_parallel_with_tensor_parallel,
        recompute_last,
    )
}


def broken_rules(
    model: Model, cluster: Cluster, plan: Plan, constants: Efficiency | None = None
) -> tuple[tuple[str, str], ...]:
    """Name and reason of each rule that the plan breaks. ``constants``: efficiencies, ``None`` for those of today."""
    constants = constants or constants_of(cluster)
    found = ((name, rule(model, cluster, plan, constants)) for name, rule in RULES.items())
    return tuple((name, reason) for name, reason in found if reason)
