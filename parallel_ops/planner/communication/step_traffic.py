"""Communication of a step outside the layers: pipeline, data parallelism, host. Formulas: ``traffic.py``."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from operator import mul
from typing import NamedTuple

from parallel_ops.planner.cluster import Cluster, Interconnect
from parallel_ops.planner.communication.network import (
    all_gather_seconds,
    all_reduce_seconds,
    all_reduce_transfer,
    group_link,
    message_seconds,
    repeat,
    ring_transfer,
    start_seconds,
    transfer,
)
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.memory.activations import layer_activations
from parallel_ops.planner.memory.states import (
    element_bytes,
    end_parameters,
    frozen_bytes,
    state_bytes,
    trained_parameters,
)
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import expert_replicas, group_size, layer_counts, recomputed_share, stage_layout
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import Transfer


class _Reduction(NamedTuple):
    """Data-parallel collectives of one kind: number per step, bytes of the whole tensor, ranks, seconds of each."""

    kind: str
    number: int
    size: float
    ranks: int
    seconds: float


class PipelineTraffic:
    """Messages between the stages of a pipeline.

    Attributes:
        link: seconds of one message.
        blocking: seconds of the all-gather after a message.
    """

    def __init__(self, model: Model, cluster: Cluster, plan: Plan, efficiency: Efficiency) -> None:
        self.link = self.blocking = 0.0
        if plan.pp == 1:
            return
        self._message_link = group_link(cluster, plan, "pp", efficiency, ring=False)
        size = element_bytes(plan) * model.seq_length * plan.micro_batch / plan.cp * model.hidden_size
        size *= model.residual_streams
        split = plan.tp > 1 and (plan.sequence_parallel or plan.scatter_gather)
        self._sent = size / plan.tp if split else size
        self.link = message_seconds(self._sent, self._message_link, efficiency)
        if split and not plan.sequence_parallel:
            self.blocking = all_gather_seconds(plan.tp, size, group_link(cluster, plan, "tp", efficiency))

    def transfers(self, plan: Plan) -> tuple[Transfer, ...]:
        """The messages of a whole step."""
        if plan.pp == 1:
            return ()
        message = transfer("pp", "send-receive", "direct", self._message_link, plan.pp, self._sent, self.link)
        return (repeat(message, 2 * plan.micro_batches * plan.virtual_stages),)


class DataParallelTraffic:
    """Data-parallel communication of one stage in one step.

    A search reads the times of a hundred thousand plans and the transfers of a few, so these are made on demand.

    Attributes:
        owned: trained parameters that one GPU updates.
        most_owned: of the stage with most.
        each: seconds in the forward and in the backward pass of each micro-batch.
        once: seconds once per step.
        copies: seconds of copies around the collectives, of the whole step; they hide behind nothing.
    """

    def __init__(self, model: Model, cluster: Cluster, plan: Plan, efficiency: Efficiency, stage: int) -> None:
        self._model, self._plan, self._stage = model, plan, stage
        self._width, gradient, _ = state_bytes(plan)
        layout = stage_layout(plan)
        dense, expert = trained_parameters(model, layout, plan, stage)
        ranks = group_size(plan, "dp")
        self.owned = self._owned(dense, expert)
        layers = sum(layer_counts(model, layout)[stage])
        self._link = group_link(cluster, plan, "dp", efficiency)
        self._launches = layers * start_seconds(efficiency, max(2, ranks))
        shared = (dense, ranks, 0.0), *([(expert, expert_replicas(plan), 0.0)] if expert else [])
        if model.lora_rank and plan.zero == 3:
            # Adapters and frozen weights are gathered together, gradients of adapters alone reduced.
            frozen, of_experts = frozen_bytes(model, layout, plan, stage)
            shared = (dense, ranks, frozen), *([(0.0, expert_replicas(plan), of_experts)] if of_experts else [])
        self._scattering = _scattering(self._link, efficiency.reduce_scatter)
        links = self._link, self._scattering
        self._reductions = _reductions(plan, shared, self._width, gradient, links, self._launches)
        self.each, self.once = _by_pass(plan, self._reductions)
        gather, reduce = efficiency.gather_copies, efficiency.reduce_copies
        self.copies = 0.0
        if gather or reduce:
            copied = sum(r.number * r.size * (gather if r.kind == "all-gather" else reduce) for r in self._reductions)
            memory = cluster.stage_gpus(plan.pp)[stage].bandwidth * efficiency.memory
            self.copies = copied * (efficiency.tp_copies if plan.tp > 1 else 1.0) / memory
        self._summed = None
        if (replicas := group_size(plan, "dp_replicate")) > 1:
            between = group_link(cluster, plan, "dp_replicate", efficiency)
            # One per layer, like the other collectives.
            self._summed = all_reduce_transfer(
                "dp_replicate", replicas, gradient * self.owned, between,
                start=layers * start_seconds(efficiency, replicas),
            )  # fmt: skip
            self.once += self._summed.seconds

    def _owned(self, dense: float, expert: float) -> float:
        if not self._plan.zero:
            return dense + expert
        return dense / group_size(self._plan, "dp") + (expert / expert_replicas(self._plan) if expert else 0.0)

    @cached_property
    def most_owned(self) -> float:
        model, plan = self._model, self._plan
        layout = stage_layout(plan)
        return max(self._owned(*trained_parameters(model, layout, plan, stage)) for stage in range(plan.pp))

    def transfers(self) -> tuple[Transfer, ...]:
        """Transfers by group and collective, of the whole step."""
        plan, found = self._plan, []
        # Parameters outside the layers, which ZeRO-3 gathers once per micro-batch.
        ends = sum(end_parameters(self._model, plan, self._stage))
        for kind, count, size, ranks, _ in self._reductions:
            if kind == "all-reduce":
                one = all_reduce_transfer("dp", ranks, size, self._link, start=self._launches)
            else:
                link = self._scattering if kind == "reduce-scatter" else self._link
                one = ring_transfer("dp", kind, ranks, size, link, start=self._launches)
            found.append(repeat(one, count))
            if kind == "all-gather" and plan.zero == 3:
                once_gathered = (ranks - 1) / ranks * min(ends, size / self._width) * self._width * plan.micro_batches
                found[-1] = replace(found[-1], bytes=found[-1].bytes - once_gathered)
                ends = 0.0
        return (*found, *([self._summed] if self._summed else []))


def sharding_key(plan: Plan, stage: int) -> tuple[object, ...]:
    """What ``DataParallelTraffic`` of a model on a cluster depends on."""
    sizes = plan.dp, plan.dp_replicate, plan.tp, plan.cp, plan.ep, plan.expert_shards
    kinds = plan.zero, plan.fsdp, plan.dtype, plan.grad_dtype
    return (*sizes, *kinds, plan.micro_batches if plan.zero >= 2 else 0, stage_layout(plan), stage)


@lru_cache(maxsize=1024)
def _scattering(link: Interconnect, share: float) -> Interconnect:
    """The link of a reduce-scatter."""
    return replace(link, bandwidth=link.bandwidth * share)


def _by_pass(plan: Plan, reductions: Sequence[_Reduction]) -> tuple[tuple[float, float], float]:
    """``each`` and ``once`` of ``DataParallelTraffic``, without replicas."""
    forward = backward = once = 0.0
    for kind, count, _, _, seconds in reductions:
        if count == 1 and plan.zero < 3:
            once += seconds
        elif kind == "all-gather":
            forward, backward = forward + seconds, backward + seconds
        else:
            backward += seconds
    return (forward, backward), once


def _reductions(
    plan: Plan,
    shared: tuple[tuple[float, int, float], ...],
    width: int,
    gradient: int,
    links: tuple[Interconnect, Interconnect],
    launches: float,
) -> list[_Reduction]:
    """The data-parallel collectives of a step.

    Args:
        shared: numbers of trained parameters, and of the ranks that share them; bytes of frozen ones to gather.
        width, gradient: bytes per parameter and per gradient.
        links: of all collectives but reduce-scatters, and of those.
        launches: seconds to start one collective per layer.
    """
    found = []
    link, scattering = links
    for parameters, ranks, frozen in shared:
        if not parameters + frozen or ranks == 1:
            continue
        if plan.zero == 0:
            size = parameters * gradient
            seconds = all_reduce_seconds(ranks, size, link)[1] + launches
            found.append(_Reduction("all-reduce", 1, size, ranks, seconds))
            continue
        gathers = 1 if plan.zero < 3 else 2 * plan.micro_batches
        # One for each micro-batch, unless whole gradients are accumulated.
        each_time = plan.zero >= 2 and (plan.zero == 3 or plan.pp == 1 or not plan.fsdp)
        reduced = plan.micro_batches if each_time else 1
        kinds = ("all-gather", gathers, width, link), ("reduce-scatter", reduced, gradient, scattering)
        for kind, count, each, used in kinds:
            size = parameters * each + (frozen if kind == "all-gather" else 0.0)
            if not size:
                continue
            seconds = all_gather_seconds(ranks, size, used) + launches
            found.append(_Reduction(kind, count, size, ranks, seconds))
    return found


def host_copies(model: Model, cluster: Cluster, plan: Plan, owned: float, stage: int) -> list[tuple[float, float, int]]:
    """Bytes and seconds of what offload copies, and how many times in a step, of a stage whose GPUs update ``owned``
    parameters each: gradients to the host and parameters back, once, with the optimizer there (the first); for every
    micro-batch activations both ways, or shards of parameters to the device, forward and backward."""
    if plan.offload == "none":
        return []
    width, gradient, _ = state_bytes(plan)
    kept, speed = plan.offload == "optimizer+parameters", cluster.gpu.host_link
    size = owned * (gradient if kept else gradient + width)
    out = [(size, size / speed, 1)] if "optimizer" in plan.offload else []
    if kept:
        read = 2 * owned * width
        out.append((read, read / speed, plan.micro_batches))
    if "activations" in plan.offload:
        tokens = model.seq_length * plan.micro_batch / plan.cp
        counts = layer_counts(model, stage_layout(plan))[stage]
        layers = sum(map(mul, counts, layer_activations(model, plan, plan.recompute)))
        moved = 2 * tokens * layers * recomputed_share(model, plan.offload_layers)
        out.append((moved, moved / speed, plan.micro_batches))
    return out
