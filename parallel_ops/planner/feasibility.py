"""Whether a plan can run at all: sizes that divide, schedules that have enough micro-batches, memory that is there."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.memory import PlanMemory, deepest_stages
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import GIB, StageMemory
from parallel_ops.planner.schedule import micro_batch_problem

# The backward pass comes as two, the gradients of inputs and of weights.
SPLIT_BACKWARD = ("zb-h1", "zb-2p", "zb-v", "dualpipe-v")


def problem(model: Model, cluster: Cluster, plan: Plan) -> tuple[str, str] | None:
    """Why the plan cannot run, memory apart: a kind of reason and a sentence; ``None`` if it can."""
    sizes = plan.tp, plan.pp, plan.cp
    return (
        _sizes_problem(model, cluster, plan.gpus, sizes, plan.dtype, plan.sequence_parallel)
        or next(_pipeline(model, plan), None)
        or next(_context(model, plan), None)
        or next(_experts(model, plan), None)
    )


def memory_problem(cluster: Cluster, plan: Plan, stages: tuple[StageMemory, ...]) -> tuple[str, str] | None:
    """Why the plan does not fit in memory: ``("memory", "stage 0 needs 91.2 GiB of 80.0")``; ``None`` if it does."""
    gpus = cluster.stage_gpus(plan.pp)
    return _excess([(stage.total, gpus[stage.stage].memory, stage.stage) for stage in stages])


def quick_memory_problem(model: Model, cluster: Cluster, plan: Plan) -> tuple[str, str] | None:
    """As ``memory_problem``, of the stages that need the most."""
    return MemoryCheck(model, cluster, plan).problem(plan.recompute, plan.offload)


class MemoryCheck:
    """``quick_memory_problem`` of a plan under any recomputation and offload."""

    def __init__(self, model: Model, cluster: Cluster, plan: Plan) -> None:
        self._memory = PlanMemory(model, plan)
        gpus = cluster.stage_gpus(plan.pp)
        self._stages: list[tuple[int, float]] = []
        self._deepest: list[tuple[int, float]] = []
        held: dict[object, list[float]] = {}
        for stage in deepest_stages(plan):
            available = gpus[stage].memory
            kind, in_flight = self._memory.kind(stage)
            others = held.setdefault((kind, available), [])
            # What holds no more micro-batches than an earlier stage that is alike needs no more either. Offload makes
            # the two as good as equal, where rounding decides which comes out larger.
            if in_flight not in others:
                self._stages.append((stage, available))
            if not others or in_flight > max(others):
                self._deepest.append((stage, available))
            others.append(in_flight)

    def problem(self, recompute: str, offload: str) -> tuple[str, str] | None:
        """Of the plan with ``recompute`` and ``offload`` in place of its own."""
        stages = self._stages if offload == "optimizer+activations" else self._deepest
        total = self._memory.total
        return _excess([(total(stage, recompute, offload), available, stage) for stage, available in stages])


def _excess(stages: Sequence[tuple[float, float, int]]) -> tuple[str, str] | None:
    """The problem of the stage whose bytes exceed what its GPU has by the most."""
    needed, available, stage = max(stages, key=lambda found: found[0] - found[1])
    if needed <= available:
        return None
    return "memory", f"stage {stage} needs {needed / GIB:.1f} GiB of {available / GIB:.1f}"


def check(model: Model, cluster: Cluster, plan: Plan) -> None:
    """Raises ``ValueError`` with the reason if the plan cannot run, memory apart."""
    found = problem(model, cluster, plan)
    if found:
        raise ValueError(f"plan {plan.describe()}: {found[1]}")


@lru_cache(maxsize=65536)
def _sizes_problem(
    model: Model, cluster: Cluster, gpus: int, sizes: tuple[int, int, int], dtype: str, sequence_parallel: bool
) -> tuple[str, str] | None:
    # Plans that differ in nothing else share what is found here.
    return next(_sizes(model, cluster, gpus, sizes, dtype, sequence_parallel), None)


def _sizes(
    model: Model, cluster: Cluster, gpus: int, sizes: tuple[int, int, int], dtype: str, sequence_parallel: bool
) -> Iterator[tuple[str, str]]:
    tp, pp, cp = sizes
    if gpus != cluster.gpus:
        yield "size", f"dp * tp * pp * cp is {gpus}, but the cluster has {cluster.gpus} GPUs"
    for gpu in dict.fromkeys(cluster.stage_gpus(pp)):
        if not getattr(gpu, dtype):
            yield "dtype", f"{gpu.name} has no {dtype} matrix products"
    if tp > cluster.node_size and cluster.topology == "fat-tree":
        yield "tp leaves the node", f"TP {tp} would leave the node of {cluster.node_size} GPUs"
    for name in ("heads", "ffn", "hidden"):
        if getattr(model, name) % tp:
            yield "tp does not divide", f"TP {tp} does not divide {name} ({getattr(model, name)})"
    if model.kv_heads % tp and tp % model.kv_heads:
        yield "tp does not divide", f"TP {tp} does not divide kv_heads ({model.kv_heads})"
    if sequence_parallel and tp == 1:
        yield "sequence parallelism without tp", "sequence parallelism shards over TP, which is 1"
    if sequence_parallel and model.sequence % (tp * cp):
        yield "sequence does not divide", f"TP * CP ({tp * cp}) does not divide the sequence ({model.sequence})"


def _pipeline(model: Model, plan: Plan) -> Iterator[tuple[str, str]]:
    chunks, m, kind = plan.pp * plan.virtual_stages, plan.micro_batches, plan.schedule
    if plan.layers_per_chunk:
        if sum(plan.layers_per_chunk) != model.layers:
            yield (
                "too few layers",
                f"layers_per_chunk add up to {sum(plan.layers_per_chunk)}, not to {model.layers} layers",
            )
    elif model.layers < chunks:
        yield "too few layers", f"{chunks} chunks of layers need as many layers; the model has {model.layers}"
    if plan.pp == 1:
        if kind != "1f1b":
            yield "schedule without pp", f"{kind} needs more than one pipeline stage"
        return
    if (reason := micro_batch_problem(kind, plan.pp, m)) is not None:
        yield "micro-batches", reason
    if kind in SPLIT_BACKWARD and plan.zero == 3:
        yield "zero-3 with a split backward pass", f"{kind} needs weights between I and W, which ZeRO-3 has given up"
    cheap = plan.recompute == "selective" and plan.flash_attention  # elementwise ops, which one pass can redo alone
    if kind in SPLIT_BACKWARD and plan.recompute != "none" and not cheap:
        yield (
            "recomputation with a split backward pass",
            f"{kind} would recompute activations twice, for I and for W",
        )


def _context(model: Model, plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.cp == 1:
        return
    if model.sequence % (2 * plan.cp):
        yield (
            "sequence does not divide",
            f"2 * CP ({2 * plan.cp}) chunks of a zigzag do not divide the sequence ({model.sequence})",
        )
    if plan.cp_kind == "all-to-all" and model.kv_heads % (plan.tp * plan.cp):
        yield "heads", f"all-to-all CP needs TP * CP ({plan.tp * plan.cp}) to divide kv_heads ({model.kv_heads})"


def _experts(model: Model, plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.ep == 1:
        return
    if not model.experts:
        yield "ep without experts", f"EP {plan.ep} needs a model with experts"
    elif model.experts % plan.ep:
        yield "ep does not divide", f"EP {plan.ep} does not divide experts ({model.experts})"
