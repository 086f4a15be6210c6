"""Options of a search."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.export import find_target
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import OFFLOAD, RECOMPUTE, Plan, unchecked

BASE = Plan(fused_loss=True)
# Without GPipe, whose bubble 1F1B has in less memory, and ZB-2p, whose gain needs a runtime without a barrier at the
# optimizer.
USUAL_SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Values that a search tries for the fields of ``Plan``.

    Attributes:
        target: name in ``parallel_ops.planner.export.TARGETS``: only plans that this system can run, with its defaults;
            empty for any.
        dp, tp, pp, cp, ep: sizes to try; empty for all whose product is the number of GPUs.
        dp_replicate: replicas of ZeRO's shards to try; empty for one and, with ZeRO-3 over several nodes, one per node.
        micro_batches: sizes of a micro-batch, in sequences.
        virtual_stages: chunks per rank of interleaved 1F1B.
        context_tokens: least tokens of a sequence per context-parallel rank; that of published recipes (Llama 3 405B of
            8,192 tokens on two) by default.
        dtype, grad_dtype, moment_dtype, cuda_graph, dispatcher: values to try; empty for that of ``base``.
        zero, schedules, recompute, offload, cp_kinds, sequence_parallel: as in ``Plan``. The first combination of
            ``recompute`` and ``offload`` that fits is taken, so cheaper ones come first.
        base: plan with the other fields (fused loss, moments, ...) of all plans.
        any_system: also plans that none of the known systems can run.
        fixed: fields that override ``base`` and the defaults of the target.
    """

    target: str = ""
    dp: tuple[int, ...] = ()
    dp_replicate: tuple[int, ...] = ()
    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    virtual_stages: tuple[int, ...] = (2, 4)
    context_tokens: int = 4096
    dtype: tuple[str, ...] = ()
    grad_dtype: tuple[str, ...] = ()
    moment_dtype: tuple[str, ...] = ()
    cuda_graph: tuple[str, ...] = ()
    dispatcher: tuple[str, ...] = ()
    zero: tuple[int, ...] = (0, 1, 2, 3)
    schedules: tuple[str, ...] = USUAL_SCHEDULES
    recompute: tuple[str, ...] = RECOMPUTE
    offload: tuple[str, ...] = OFFLOAD
    cp_kinds: tuple[str, ...] = ("ring", "all_to_all")
    sequence_parallel: tuple[bool, ...] = (True, False)
    base: Plan = BASE
    any_system: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)


# Fields whose values a search tries together, on every placement.
STATES = ("dtype", "grad_dtype", "moment_dtype", "cuda_graph", "dispatcher")
# Fields of ``Plan`` whose values are in a field of ``SearchOptions`` with another name.
PLURALS = {
    "micro_batch": "micro_batches",
    "schedule": "schedules",
    "cp_kind": "cp_kinds",
}


def default_options(cluster: Cluster) -> SearchOptions:
    """All values, in bf16, fp16 or fp32: the first that the cluster's GPU has."""
    gpu = cluster.gpu
    return SearchOptions(base=replace(BASE, dtype=next((n for n in ("bf16", "fp16") if getattr(gpu, n)), "fp32")))


def dispatched(options: SearchOptions, model: Model, cluster: Cluster) -> Callable[[Plan], Plan]:
    """Gives plans with expert parallelism DeepEP where the target has it; without a target, where Megatron-LM runs the
    plan.

    A dispatcher that was asked for stays, and so do all-to-alls of experts with a capacity, to which DeepEP cannot pad.
    """
    named = options.dispatcher or "dispatcher" in options.fixed or options.base.dispatcher != "all_to_all"
    system = find_target(options.target or "megatron")
    if named or not model.experts or "dispatcher" in system.limits:
        return lambda plan: plan
    anyhow = bool(options.target) or options.any_system

    def with_deepep(plan: Plan) -> Plan:
        if plan.ep == 1 or plan.capacity_factor or not (anyhow or system.runs(model, cluster, plan)):
            return plan
        return unchecked(plan, dispatcher="deepep")

    return with_deepep


def within_target(options: SearchOptions) -> SearchOptions:
    """The options with their dtypes, and without values that the target does not support.

    Raises:
        ValueError: no value of a field is left, or the target is unknown.
    """
    tried: dict[str, Any] = {name: getattr(options, name) or (getattr(options.base, name),) for name in STATES}
    options = replace(options, **tried)
    if not options.target:
        return options
    system = find_target(options.target)
    changes: dict[str, Any] = {}
    for name, (values, has) in system.limits.items():
        option = PLURALS.get(name, name)
        requested = getattr(options, option, None)
        if requested is None:
            continue
        left = tuple(value for value in requested if value in values) if requested else values
        if not left:
            raise ValueError(f"{system.name}: {has}, not {name}={':'.join(map(str, requested))}")
        changes[option] = left
    return replace(options, **changes)
