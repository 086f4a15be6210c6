"""Placement: the layers of each pipeline stage, the micro-batches in flight, and the ranks of each group.

Ranks are numbered as in Megatron-LM: the tensor-parallel rank varies fastest, then context, data and pipeline. A group
that spans more ranks than a node has uses the network between nodes (``communication/network.py``).
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import V_SHAPED, Plan


def chunk_sizes(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each of ``chunks`` consecutive chunks, as even as possible.

    The remainder goes to the chunks in the middle, since the first also has the embedding and the last the logits.
    """
    size, extra = divmod(layers, chunks)
    order = [*range(1, chunks - 1), 0, chunks - 1][:extra]
    return tuple(size + (chunk in order) for chunk in range(chunks))


def chunk_rank(chunk: int, pp: int, v_shaped: bool) -> int:
    """The pipeline rank that holds a chunk: looped placement, or down the ranks and back up."""
    return 2 * pp - 1 - chunk if v_shaped and chunk >= pp else chunk % pp


def stage_layers(
    layers: int, pp: int, virtual_stages: int, v_shaped: bool, fixed: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], ...]:
    """The indices of the layers of each pipeline rank.

    Looped placement gives rank r the chunks r, r + pp, ...; V-shaped placement r and 2 pp - 1 - r.
    """
    sizes = fixed or chunk_sizes(layers, pp * virtual_stages)
    starts = [sum(sizes[:chunk]) for chunk in range(len(sizes))]
    held: list[list[int]] = [[] for _ in range(pp)]
    for chunk, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        held[chunk_rank(chunk, pp, v_shaped)] += range(start, start + size)
    return tuple(tuple(chunk) for chunk in held)


def recomputed_share(model: Model, layers: int) -> float:
    """The share of the layers that ``Plan.recompute_layers`` or ``offload_layers`` of ``layers`` applies to; 0: all."""
    return layers / model.num_layers if 0 < layers < model.num_layers else 1


class StageLayout(NamedTuple):
    """The fields of a plan that determine the layers of each pipeline rank. ``fixed``: ``Plan.layers_per_chunk``."""

    pp: int
    virtual_stages: int
    v_shaped: bool
    fixed: tuple[int, ...]


def stage_layout(plan: Plan) -> StageLayout:
    """The layout of a plan's stages."""
    return StageLayout(plan.pp, plan.virtual_stages, plan.schedule in V_SHAPED, plan.layers_per_chunk)


@lru_cache(maxsize=65536)
def layer_counts(model: Model, layout: StageLayout) -> tuple[tuple[int, ...], ...]:
    """Numbers of layers of each of ``Model.kinds`` on each pipeline rank."""
    head, stages = head_rank(layout), stage_layers(model.num_layers, *layout)
    return tuple(kind_counts(model, layers, head=rank == head) for rank, layers in enumerate(stages))


def kind_counts(model: Model, layers: Iterable[int], *, head: bool = False) -> tuple[int, ...]:
    """Numbers of layers of each of ``Model.kinds`` among these indices of layers; ``head``: and those of multi-token
    prediction, which are before the loss."""
    found = [model.kind_of[layer] for layer in layers]
    found += model.kind_of[model.num_layers :] if head else ()
    return tuple(found.count(kind) for kind in range(len(model.kinds)))


def chunk_layers(model: Model, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The indices of the layers of each chunk, in the order of the model."""
    sizes = plan.layers_per_chunk or chunk_sizes(model.num_layers, plan.pp * plan.virtual_stages)
    return tuple(tuple(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes)))


def head_rank(layout: StageLayout) -> int:
    """The pipeline rank that computes logits and loss: the last, or the first of a V-shaped schedule."""
    return 0 if layout.v_shaped else layout.pp - 1


def in_flight(plan: Plan, stage: int) -> float:
    """Largest number of micro-batches whose activations a pipeline rank holds, in units of all its layers.

        GPipe           m
        1F1B            p - i                                                  arXiv:2104.04473, section 2.2
        interleaved     (2 (p - 1 - i) + (v - 1) p + 1) / v                    arXiv:2205.05198, section 4.2.2
        ZB-H1           p                                                      arXiv:2401.10241, section 2.3
        ZB-2p           2 p
        ZB-V            p, at most (m + 1 + i) / 2                             arXiv:2401.10241, section 6
        DualPipe-V      p + 1/2                                                github.com/deepseek-ai/DualPipe

    with p stages, v chunks each and m micro-batches, for stage i counted from 0; never more than m.
    """
    return held_at(stage, plan.schedule, plan.pp, plan.virtual_stages, plan.micro_batches)


def held_at(stage: int, schedule: str, p: int, v: int, m: int) -> float:
    """``in_flight`` of a plan with these fields."""
    if p == 1:
        return 1.0
    if schedule == "interleaved":
        return min(float(m), (2 * (p - 1 - stage) + (v - 1) * p + 1) / v)
    if schedule == "1f1b":
        return min(float(m), p - stage)
    if schedule == "zb-v":
        return min(float(m), p, (m + 1 + stage) / 2)  # filled by 2 p micro-batches; fewer come back before
    return min(float(m), {"gpipe": m, "zb-h1": p, "zb-2p": 2 * p, "dualpipe-v": p + 0.5}[schedule])


def group_stride(plan: Plan, group: str) -> int:
    """Distance in ranks between neighbours of a group."""
    if group in ("dp", "cp"):  # gradients are reduced over dp and cp together
        return plan.tp
    if group == "ep":
        return plan.expert_shards
    return {"tp": 1, "dp_replicate": plan.tp * plan.cp * plan.dp_shard, "pp": plan.tp * plan.cp * plan.dp}[group]


def group_size(plan: Plan, group: str) -> int:
    """Number of ranks of a group.

    ``"dp"`` is the group that reduces gradients: ``dp * cp`` ranks, or with ZeRO the ``dp_shard * cp`` ranks of one
    replica. ``"dp_replicate"`` is the group of replicas, of one rank without ZeRO.
    """
    replicas = plan.dp_replicate if plan.zero else 1
    if group == "dp":
        return plan.dp // replicas * plan.cp
    return replicas if group == "dp_replicate" else {"tp": plan.tp, "cp": plan.cp, "ep": plan.ep, "pp": plan.pp}[group]


def expert_replicas(plan: Plan) -> int:
    """Number of ranks that ZeRO shards an expert over, of those that ``group_size(plan, "dp")`` counts and the
    tensor-parallel ones."""
    if plan.copied_experts:
        return group_size(plan, "dp")
    return group_size(plan, "dp") * plan.tp // (plan.expert_shards * plan.ep)


def leaves_node(cluster: Cluster, plan: Plan, group: str) -> bool:
    """Whether a group spans several nodes."""
    size = group_size(plan, group)
    return size > 1 and group_stride(plan, group) * size > cluster.node_size
