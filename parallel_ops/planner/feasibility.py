"""Whether a plan can run at all: sizes that divide, schedules that have enough micro-batches, memory that is there."""

from collections.abc import Iterator

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.memory import deepest_stages, stage_memory
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import leaves_node
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import GIB, StageMemory

# The backward pass comes as two, the gradients of inputs and of weights.
SPLIT_BACKWARD = ("zb-h1", "zb-2p", "zb-v", "dualpipe-v")


def problem(model: Model, cluster: Cluster, plan: Plan) -> tuple[str, str] | None:
    """Why the plan cannot run, memory apart: a kind of reason and a sentence; ``None`` if it can."""
    return next(_problems(model, cluster, plan), None)


def memory_problem(cluster: Cluster, plan: Plan, stages: tuple[StageMemory, ...]) -> tuple[str, str] | None:
    """Why the plan does not fit in memory: ``("memory", "stage 0 needs 91.2 GiB of 80.0")``; ``None`` if it does."""
    gpus = cluster.stage_gpus(plan.pp)
    over = [(stage.total - gpus[stage.stage].memory, stage) for stage in stages]
    excess, worst = max(over, key=lambda item: item[0])
    if excess <= 0:
        return None
    available = gpus[worst.stage].memory / GIB
    return "memory", f"stage {worst.stage} needs {worst.total / GIB:.1f} GiB of {available:.1f}"


def quick_memory_problem(model: Model, cluster: Cluster, plan: Plan) -> tuple[str, str] | None:
    """As ``memory_problem``, of the stages that need the most."""
    return memory_problem(cluster, plan, tuple(stage_memory(model, plan, stage) for stage in deepest_stages(plan)))


def check(model: Model, cluster: Cluster, plan: Plan) -> None:
    """Raises ``ValueError`` with the reason if the plan cannot run, memory apart."""
    found = problem(model, cluster, plan)
    if found:
        raise ValueError(f"plan {plan.describe()}: {found[1]}")


def _problems(model: Model, cluster: Cluster, plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.gpus != cluster.gpus:
        yield "size", f"dp * tp * pp * cp is {plan.gpus}, but the cluster has {cluster.gpus} GPUs"
    for gpu in {*cluster.stage_gpus(plan.pp)}:
        if not getattr(gpu, plan.dtype):
            yield "dtype", f"{gpu.name} has no {plan.dtype} matrix products"
    yield from _tensor(model, cluster, plan)
    yield from _pipeline(model, plan)
    yield from _context(model, plan)
    yield from _experts(model, plan)


def _tensor(model: Model, cluster: Cluster, plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.tp > 1 and cluster.topology == "fat-tree" and leaves_node(cluster, plan, "tp"):
        yield "tp leaves the node", f"TP {plan.tp} would leave the node of {cluster.node_size} GPUs"
    for name in ("heads", "ffn", "hidden"):
        if getattr(model, name) % plan.tp:
            yield "tp does not divide", f"TP {plan.tp} does not divide {name} ({getattr(model, name)})"
    if model.kv_heads % plan.tp and plan.tp % model.kv_heads:
        yield "tp does not divide", f"TP {plan.tp} does not divide kv_heads ({model.kv_heads})"
    if plan.sequence_parallel and plan.tp == 1:
        yield "sequence parallelism without tp", "sequence parallelism shards over TP, which is 1"
    if plan.sequence_parallel and model.sequence % (plan.tp * plan.cp):
        yield (
            "sequence does not divide",
            f"TP * CP ({plan.tp * plan.cp}) does not divide the sequence ({model.sequence})",
        )


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
    if kind == "interleaved" and m % plan.pp:
        yield "micro-batches", f"interleaved 1F1B needs micro-batches in multiples of PP {plan.pp}; there are {m}"
    if kind == "dualpipe-v" and m < 2 * plan.pp:
        yield "micro-batches", f"DualPipe-V needs {2 * plan.pp} micro-batches for PP {plan.pp}; there are {m}"
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
