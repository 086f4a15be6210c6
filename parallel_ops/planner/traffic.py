"""Bytes and seconds of communication, by group and collective.

M parameters of a GPU in bytes, s sequence over cp, b micro-batch, h hidden, k experts a token:

    data       ZeRO-0 all-reduce of the gradients, 2 M; ZeRO-1 and 2 reduce-scatter and all-gather, 2 M; ZeRO-3 gathers
               the parameters forward and backward and reduce-scatters, 3 M, for every micro-batch. arXiv:1910.02054,
               section 7. Replicas of N shards (HSDP) all-reduce what is reduced, 2 M / N
    tensor     4 all-reduces of 2 s b h bytes a layer and micro-batch, or with sequence parallelism 6 all-gathers, two
               of them again for the gradients of weights, 4 reduce-scatters and the gradients of norms; 2 more with
               full recomputation. arXiv:1909.08053, arXiv:2205.05198. Beside the layers, in each micro-batch: the sum
               of the embeddings, the gradient before the output embedding, three numbers a token for the loss
    pipeline   2 s b h bytes each way between stages, a micro-batch and chunk; over tp with scatter/gather or sequence
               parallelism, then all-gathered inside the tensor group. arXiv:2104.04473, section 4.1
    context    ring: keys and values go to all ranks forward, they again and their gradients in fp32 backward, behind
               the attention of the block at hand (arXiv:2310.01889); all-to-all: q, k, v and the output change from
               shards of the sequence to shards of the heads and back (arXiv:2309.14509). The formulas are those of
               parallel_ops/context_parallel/cost.py
    expert     dispatch and combine, an all-to-all of 2 s b h k bytes each, forward and backward (arXiv:2006.16668);
               a node that holds several of a token's experts gets it once (arXiv:2412.19437, section 3.2.2), and fp8
               dispatches in one byte
    host       gradients to the host and parameters back, once a step; activations there and back. arXiv:2101.06840
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from parallel_ops.context_parallel import cost
from parallel_ops.planner import collectives
from parallel_ops.planner.cluster import Cluster, Link
from parallel_ops.planner.compute import Passes, Work, attention_seconds
from parallel_ops.planner.efficiency import HOST_LINK, Efficiency
from parallel_ops.planner.memory import end_parameters, layer_activations, stage_parameters, state_bytes
from parallel_ops.planner.model import Model
from parallel_ops.planner.network import group_link
from parallel_ops.planner.placement import group_size, layer_counts, layout_of, leaves_node
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import Transfer


@dataclass(frozen=True)
class LayerTraffic:
    """Communication of one layer for one micro-batch: seconds that computation waits, and transfers with counts of
    1."""

    exposed: Passes
    transfers: tuple[tuple[Transfer, int], ...]


@lru_cache(maxsize=65536)
def layer_traffic(model: Model, cluster: Cluster, work: Work, efficiency: Efficiency, sparse: bool) -> LayerTraffic:
    """Communication inside one layer, for one micro-batch."""
    plan = _plan_of(work)
    found: list[tuple[Transfer, int]] = []
    forward = backward = 0.0
    width = state_bytes(plan)[0]
    tokens = model.sequence * plan.micro_batch / plan.cp
    size = width * tokens * model.hidden
    again = 1 if plan.recompute == "full" else 0
    if plan.tp > 1:
        link = group_link(cluster, plan, "tp", efficiency)
        if plan.sequence_parallel:
            seconds = 2 * (collectives.ring_all_gather(plan.tp, size, link) + start(efficiency, plan.tp))
            sent = (plan.tp - 1) / plan.tp * size
            for kind, times in (("all-gather", 6), ("reduce-scatter", 4)):
                found.append((_transfer("tp", kind, "ring", link, plan.tp, sent, seconds / 2), times + 2 * again))
            found.append((_summed(model.norm_width * width, plan.tp, link, efficiency), 2))
        else:
            algorithm, seconds = collectives.all_reduce(plan.tp, size, link)
            seconds += start(efficiency, plan.tp)
            sent = 2 * (plan.tp - 1) / plan.tp * size
            found.append((_transfer("tp", "all-reduce", algorithm, link, plan.tp, sent, seconds), 4 + 2 * again))
        forward += 2 * seconds
        backward += 2 * seconds
    if plan.ep > 1 and sparse:
        link = group_link(cluster, plan, "ep", efficiency, ring=False)
        routed = size * copies(model, cluster, plan) / plan.tp * (0.75 if plan.dtype == "fp8" else 1.0)
        torus = cluster.topology == "torus"
        seconds = collectives.all_to_all(plan.ep, routed, link, torus=torus) + start(efficiency, plan.ep)
        sent = (plan.ep - 1) / plan.ep * routed
        found.append((_transfer("ep", "all-to-all", "direct", link, plan.ep, sent, seconds), 4 + 2 * again))
        forward += 2 * seconds
        backward += 2 * seconds
    if plan.cp > 1:
        there, back, exposed = _context(model, cluster, plan, work, efficiency, tokens, width)
        found += [(transfer, count * (1 + again)) for transfer, count in there] + back
        forward += exposed[0]
        backward += exposed[1]
    return LayerTraffic(Passes(forward, backward + again * forward, 0.0), tuple(found))


def _plan_of(work: Work) -> Plan:
    return Plan(
        dp=work.dp,
        tp=work.tp,
        cp=work.cp,
        ep=work.ep,
        micro_batch=work.micro_batch,
        global_batch=work.dp * work.micro_batch,
        sequence_parallel=work.sequence_parallel,
        cp_kind=work.cp_kind,
        recompute=work.recompute,
        dtype=work.dtype,
        fused_loss=work.fused_loss,
    )


def copies(model: Model, cluster: Cluster, plan: Plan) -> int:
    """How often a token is sent to be routed: once to each of its experts, or to each of the nodes that hold them."""
    if not leaves_node(cluster, plan, "ep"):
        return model.experts_per_token
    nodes = plan.tp * plan.ep // cluster.node_size
    return min(model.experts_per_token, model.expert_nodes or model.experts_per_token, nodes)


Transfers = list[tuple[Transfer, int]]


def _context(
    model: Model, cluster: Cluster, plan: Plan, work: Work, efficiency: Efficiency, tokens: float, width: int
) -> tuple[Transfers, Transfers, tuple[float, float]]:
    """Transfers of a layer, with their counts, forward and backward, and the seconds that either waits."""
    link = group_link(cluster, plan, "cp", efficiency, ring=plan.cp_kind == "ring")
    if plan.cp_kind == "all-to-all":
        query, key_value, value, heads = (
            n / plan.tp for n in (model.query_width, model.key_value_width, model.value_width, model.heads)
        )
        sizes = cost.heads_sent(tokens, tokens, query, key_value, value, heads, width)
        torus, share = cluster.topology == "torus", (plan.cp - 1) / plan.cp
        waits = [collectives.all_to_all(plan.cp, n, link, torus=torus) + start(efficiency, plan.cp) for n in sizes]
        there, back = (
            [(_transfer("cp", "all-to-all", "direct", link, plan.cp, share * size, seconds), 1)]
            for size, seconds in zip(sizes, waits, strict=True)
        )
        return there, back, (waits[0], waits[1])
    sizes = cost.keys_sent(tokens, tokens, model.key_value_width / plan.tp, width)
    steps, share = plan.cp - 1, cost.ZIGZAG_SHARE
    # Backward, keys and values travel again, and their gradients in messages of their own.
    messages = [
        _transfer("cp", "send-receive", "ring", link, plan.cp, share * size, _message(size, link, efficiency))
        for size in (sizes.forward, sizes.backward - sizes.forward)
    ]
    forward, backward = attention_seconds(model, cluster.gpu, efficiency, work, model.sequence / plan.cp)
    waits = [max(0.0, messages[0].seconds - forward), max(0.0, sum(m.seconds for m in messages) - backward)]
    return (
        [(messages[0], steps)],
        [(message, steps) for message in messages],
        (steps * waits[0], steps * waits[1]),
    )


def _message(size: float, link: Link, efficiency: Efficiency) -> float:
    return collectives.send_receive(size, link) + start(efficiency, 2)


def _summed(size: float, ranks: int, link: Link, efficiency: Efficiency) -> Transfer:
    """A sum over the tensor-parallel ranks."""
    algorithm, seconds = collectives.all_reduce(ranks, size, link)
    seconds += start(efficiency, ranks)
    return _transfer("tp", "all-reduce", algorithm, link, ranks, 2 * (ranks - 1) / ranks * size, seconds)


@lru_cache(maxsize=65536)
def end_traffic(
    model: Model, cluster: Cluster, work: Work, efficiency: Efficiency, first: bool, last: bool
) -> Transfers:
    """What tensor-parallel ranks send before the first layer and after the last, in one micro-batch.

    A table of positions is split as that of tokens, and its rows are those of one sequence. The gradient before the
    output embedding is summed in fp32 by the fused loss, in the model's dtype by that embedding as a linear.
    """
    if work.tp == 1:
        return []
    plan = _plan_of(work)
    link, ranks = group_link(cluster, plan, "tp", efficiency), plan.tp
    width = state_bytes(plan)[0]
    tokens = model.sequence * plan.micro_batch / plan.cp
    found: Transfers = []

    def half(kind: str, size: float, times: int = 1) -> None:
        seconds = collectives.ring_all_gather(ranks, size, link) + start(efficiency, ranks)
        found.append((_transfer("tp", kind, "ring", link, ranks, (ranks - 1) / ranks * size, seconds), times))

    tables = [tokens] * first + [model.sequence / plan.cp] * (first and model.positions == "learned")
    for rows in tables:
        if plan.sequence_parallel:
            half("reduce-scatter", width * rows * model.hidden)
            half("all-gather", width * rows * model.hidden)
        else:
            found.append((_summed(width * rows * model.hidden, ranks, link, efficiency), 1))
    if last:
        summed = (4 if plan.fused_loss else width) * tokens * model.hidden
        if plan.sequence_parallel:
            half("all-gather", width * tokens * model.hidden, 1 if plan.fused_loss else 2)
            half("reduce-scatter", summed)
            found.append((_summed(model.norm_width * width, ranks, link, efficiency), 1))
        else:
            found.append((_summed(summed, ranks, link, efficiency), 1))
        if plan.fused_loss:
            half("all-gather", ranks * 12 * tokens)
        else:
            found.append((_summed(12 * tokens, ranks, link, efficiency), 1))
    return found


def _transfer(
    group: str, collective: str, algorithm: str, link: Link, size: int, sent: float, seconds: float
) -> Transfer:
    return Transfer(
        group=group,
        collective=collective,
        algorithm=algorithm,
        link=link.name,
        size=size,
        count=1,
        bytes=sent,
        seconds=seconds,
        exposed=0.0,
    )


def start(efficiency: Efficiency, ranks: int) -> float:
    """Seconds of a collective beyond latency and bandwidth: it starts when the last rank is there."""
    return efficiency.collective * math.log2(ranks)


@dataclass(frozen=True)
class StepTraffic:
    """Communication of a whole step of one stage outside its layers.

    Attributes:
        link: seconds of one pipeline message between stages, and ``blocking``: of the all-gather after it.
        each: seconds of data-parallel communication beside the forward and the backward pass of each micro-batch
            (ZeRO-3); ``once``: once a step.
        transfers: by group and collective, of the whole step.
    """

    link: float
    blocking: float
    each: tuple[float, float]
    once: float
    transfers: tuple[Transfer, ...]


def repeat(transfer: Transfer, count: int, exposed: float = 0.0) -> Transfer:
    """``count`` times one transfer."""
    return replace(
        transfer,
        count=count,
        bytes=transfer.bytes * count,
        seconds=transfer.seconds * count,
        exposed=exposed,
    )


def step_traffic(model: Model, cluster: Cluster, plan: Plan, efficiency: Efficiency, stage: int) -> StepTraffic:
    """Communication of one step of one stage outside its layers: pipeline, data parallel, host."""
    transfers: list[Transfer] = []
    width, gradient, _ = state_bytes(plan)
    link_seconds = blocking = 0.0
    if plan.pp > 1:
        link = group_link(cluster, plan, "pp", efficiency, ring=False)
        size = width * model.sequence * plan.micro_batch / plan.cp * model.hidden
        split = plan.tp > 1 and (plan.sequence_parallel or plan.scatter_gather)
        sent = size / plan.tp if split else size
        link_seconds = collectives.send_receive(sent, link) + start(efficiency, 2)
        transfers.append(_messages(link, plan.pp, 2 * plan.micro_batches * plan.virtual_stages, sent, link_seconds))
        if split and not plan.sequence_parallel:
            inside = group_link(cluster, plan, "tp", efficiency)
            blocking = collectives.ring_all_gather(plan.tp, size, inside)
    dense, expert = stage_parameters(model, plan, stage)
    ranks = group_size(plan, "dp")
    shared = (dense, ranks), (expert, ranks // plan.ep)
    link = group_link(cluster, plan, "dp", efficiency)
    layers = sum(layer_counts(model, layout_of(plan))[stage])
    ends = sum(end_parameters(model, plan, stage))
    launches = layers * start(efficiency, max(2, ranks))
    each, once, reduced = _data_parallel(link, plan, shared, ends, width, gradient, launches)
    transfers += reduced
    if (replicas := group_size(plan, "dp_replicate")) > 1:
        between = group_link(cluster, plan, "dp_replicate", efficiency)
        owned = gradient * (dense / ranks + expert / (ranks // plan.ep))
        algorithm, seconds = collectives.all_reduce(replicas, owned, between)
        seconds += layers * start(efficiency, replicas)
        sent, times = 2 * (replicas - 1) / replicas * owned, _times_reduced(plan)
        added = _transfer("dp_replicate", "all-reduce", algorithm, between, replicas, sent, seconds)
        transfers.append(repeat(added, times))
        each, once = (each[0], each[1] + seconds) if plan.zero == 3 else each, once + (plan.zero < 3) * times * seconds
    transfers += _host(model, plan, stage, gradient, width)
    return StepTraffic(link_seconds, blocking, each, once, tuple(transfers))


def _messages(link: Link, stages: int, count: int, sent: float, seconds: float) -> Transfer:
    return repeat(_transfer("pp", "send-receive", "direct", link, stages, sent, seconds), count)


def _data_parallel(
    link: Link,
    plan: Plan,
    shared: tuple[tuple[float, int], ...],
    ends: float,
    width: int,
    gradient: int,
    launches: float,
) -> tuple[tuple[float, float], float, tuple[Transfer, ...]]:
    """Seconds beside forward and backward of each micro-batch, and once a step, and the transfers. ``shared``:
    parameters and ranks that share them; ``ends``: of these, those beside the layers, which ZeRO-3 gathers once a
    micro-batch; ``launches``: seconds that one collective a layer takes to start."""
    transfers = []
    forward = backward = once = 0.0
    for kind, count, size, ranks in _reductions(plan, shared, width, gradient):
        if kind == "all-reduce":
            algorithm, seconds = collectives.all_reduce(ranks, size, link)
            sent = 2 * (ranks - 1) / ranks * size
        else:
            algorithm, seconds = "ring", collectives.ring_all_gather(ranks, size, link)
            sent = (ranks - 1) / ranks * size
        seconds += launches
        transfers.append(repeat(_transfer("dp", kind, algorithm, link, ranks, sent, seconds), count))
        if kind == "all-gather" and plan.zero == 3:
            once_gathered = (ranks - 1) / ranks * min(ends, size / width) * width * plan.micro_batches
            transfers[-1] = replace(transfers[-1], bytes=transfers[-1].bytes - once_gathered)
            ends = 0.0
        if count == 1 and plan.zero < 3:
            once += seconds
        elif kind == "all-gather":
            forward, backward = forward + seconds, backward + seconds
        else:
            backward += seconds
    return (forward, backward), once, tuple(transfers)


def _times_reduced(plan: Plan) -> int:
    """How often a step reduces gradients. Under a pipeline, ZeRO-2 adds up whole ones, as torch's runtime does."""
    return plan.micro_batches if plan.zero == 3 or (plan.zero == 2 and plan.pp == 1) else 1


