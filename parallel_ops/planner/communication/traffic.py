"""Bytes and seconds of communication by group and collective: per micro-batch, in the layers and at both ends of the
model. ``step_traffic.py`` has the communication between stages, data-parallel ranks and the host.

M bytes of parameters per GPU, s sequence length over cp, b micro-batch, h hidden size, k experts per token:

    data       ZeRO-0: all-reduce of the gradients, 2 M. ZeRO-1 and 2: reduce-scatter and all-gather, 2 M. ZeRO-3:
               all-gather forward and backward and reduce-scatter, 3 M, for every micro-batch. arXiv:1910.02054,
               section 7. Replicas of N shards (HSDP) all-reduce the reduced shards, 2 M / N, once per step
    tensor     per layer and micro-batch 4 all-reduces of 2 s b h bytes, or with sequence parallelism 6 all-gathers (two
               of them a second time, for the gradients of weights), 4 reduce-scatters and the gradients of norms; 2
               more with full recomputation. arXiv:1909.08053, arXiv:2205.05198. Per micro-batch, at the ends of the
               model: the sum of the embeddings, the gradient before the output embedding, and three numbers per token
               for the loss
    pipeline   2 s b h bytes each way between stages, per micro-batch and chunk; divided by tp with scatter/gather or
               sequence parallelism, then all-gathered in the tensor group. arXiv:2104.04473, section 4.1
    context    ring: keys and values are sent to all ranks forward, and again with their fp32 gradients backward, behind
               the attention of the current block (arXiv:2310.01889). all-to-all: q, k, v and the output are resharded
               from sequence to heads and back (arXiv:2309.14509). Formulas: parallel_ops/context_parallel/cost.py
    expert     dispatch and combine, an all-to-all of 2 s b h k bytes each, forward and backward (arXiv:2006.16668). A
               node with several of a token's experts receives it once (arXiv:2412.19437, section 3.2.2). fp8
               dispatches in one byte
    host       gradients to the host and parameters back, once per step; activations both ways. arXiv:2101.06840
"""

from dataclasses import dataclass
from functools import lru_cache

from parallel_ops.context_parallel import cost
from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.communication.network import (
    all_to_all_seconds,
    group_link,
    message_seconds,
    start_seconds,
    transfer,
)
from parallel_ops.planner.communication.tensor_parallel import (
    TensorParallelGroup,
    Transfers,
    gradient_width,
    tensor_parallel,
)
from parallel_ops.planner.compute.attention import attention_seconds
from parallel_ops.planner.compute.documents import shares
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.work import PassTimes, Work
from parallel_ops.planner.memory.recomputation import recomputed
from parallel_ops.planner.memory.states import state_bytes
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import leaves_node, recomputed_share
from parallel_ops.planner.plan import PLAN_FIELDS, Plan, unchecked
from parallel_ops.planner.precision import FORMATS
from parallel_ops.planner.results import Transfer

