"""Uneven pipeline stages that minimise the time of the slowest rank.

They pay off since the last chunk also has the output embedding and the loss (as expensive as several layers of a small
model), a cluster may have two kinds of GPUs, and the first layers of a mixture of experts may be dense.
"""

import heapq
from functools import lru_cache

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.work import Work, work_of
from parallel_ops.planner.model import Model
from parallel_ops.planner.passes import Costs, costs_of
from parallel_ops.planner.placement import StageLayout, chunk_rank, chunk_sizes, kind_counts
from parallel_ops.planner.plan import V_SHAPED, Plan

# Least relative gain of the slowest rank for which uneven stages are used.
WORTH = 0.005
# Resolution of the cost of the ends of the model, in layers.
_STEP = 0.05


def balanced_chunks(model: Model, cluster: Cluster, plan: Plan, constants: Efficiency) -> tuple[int, ...]:
    """Layers of each chunk (at least 1) for ``Plan.layers_per_chunk``; empty if an even split is as good."""
    if plan.pp == 1 or plan.pp * plan.virtual_stages > model.num_layers:
        return ()
    layout = StageLayout(plan.pp, plan.virtual_stages, plan.schedule in V_SHAPED, ())
    return _chunks(model, cluster, constants, work_of(plan), layout, plan.hides_dispatch)


@lru_cache(maxsize=65536)
def _chunks(
    model: Model, cluster: Cluster, constants: Efficiency, work: Work, layout: StageLayout, paired: bool
) -> tuple[int, ...]:
    pp, chunks = layout.pp, layout.pp * layout.virtual_stages
    gpus = cluster.stage_gpus(pp)
    head_gpu = gpus[chunk_rank(chunks - 1, pp, layout.v_shaped)]
    usual, dense, none, after = _counts(model)
    parts = {gpu: costs_of(model, cluster, gpu, constants, work, paired) for gpu in set(gpus)}
    costs = {gpu: _seconds(each, usual) / sum(usual) for gpu, each in parts.items()}
    if paired:  # what does not repeat has no other pass beside it
        parts = {gpu: costs_of(model, cluster, gpu, constants, work, False) for gpu in (gpus[0], head_gpu)}
    first = _seconds(parts[gpus[0]], none, (True, False)) / costs[gpus[0]]
    head = _seconds(parts[head_gpu], after, (False, True))
    if model.dense_layers:
        first += _seconds(parts[gpus[0]], dense) / costs[gpus[0]] - model.dense_layers
    slowest = max(costs.values())
    speeds = tuple(round(slowest / costs[gpu], 3) for gpu in gpus)
    extra = round(head / costs[head_gpu] / _STEP), round(first / _STEP)
    return _balanced(model.num_layers, pp, layout.virtual_stages, layout.v_shaped, speeds, extra)


def _seconds(costs: Costs, layers: tuple[int, ...], ends: tuple[bool, bool] = (False, False)) -> float:
    return sum(part.total for part in costs.of_chunk(layers, ends))


@lru_cache(maxsize=1024)
def _counts(model: Model) -> tuple[tuple[int, ...], ...]:
    """Numbers of layers of each of ``Model.kinds``: of those behind the dense ones, of these, of none, and of those
    before the loss."""
    usual = kind_counts(model, range(min(model.dense_layers, model.num_layers - 1), model.num_layers))
    dense = kind_counts(model, range(model.dense_layers))
    return usual, dense, kind_counts(model, ()), kind_counts(model, (), head=True)


@lru_cache(maxsize=4096)
def _balanced(
    layers: int, pp: int, virtual_stages: int, v_shaped: bool, speeds: tuple[float, ...], extra: tuple[int, int]
) -> tuple[int, ...]:
    """``speeds``: relative speed of each rank. ``extra``: cost of the last and the first end, in ``_STEP`` layers."""
    chunks = pp * virtual_stages
    ranks = [chunk_rank(chunk, pp, v_shaped) for chunk in range(chunks)]
    beside = [0.0] * chunks
    beside[-1], beside[0] = extra[0] * _STEP, extra[1] * _STEP

    def slowest(sizes: tuple[int, ...]) -> float:
        loads = [0.0] * pp
        for size, more, rank in zip(sizes, beside, ranks, strict=True):
            loads[rank] += (size + more) / speeds[rank]
        return max(loads)

    sizes = [1] * chunks
    own: list[list[int]] = [[] for _ in range(pp)]
    for chunk, rank in enumerate(ranks):
        own[rank].append(chunk)
    # Greedy: each layer goes to the rank that would finish it first, there to the smallest chunk. Ties go to the last
    # rank, which holds the fewest micro-batches.
    heap = [((sum(1 + beside[c] for c in own[rank]) + 1) / speeds[rank], -rank) for rank in range(pp)]
    heapq.heapify(heap)
    for _ in range(layers - chunks):
        finish, negative = heapq.heappop(heap)
        chunk = min(own[-negative], key=lambda c: sizes[c] + beside[c])
        sizes[chunk] += 1
        heapq.heappush(heap, (finish + 1 / speeds[-negative], negative))
    even = slowest(chunk_sizes(layers, chunks))
    return tuple(sizes) if slowest(tuple(sizes)) < even * (1 - WORTH) else ()
