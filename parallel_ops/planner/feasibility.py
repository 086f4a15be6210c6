"""Checks that a plan can run: sizes that divide, enough micro-batches for the schedule, enough memory."""

import math
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.memory.memory import FixedMemory, PlanMemory, process_memory
from parallel_ops.planner.memory.recomputation import elementwise_only, recomputed
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import StageLayout, head_rank, held_at, layer_counts
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.precision import peak_name
from parallel_ops.planner.results import GIB, StageMemory
from parallel_ops.planner.schedules.schedule import micro_batch_problem, nearest_micro_batches

# Schedules that split the backward pass into the gradients of inputs and of weights.
SPLIT_BACKWARD = ("zb-h1", "zb-2p", "zb-v", "dualpipe-v")


class Problem(NamedTuple):
    """Why a plan cannot run: kind of reason, sentence, and the bytes of memory that are missing (0 for other kinds)."""

    kind: str
    reason: str
    excess: float = 0.0


def problem(model: Model, cluster: Cluster, plan: Plan) -> Problem | None:
    """Why the plan cannot run, apart from memory; ``None`` if it can."""
    return division_problem(model, cluster, plan, plan.recompute) or saving_problem(
        model, plan, plan.recompute, plan.offload
    )


def division_problem(model: Model, cluster: Cluster, plan: Plan, recompute: str) -> Problem | None:
    """``problem`` of the division over the ranks and of the pipeline, with ``recompute`` in place of the plan's."""
    sizes = plan.gpus, plan.dtype, plan.tp, plan.pp, plan.cp, plan.sequence_parallel
    return (
        _size_problem(model, cluster, *sizes)
        or next(pipeline_problems(model, plan, recompute), None)
        or (next(_context(model, plan), None) if plan.cp > 1 else None)
        or (next(_experts(model, plan), None) if model.experts or plan.ep > 1 else None)
    )


def saving_problem(model: Model, plan: Plan, recompute: str, offload: str) -> Problem | None:
    """``problem`` of ``recompute`` and ``offload`` in place of the plan's."""
    return next(_offload_and_recomputation(model, plan, recompute, offload), None)


def memory_problem(cluster: Cluster, plan: Plan, stages: tuple[StageMemory, ...]) -> Problem | None:
    """Why the plan does not fit in memory, "stage 0 needs 91.2 GiB of 80.0: 11.2 too much"; ``None`` if it does."""
    gpus = cluster.stage_gpus(plan.pp)
    worst = max(stages, key=lambda stage: stage.total - gpus[stage.stage].memory)
    return excess("memory", worst.stage, worst.total, gpus[worst.stage].memory)


def quick_memory_problem(model: Model, cluster: Cluster, plan: Plan) -> Problem | None:
    """``memory_problem``, computed for the stages that need the most memory only."""
    return MemoryCheck(model, cluster, plan).problem(plan.recompute, plan.offload)


class MemoryCheck:
    """``quick_memory_problem`` for any recomputation and offload of one plan. ``shared``: see ``PlanMemory``."""

    def __init__(self, model: Model, cluster: Cluster, plan: Plan, shared: dict[object, Any] | None = None) -> None:
        shared = {} if shared is None else shared
        groups = "process", plan.sequence_parallel, plan.cp_kind
        if groups not in shared:
            shared[groups] = process_memory(cluster, plan)
        self._memory = PlanMemory(model, plan, shared=shared, **shared[groups])
        layout = self._memory.layout
        # Most stages need no more than the first.
        self._deepest: list[tuple[int, float]] = []
        self._holding = partial(_of_kinds, model, cluster, layout, plan.schedule, plan.micro_batches)
        self._needs: dict[tuple[str, bool], list[tuple[int, float, tuple[float, ...]]]] = {}
        kept: list[tuple[FixedMemory, float]] = []
        for stage, available in _of_kinds(model, cluster, layout):
            found = self._memory.fixed(stage)
            for most, other in kept:
                if available == other and found.within(most):
                    break
            else:
                kept.append((found, available))
                self._deepest.append((stage, available))

    def problem(self, recompute: str, offload: str) -> Problem | None:
        """The problem of the plan with this ``recompute`` and ``offload``; ``None`` if it fits."""
        return excess("memory", *self.worst(recompute, offload))

    def worst(self, recompute: str, offload: str) -> tuple[int, float, float]:
        """The stage that lacks the most memory or has the least left, the bytes that it needs and has."""
        away = "activations" in offload
        needs = self._needs.get((recompute, away))
        if needs is None:
            stages = self._holding() if away else self._deepest
            needs = [(stage, size, self._memory.needs(stage, recompute, offload)) for stage, size in stages]
            self._needs[recompute, away] = needs
        worst, most, total = (0, 0.0, 0.0), -math.inf, self._memory.total
        for stage, available, parts in needs:
            needed = total(parts, offload)
            if needed - available > most:
                worst, most = (stage, needed, available), needed - available
        return worst