def _reductions(
    plan: Plan, shared: tuple[tuple[float, int], ...], width: int, gradient: int
) -> Iterator[tuple[str, int, float, int]]:
    """Collective, how often a step, bytes of the whole tensor and ranks."""
    for parameters, members in shared:
        if not parameters or members == 1:
            continue
        if plan.zero == 0:
            yield "all-reduce", 1, parameters * gradient, members
            continue
        yield "all-gather", 1 if plan.zero < 3 else 2 * plan.micro_batches, parameters * width, members
        yield "reduce-scatter", _times_reduced(plan), parameters * gradient, members


def _host(model: Model, plan: Plan, stage: int, gradient: int, width: int) -> list[Transfer]:
    """Gradients to the host and parameters back, once a step; activations there and back, every micro-batch."""
    if plan.offload == "none":
        return []
    link = Link(name="host", latency=0.0, bandwidth=HOST_LINK)
    ranks = group_size(plan, "dp")
    dense, expert = stage_parameters(model, plan, stage)
    owned = dense / ranks + expert / (ranks // plan.ep) if plan.zero else dense + expert
    size = owned * (gradient + width)
    out = [_transfer("host", "copy", "direct", link, 1, size, size / HOST_LINK)]
    if plan.offload == "optimizer+activations":
        tokens = model.sequence * plan.micro_batch / plan.cp
        dense_layers, sparse_layers = layer_counts(model, layout_of(plan))[stage]
        layers = [layer_activations(model, plan, False)] * dense_layers
        layers += [layer_activations(model, plan, True)] * sparse_layers
        kept = 2 * tokens * sum(layers)
        out.append(repeat(_transfer("host", "copy", "direct", link, 1, kept, kept / HOST_LINK), plan.micro_batches))
    return out