_NONE = PassTimes(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class MicroBatchTraffic:
    """Communication of one layer, or of one end of the model, per micro-batch.

    Attributes:
        exposed: seconds that computation waits.
        beside_products: the part of ``exposed`` that may overlap with matmuls (``Efficiency.tp_overlap``).
        transfers: each transfer and its count.
    """

    exposed: PassTimes
    transfers: tuple[tuple[Transfer, float], ...]
    beside_products: PassTimes = _NONE


@lru_cache(maxsize=65536)
def layer_traffic(
    model: Model, cluster: Cluster, work: Work, efficiency: Efficiency, sparse: bool
) -> MicroBatchTraffic:
    """Communication inside one layer, per micro-batch."""
    plan = _plan_of(work)
    found: Transfers = []
    forward = backward = 0.0
    width = state_bytes(plan)[0]
    tokens = model.seq_length * plan.micro_batch / plan.cp
    size = width * tokens * model.hidden_size
    again = recomputed_share(model, work.recompute_layers) if plan.recompute == "full" else 0
    overlapped = 0.0
    not_again = 0.0
    if plan.tp > 1:
        there, forward, backward, not_again = tensor_parallel(
            model, cluster, plan, work, efficiency, width * tokens, sparse, again
        )
        found += there
        overlapped = backward if plan.sequence_parallel and work.tp_overlap else 0.0
        if plan.copied_experts and sparse:
            size_of_copies = gradient_width(work) * model.experts * model.expert_weights
            copies_summed = TensorParallelGroup(cluster, plan, efficiency).summed(size_of_copies)
            found.append((copies_summed, 1))
            backward += copies_summed.seconds
    if plan.ep > 1 and sparse:
        link = group_link(cluster, plan, "ep", efficiency, ring=False)
        routed = size * copies(model, cluster, plan, work.dispatcher) / plan.tp
        load = model.expert_load(plan.ep, work.capacity_factor)
        routed *= load
        routed *= 0.75 if plan.dtype in FORMATS else 1.0  # dispatched in 8 bits, combined in 16
        routed *= (width + max(width, gradient_width(work))) / (2 * width)  # tokens leave in the dtype of parameters
        torus = cluster.topology == "torus"
        seconds = all_to_all_seconds(plan.ep, routed, link, torus=torus)
        # Kernels of DeepEP and HybridEP start where their first token has arrived.
        seconds += start_seconds(efficiency, plan.ep) if work.dispatcher == "all_to_all" else 0.0
        # The fullest rank gets as many tokens as it returns, and sends those of any rank.
        sent = (plan.ep - 1) / plan.ep * routed * (1 if work.capacity_factor else (1 + load) / (2 * load))
        whole = "moe" in recomputed(plan.recompute, work.flash_attention)
        sent_again = recomputed_share(model, work.recompute_layers) if whole else again
        found.append((transfer("ep", "all-to-all", "direct", link, plan.ep, sent, seconds), 4 + 2 * sent_again))
        forward += 2 * seconds
        backward += (2 + 2 * (sent_again - again)) * seconds
    if plan.cp > 1 and model.mixer:
        there, back, exposed = _context(model, cluster, plan, work, efficiency, tokens, width)
        found += [(each, count * (1 + again)) for each, count in there] + back
        forward += exposed[0]
        backward += exposed[1]
    waits, hidden = (
        PassTimes(forward, backward + again * (forward - not_again), 0.0),
        PassTimes(overlapped, (1 + again) * overlapped, 0.0),
    )
    return MicroBatchTraffic(waits, tuple(found), hidden)


_ANY = Plan()


def _plan_of(work: Work) -> Plan:
    """A plan with the fields of ``work``; ``state_bytes`` and ``group_link`` take a plan."""
    shared = {name: value for name, value in work._asdict().items() if name in PLAN_FIELDS}
    return unchecked(_ANY, **shared, expert_tp=work.expert_shards)


def copies(model: Model, cluster: Cluster, plan: Plan, dispatcher: str) -> float:
    """Copies of a routed token that are sent: one for each of its experts, or with DeepEP and HybridEP one for each
    node, inside a node for each rank, that has some of them.

    k experts, each on one of n nodes or ranks, are on n (1 - (1 - 1/n)^k) of them on average.
    """
    k = model.experts_per_token
    if dispatcher == "all_to_all":
        return k
    if not leaves_node(cluster, plan, "ep"):
        return plan.ep * (1 - (1 - 1 / plan.ep) ** k)
    nodes = max(1, plan.expert_shards * plan.ep // cluster.node_size)
    found = nodes * (1 - (1 - 1 / nodes) ** k) if nodes > 1 else k
    return min(found, model.expert_nodes or found)


def _context(
    model: Model, cluster: Cluster, plan: Plan, work: Work, efficiency: Efficiency, tokens: float, width: int
) -> tuple[Transfers, Transfers, tuple[float, float]]:
    """Context-parallel transfers of a layer with their counts, forward and backward, and the exposed seconds."""
    # A recurrence needs the whole sequence: each rank gets some of its heads.
    ring = plan.cp_kind == "ring" and model.mixer != "recurrent"
    link = group_link(cluster, plan, "cp", efficiency, ring=ring)
    if not ring:
        query, key_value, value, heads = (
            n / plan.tp for n in (model.query_width, model.key_value_width, model.value_width, model.num_heads)
        )
        sizes = cost.heads_sent(tokens, tokens, query, key_value, value, heads, width)
        torus, share = cluster.topology == "torus", (plan.cp - 1) / plan.cp
        waits = [all_to_all_seconds(plan.cp, n, link, torus=torus) + start_seconds(efficiency, plan.cp) for n in sizes]
        there, back = (
            [(transfer("cp", "all-to-all", "direct", link, plan.cp, share * size, seconds), 1.0)]
            for size, seconds in zip(sizes, waits, strict=True)
        )
        return there, back, (waits[0], waits[1])
    sizes = cost.keys_sent(tokens, tokens, model.key_value_width / plan.tp, width)
    steps, of_documents = plan.cp - 1, shares(model, plan.cp)
    share = cost.ZIGZAG_SHARE if of_documents is None else of_documents.sent
    # Backward sends keys and values again, and their gradients in separate messages.
    messages = [
        transfer("cp", "send-receive", "ring", link, plan.cp, share * size, message_seconds(size, link, efficiency))
        for size in (sizes.forward, sizes.backward - sizes.forward)
    ]
    forward, backward = attention_seconds(model, cluster.gpu, efficiency, work, model.seq_length / plan.cp)
    waits = [max(0.0, messages[0].seconds - forward), max(0.0, sum(m.seconds for m in messages) - backward)]
    return (
        [(messages[0], steps)],
        [(message, steps) for message in messages],
        (steps * waits[0], steps * waits[1]),
    )


@lru_cache(maxsize=65536)
def end_traffic(model: Model, cluster: Cluster, work: Work, efficiency: Efficiency, last: bool) -> MicroBatchTraffic:
    """Tensor-parallel communication before the first layer or, with ``last``, after the last one, per micro-batch.

    A table of positions is split like that of tokens, with the rows of one sequence. The fused loss sums the gradient
    before the output embedding in fp32, an unfused output embedding in the model's dtype. Sums of the gradients of
    norms, and inputs gathered again for the gradients of weights, are hidden behind matmuls.
    """
    if work.tp == 1:
        return MicroBatchTraffic(_NONE, ())
    plan = _plan_of(work)
    group = TensorParallelGroup(cluster, plan, efficiency)
    width, wide = state_bytes(plan)[0], gradient_width(work)
    tokens = model.seq_length * plan.micro_batch / plan.cp
    row = width * model.hidden_size
    forward: list[Transfer] = []
    backward: list[Transfer] = []
    hidden: list[Transfer] = []
    if not last:
        for rows in [tokens] + [model.seq_length / plan.cp] * (model.positions == "learned"):
            if plan.sequence_parallel:
                forward.append(group.parted("reduce-scatter", wide * model.hidden_size * rows))
                backward.append(group.parted("all-gather", wide * model.hidden_size * rows))
            else:
                forward.append(group.summed(wide * model.hidden_size * rows))
    else:
        gradient = (4 if plan.fused_loss else width) * tokens * model.hidden_size
        if plan.sequence_parallel:
            forward.append(group.parted("all-gather", row * tokens))
            backward.append(group.parted("reduce-scatter", gradient))
            hidden += [] if plan.fused_loss else [group.parted("all-gather", row * tokens)]
            hidden.append(group.summed(model.norm_width * wide))
        else:
            backward.append(group.summed(gradient, gathers=not plan.fused_loss))
        forward.append(
            group.parted("all-gather", plan.tp * 12 * tokens) if plan.fused_loss else group.summed(12 * tokens)
        )
    waits = PassTimes(sum(each.seconds for each in forward), sum(each.seconds for each in backward), 0.0)
    return MicroBatchTraffic(waits, tuple((each, 1) for each in (*forward, *backward, *hidden)))