@lru_cache(maxsize=65536)
def _of_kinds(
    model: Model, cluster: Cluster, layout: StageLayout, schedule: str = "", micro_batches: int = 0
) -> tuple[tuple[int, float], ...]:
    """A stage of each kind, with the same layers, ends and memory of the GPU, and that memory: the one that holds the
    most micro-batches (the first, of V-shaped schedules the last).

    With ``schedule`` and ``micro_batches`` the kinds have the same micro-batches in flight, too, for plans that offload
    activations: two layers stay on the device, so stages with fewer micro-batches or layers need as much, up to
    rounding.
    """
    counts, gpus, head = layer_counts(model, layout), cluster.stage_gpus(layout.pp), head_rank(layout)
    kinds: dict[object, tuple[int, float]] = {}
    stages, sizes = range(layout.pp), (layout.pp, layout.virtual_stages, micro_batches)
    for stage in reversed(stages) if layout.v_shaped and not schedule else stages:
        held, available = held_at(stage, schedule, *sizes) if schedule else 0.0, gpus[stage].memory
        kinds.setdefault((counts[stage], stage == 0, stage == head, held, available), (stage, available))
    return tuple(kinds.values())


def excess(kind: str, stage: int, needed: float, available: float) -> Problem | None:
    """The problem of a stage that needs more bytes than are available; ``None`` if it fits."""
    if needed <= available:
        return None
    more = needed - available
    # Printed with one decimal; less than 0.05 would read as 0.0.
    amount = f"{more / GIB:.1f}" if more >= 0.05 * GIB else "less than 0.1"
    reason = f"stage {stage} needs {needed / GIB:.1f} GiB of {available / GIB:.1f}: {amount} too much"
    return Problem(kind, reason, more)


def check(model: Model, cluster: Cluster, plan: Plan) -> None:
    """Raises ``ValueError`` with the reason if the plan cannot run, apart from memory."""
    found = problem(model, cluster, plan)
    if found:
        raise ValueError(f"plan {plan.describe()}: {found[1]}")


@lru_cache(maxsize=65536)
def _size_problem(*sizes: Any) -> Problem | None:
    return next(_sizes(*sizes), None)


def _sizes(
    model: Model, cluster: Cluster, gpus: int, dtype: str, tp: int, pp: int, cp: int, sequence_parallel: bool
) -> Iterator[Problem]:
    if gpus != cluster.gpus:
        yield Problem("size", f"dp * tp * pp * cp is {gpus}, but the cluster has {cluster.gpus} GPUs")
    for gpu in dict.fromkeys(cluster.stage_gpus(pp)):
        if not getattr(gpu, peak_name(dtype)):
            yield Problem("dtype", f"{gpu.name} has no {dtype} matrix products")
    if tp > cluster.node_size and cluster.topology == "fat-tree":
        yield Problem("tp leaves the node", f"TP {tp} would leave the node of {cluster.node_size} GPUs")
    for name in ("num_heads", "ffn_hidden_size", "hidden_size"):
        if getattr(model, name) % tp:
            yield Problem("tp does not divide", f"TP {tp} does not divide {name} ({getattr(model, name)})")
    if model.recurrent and model.recurrent.groups % (tp * cp):
        ranks = f"TP * CP ({tp * cp})" if cp > 1 else f"TP {tp}"
        yield Problem("tp does not divide", f"{ranks} does not divide recurrent.groups ({model.recurrent.groups})")
    if model.compressed and model.compressed.output_groups % tp:
        groups = model.compressed.output_groups
        yield Problem("tp does not divide", f"TP {tp} does not divide compressed.output_groups ({groups})")
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        yield Problem("tp does not divide", f"TP {tp} does not divide num_kv_heads ({model.num_kv_heads})")
    if sequence_parallel and tp == 1:
        yield Problem("sequence parallelism without tp", "sequence parallelism shards over TP, which is 1")
    if sequence_parallel and model.seq_length % (tp * cp):
        yield Problem(
            "sequence does not divide", f"TP * CP ({tp * cp}) does not divide the sequence ({model.seq_length})"
        )


def pipeline_problems(model: Model, plan: Plan, recompute: str) -> Iterator[Problem]:
    """Why the pipeline of a plan cannot run: each reason names keys of the plan and the nearest values that work.

    ``recompute``: in place of the plan's.
    """
    chunks, m, kind = plan.pp * plan.virtual_stages, plan.micro_batches, plan.schedule
    if plan.layers_per_chunk:
        if sum(plan.layers_per_chunk) != model.num_layers:
            yield Problem(
                "too few layers",
                f"layers_per_chunk add up to {sum(plan.layers_per_chunk)}, not to {model.num_layers} layers",
            )
    elif model.num_layers < chunks:
        product = "pp * virtual_stages" if plan.virtual_stages > 1 else "pp"
        stages = f"{product} is {chunks} stages, but the model has {model.num_layers} layers"
        yield Problem("too few layers", f"{stages}; nearest: {_fewer_stages(model.num_layers, plan)}")
    if plan.pp == 1:
        if kind != "1f1b":
            yield Problem("schedule without pp", f"{kind} needs pp of 2 or more, got 1; nearest: schedule=1f1b")
        return
    if (reason := micro_batch_problem(kind, plan.pp, m)) is not None:
        yield Problem("micro-batches", f"{reason}; nearest: {_other_batches(plan)}")
    # A system that computes I first in B too needs no weights for W.
    if kind in SPLIT_BACKWARD and plan.zero == 3 and not plan.input_grad_first:
        yield Problem(
            "zero-3 with a split backward pass",
            f"{kind} needs weights between I and W, which ZeRO-3 has released; nearest: zero=2",
        )
    cheap = elementwise_only(recompute, plan.flash_attention)
    # Without weights for W, nothing is recomputed for it either: what I has recomputed is kept.
    if kind in SPLIT_BACKWARD and recompute != "none" and not cheap and not plan.input_grad_first:
        yield Problem(
            "recomputation with a split backward pass",
            f"{kind} would recompute activations twice, for I and for W; nearest: "
            f"recompute={'selective' if plan.flash_attention else 'none'}",
        )


