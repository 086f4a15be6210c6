"""What a search tries."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.export import find_target
from parallel_ops.planner.plan import OFFLOAD, RECOMPUTE, Plan

BASE = Plan(fused_loss=True)
# Not GPipe, whose bubble 1F1B has in less memory, nor ZB-2p, which gains by what no system but its own does: to leave
# out the barrier at the optimizer.
USUAL_SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What a search tries, besides all ways to write the number of GPUs as ``dp * tp * pp * cp``.

    Attributes:
        target: a name in ``parallel_ops.planner.export.TARGETS``: only plans that this system can run, with what it
            does of its own accord; empty for any.
        dp, tp, pp, cp, ep: sizes to try; empty for all.
        dp_replicate: replicas of ZeRO's shards to try; empty for one and, with ZeRO-3 over several nodes, one a node.
        micro_batches: sizes of a micro-batch. ``virtual_stages``: of interleaved 1F1B.
        context_tokens: context parallelism leaves each rank at least so many tokens of a sequence.
        zero, schedules, recompute, offload, cp_kinds, sequence_parallel: as in ``Plan``; ``recompute`` and ``offload``
            with the cheaper ones first.
        base: the plan whose other fields (dtype, fused loss, ...) all plans take. ``fixed``: fields that they have
            whatever a target does of its own accord.
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
    context_tokens: int = 2048
    zero: tuple[int, ...] = (0, 1, 2, 3)
    schedules: tuple[str, ...] = USUAL_SCHEDULES
    recompute: tuple[str, ...] = RECOMPUTE
    offload: tuple[str, ...] = OFFLOAD
    cp_kinds: tuple[str, ...] = ("ring", "all-to-all")
    sequence_parallel: tuple[bool, ...] = (True, False)
    base: Plan = BASE
    fixed: Mapping[str, Any] = field(default_factory=dict)


# The fields of ``SearchOptions`` that hold values of a field of ``Plan`` by another name.
PLURALS = {
    "micro_batch": "micro_batches",
    "schedule": "schedules",
    "cp_kind": "cp_kinds",
}


def default_options(cluster: Cluster) -> SearchOptions:
    """Everything, in the 16-bit dtype that the cluster's GPU has."""
    return SearchOptions(base=replace(BASE, dtype="bf16" if cluster.gpu.bf16 else "fp16"))


def within_target(options: SearchOptions) -> SearchOptions:
    """The options without what the target does not have."""
    if not options.target:
        return options
    system = find_target(options.target)
    changes: dict[str, Any] = {}
    for name, (values, has) in system.limits.items():
        option = PLURALS.get(name, name)
        asked = getattr(options, option, None)
        if asked is None:
            continue
        left = tuple(value for value in asked if value in values) if asked else values
        if not left:
            raise ValueError(f"{system.name}: {has}, not {name}={':'.join(map(str, asked))}")
        changes[option] = left
    return replace(options, **changes)
