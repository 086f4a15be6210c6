"""Sensitivity of the choice of a plan to the constants of ``Efficiency``, and of its time to the cluster."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from parallel_ops.planner.cluster import PEAKS, Cluster
from parallel_ops.planner.compute.efficiency import CONSTANTS, RATES, Efficiency
from parallel_ops.planner.feasibility import problem, quick_memory_problem
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.precision import FORMATS, peak_name
from parallel_ops.planner.search.result import Gain, NearMiss, Sensitivity
from parallel_ops.planner.step import StepTime, step_seconds

# Relative change of a constant, or of a rate of the cluster.
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
        shared: dict[object, Any] = {}
        times = ((step_seconds(model, cluster, plan, efficiencies, shared), n) for n, plan in enumerate(plans))
        seconds, number = min(times)
        return seconds, plans[number]

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


def gains(
    model: Model, cluster: Cluster, plan: Plan, constants: Efficiency, misses: Sequence[NearMiss]
) -> tuple[Gain, ...]:
    """``SearchResult.gains`` of the first ``plan``: rates are 20 % higher, memory suffices for the fastest of
    ``misses``, and GPUs are the fewest more that divide the batch."""
    gpu, found = cluster.gpu, []
    faster = {
        "flops": (getattr(gpu, peak_name(plan.dtype)), _with_gpu(cluster, PEAKS)),
        "bandwidth": (gpu.bandwidth, _with_gpu(cluster, ("bandwidth",))),
    }
    for name in ("intra", "inter"):
        link = getattr(cluster, name)
        if cluster.gpus > (
            1 if name == "intra" else cluster.gpus_per_node if cluster.topology != "torus" else math.inf
        ):
            quick = replace(link, bandwidth=link.bandwidth * (1 + CHANGE))
            faster[name] = link.bandwidth, replace(cluster, **{name: quick})
    for name, (rate, machine) in faster.items():
        found.append(Gain(name, rate * CHANGE, plan, StepTime(model, machine, plan, constants).simulated_seconds()))
    if misses:
        miss = min(misses, key=lambda each: each.seconds)
        found.append(Gain("memory", miss.excess, miss.plan, miss.seconds))
    found.sort(key=lambda gain: gain.seconds)
    for more, wider in _wider(model, cluster, plan):
        found.append(
            Gain("gpus", more.gpus - cluster.gpus, wider, StepTime(model, more, wider, constants).simulated_seconds())
        )
        break
    return tuple(found)


def _with_gpu(cluster: Cluster, rates: Sequence[str]) -> Cluster:
    """The cluster with higher ``rates`` of its GPUs."""
    kinds = {
        gpu: replace(gpu, **{name: getattr(gpu, name) * (1 + CHANGE) for name in rates})
        for gpu in (cluster.gpu, *(part.gpu for part in cluster.parts))
    }
    parts = tuple(replace(part, gpu=kinds[part.gpu]) for part in cluster.parts)
    return replace(cluster, gpu=kinds[cluster.gpu], parts=parts)


def _wider(model: Model, cluster: Cluster, plan: Plan) -> Iterator[tuple[Cluster, Plan]]:
    """Larger clusters of one kind of GPU and ``plan`` with more data-parallel ranks of as many GPUs each."""
    step = plan.dp_shard if plan.dp_replicate > 1 else 1
    for dp in range(plan.dp + step, plan.global_batch + 1, step):
        if cluster.parts or plan.global_batch % (dp * plan.micro_batch):
            continue
        with suppress(ValueError):  # sizes that do not divide
            replicas = dp // plan.dp_shard if plan.dp_replicate > 1 else 1
            wider = replace(plan, dp=dp, dp_replicate=replicas)
            more = replace(cluster, gpus=wider.gpus)
            if not (problem(model, more, wider) or quick_memory_problem(model, more, wider)):
                yield more, wider
