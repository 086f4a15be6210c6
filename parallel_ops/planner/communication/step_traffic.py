"""Communication of a step outside the layers: pipeline, data parallelism, host. Formulas: ``traffic.py``."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parallel_ops.planner.cluster import Cluster, Interconnect
from parallel_ops.planner.communication.network import (
    all_gather_seconds,
    all_reduce_transfer,
    group_link,
    repeat,
    ring_transfer,
    send_receive_seconds,
    start_seconds,
    transfer,
)
from parallel_ops.planner.compute.efficiency import HOST_LINK, Efficiency
from parallel_ops.planner.memory.memory import layer_activations
from parallel_ops.planner.memory.states import end_parameters, stage_parameters, state_bytes
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import group_size, layer_counts, stage_layout
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import Transfer


@dataclass(frozen=True)
class StepTraffic:
    """Communication of one stage in one step, outside its layers.

    Attributes:
        link: seconds of one pipeline message between stages.
        blocking: seconds of the all-gather after a pipeline message.
        each: seconds of data-parallel communication in the forward and in the backward pass of each micro-batch.
        once: seconds of data-parallel communication once per step.
        transfers: by group and collective, of the whole step.
    """

    link: float
    blocking: float
    each: tuple[float, float]
    once: float
    transfers: tuple[Transfer, ...]


def step_traffic(model: Model, cluster: Cluster, plan: Plan, efficiency: Efficiency, stage: int) -> StepTraffic:
    """Communication of pipeline stage ``stage`` in one step, outside its layers."""
    transfers: list[Transfer] = []
    width, gradient, _ = state_bytes(plan)
    link_seconds = blocking = 0.0
    if plan.pp > 1:
        link = group_link(cluster, plan, "pp", efficiency, ring=False)
        size = width * model.seq_length * plan.micro_batch / plan.cp * model.hidden_size
        split = plan.tp > 1 and (plan.sequence_parallel or plan.scatter_gather)
        sent = size / plan.tp if split else size
        link_seconds = send_receive_seconds(sent, link) + start_seconds(efficiency, 2)
        message = transfer("pp", "send-receive", "direct", link, plan.pp, sent, link_seconds)
        transfers.append(repeat(message, 2 * plan.micro_batches * plan.virtual_stages))
        if split and not plan.sequence_parallel:
            inside = group_link(cluster, plan, "tp", efficiency)
            blocking = all_gather_seconds(plan.tp, size, inside)
    dense, expert = stage_parameters(model, plan, stage)
    ranks = group_size(plan, "dp")
    shared = (dense, ranks), (expert, ranks // plan.ep)
    link = group_link(cluster, plan, "dp", efficiency)
    layers = sum(layer_counts(model, stage_layout(plan))[stage])
    ends = sum(end_parameters(model, plan, stage))
    launches = layers * start_seconds(efficiency, max(2, ranks))
    each, once, reduced = _data_parallel(link, plan, shared, ends, width, gradient, launches)
    transfers += reduced
    if (replicas := group_size(plan, "dp_replicate")) > 1:
        between = group_link(cluster, plan, "dp_replicate", efficiency)
        owned = gradient * (dense / ranks + expert / (ranks // plan.ep))
        # One per layer, like the other collectives.
        summed = all_reduce_transfer(
            "dp_replicate", replicas, owned, between, start=layers * start_seconds(efficiency, replicas)
        )
        transfers.append(summed)
        once += summed.seconds
    transfers += _host(model, plan, stage, gradient, width)
    return StepTraffic(link_seconds, blocking, each, once, tuple(transfers))


def _data_parallel(
    link: Interconnect,
    plan: Plan,
    shared: tuple[tuple[float, int], ...],
    ends: float,
    width: int,
    gradient: int,
    launches: float,
) -> tuple[tuple[float, float], float, tuple[Transfer, ...]]:
    """``each``, ``once`` and the data-parallel transfers of ``StepTraffic``.

    Args:
        shared: numbers of parameters, and of the ranks that share them.
        ends: parameters outside the layers, which ZeRO-3 gathers once per micro-batch.
        width, gradient: bytes per parameter and per gradient.
        launches: seconds to start one collective per layer.
    """
    transfers = []
    forward = backward = once = 0.0
    for kind, count, size, ranks in _reductions(plan, shared, width, gradient):
        if kind == "all-reduce":
            one = all_reduce_transfer("dp", ranks, size, link, start=launches)
        else:
            one = ring_transfer("dp", kind, ranks, size, link, start=launches)
        seconds = one.seconds
        transfers.append(repeat(one, count))
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
    """Reductions of gradients per step. In a pipeline ZeRO-2 accumulates whole gradients, as torch's runtime does."""
    return plan.micro_batches if plan.zero == 3 or (plan.zero == 2 and plan.pp == 1) else 1


def _reductions(
    plan: Plan, shared: tuple[tuple[float, int], ...], width: int, gradient: int
) -> Iterator[tuple[str, int, float, int]]:
    """Collective, count per step, bytes of the whole tensor, and ranks."""
    for parameters, members in shared:
        if not parameters or members == 1:
            continue
        if plan.zero == 0:
            yield "all-reduce", 1, parameters * gradient, members
            continue
        yield "all-gather", 1 if plan.zero < 3 else 2 * plan.micro_batches, parameters * width, members
        yield "reduce-scatter", _times_reduced(plan), parameters * gradient, members


def _host(model: Model, plan: Plan, stage: int, gradient: int, width: int) -> list[Transfer]:
    """Gradients to the host and parameters back, once per step; activations both ways, every micro-batch."""
    if plan.offload == "none":
        return []
    link = Interconnect(name="host", latency=0.0, bandwidth=HOST_LINK)
    ranks = group_size(plan, "dp")
    dense, expert = stage_parameters(model, plan, stage)
    owned = dense / ranks + expert / (ranks // plan.ep) if plan.zero else dense + expert
    size = owned * (gradient + width)
    out = [transfer("host", "copy", "direct", link, 1, size, size / HOST_LINK)]
    if plan.offload == "optimizer+activations":
        tokens = model.seq_length * plan.micro_batch / plan.cp
        dense_layers, sparse_layers = layer_counts(model, stage_layout(plan))[stage]
        layers = [layer_activations(model, plan, False)] * dense_layers
        layers += [layer_activations(model, plan, True)] * sparse_layers
        kept = 2 * tokens * sum(layers)
        out.append(repeat(transfer("host", "copy", "direct", link, 1, kept, kept / HOST_LINK), plan.micro_batches))
    return out