def _fewer_stages(layers: int, plan: Plan) -> str:
    """The change to the most stages that ``layers`` allow, on the same GPUs: dp takes the ranks that pp gives up."""
    pp, v, ranks = plan.pp, plan.virtual_stages, plan.dp * plan.pp
    found = []
    if plan.schedule == "interleaved" and layers // pp >= 2:
        found.append((layers // pp * pp, f"virtual_stages={layers // pp}"))
    for fewer in range(min(pp - 1, layers // v), 1, -1):
        if ranks % fewer == 0 and plan.global_batch % (ranks // fewer * plan.micro_batch) == 0:
            found.append((fewer * v, f"pp={fewer}"))
            break
    if v > 1 and layers >= pp:
        found.append((pp, "schedule=1f1b,virtual_stages=1"))
    found.append((1, "pp=1" if v == 1 else "pp=1,schedule=1f1b,virtual_stages=1"))
    return max(found, key=lambda change: change[0])[1]


def _other_batches(plan: Plan) -> str:
    """Changes of one key to a number of micro-batches that the schedule can run."""
    share, sequences = plan.dp * plan.micro_batch, plan.micro_batches * plan.micro_batch
    counts = nearest_micro_batches(plan.schedule, plan.pp, plan.micro_batches)
    found = [f"global_batch={count * share}" for count in counts]
    for size in range(plan.micro_batch - 1, 0, -1):
        if sequences % size == 0 and micro_batch_problem(plan.schedule, plan.pp, sequences // size) is None:
            return ", ".join([*found, f"micro_batch={size}"])
    return ", ".join(found)


def _context(model: Model, plan: Plan) -> Iterator[Problem]:
    if model.compressed:
        yield Problem("compressed attention with cp", "entries of compressed attention are not split over CP here")
    if model.seq_length % (2 * plan.cp):
        yield Problem(
            "sequence does not divide",
            f"2 * CP ({2 * plan.cp}) chunks of a zigzag do not divide the sequence ({model.seq_length})",
        )
    if plan.cp_kind == "all_to_all" and model.num_kv_heads % (plan.tp * plan.cp):
        yield Problem(
            "heads", f"all-to-all CP needs TP * CP ({plan.tp * plan.cp}) to divide num_kv_heads ({model.num_kv_heads})"
        )


def _offload_and_recomputation(model: Model, plan: Plan, recompute: str, offload: str) -> Iterator[Problem]:
    if offload == "optimizer+parameters" and plan.zero != 3:
        yield Problem("offload without zero-3", "offload=optimizer+parameters needs zero=3")
    modules = recomputed(recompute, plan.flash_attention) if recompute != "selective" else frozenset()
    if not model.experts and (lacks := sorted(modules & {"experts", "moe", "moe_act", "shared_experts"})):
        yield Problem("recomputation without experts", f"recompute={lacks[0]} needs a model with experts")
    if model.latent is None and "mla_up_proj" in modules:
        yield Problem("recomputation without latent attention", "recompute=mla_up_proj needs latent attention")
    if plan.offload_layers and "activations" not in offload:
        yield Problem("offload", "offload_layers needs offload=activations")
    if plan.recompute_layers and recompute == "none":
        yield Problem("recomputation", "recompute_layers needs recompute, such as recompute=full")
    for name in ("recompute_layers", "offload_layers"):
        if (layers := getattr(plan, name)) > model.num_layers:
            yield Problem("too few layers", f"{name} is {layers}, but the model has {model.num_layers} layers")


def _experts(model: Model, plan: Plan) -> Iterator[Problem]:
    if not model.experts:
        yield Problem("ep without experts", f"EP {plan.ep} needs a model with experts")
    elif model.experts % plan.ep:
        yield Problem("ep does not divide", f"EP {plan.ep} does not divide experts ({model.experts})")
    widths = {"expert_ffn": plan.expert_shards, "shared_experts * expert_ffn": plan.tp}
    for number, (name, tp) in zip((1, model.shared_experts), widths.items(), strict=True):
        if number * model.expert_ffn % tp:
            yield Problem("tp does not divide", f"TP {tp} does not divide {name} ({number * model.expert_ffn})")
