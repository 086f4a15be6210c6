"""All plans of a model on a cluster: which run, how fast, and why the others do not.

    for each way to write the GPUs as dp * tp * pp * cp, each ep and ZeRO stage:
        reject what cannot be placed, or what does not fit with its model states alone
        for each schedule, micro-batch, with and without sequence parallelism:
            the cheapest recomputation and offload that fit
    rank by the closed forms; simulate the schedules of the best and rank these again

Recomputation and offload only ever cost time, so a plan that fits without them is not tried with them.
"""

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from parallel_ops.planner._check import check_counts
from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.efficiency import Efficiency, efficiency
from parallel_ops.planner.estimate import estimate
from parallel_ops.planner.feasibility import SPLIT_BACKWARD, MemoryCheck, problem
from parallel_ops.planner.memory import stage_parameters, state_bytes
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import balanced_chunks, group_size
from parallel_ops.planner.plan import OFFLOAD, RECOMPUTE, SCHEDULES, V_SHAPED, Plan, unchecked
from parallel_ops.planner.results import GIB, Rejection, SearchResult
from parallel_ops.planner.sensitivity import sensitivity
from parallel_ops.planner.step import step_seconds

BASE = Plan(fused_loss=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a search tries, besides all ways to write the number of GPUs as ``dp * tp * pp * cp``.

    Attributes:
        micro_batches: sizes of a micro-batch. ``virtual_stages``: of interleaved 1F1B.
        context_tokens: context parallelism leaves each rank at least so many tokens of a sequence.
        zero, schedules, recompute, offload, cp_kinds, sequence_parallel: as in ``Plan``; ``recompute`` and ``offload``
            with the cheaper ones first.
        base: the plan whose other fields (dtype, fused loss, ...) all plans take.
    """

    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    virtual_stages: tuple[int, ...] = (2, 4)
    context_tokens: int = 2048
    zero: tuple[int, ...] = (0, 1, 2, 3)
    schedules: tuple[str, ...] = SCHEDULES
    recompute: tuple[str, ...] = RECOMPUTE
    offload: tuple[str, ...] = OFFLOAD
    cp_kinds: tuple[str, ...] = ("ring", "all-to-all")
    sequence_parallel: tuple[bool, ...] = (True, False)
    base: Plan = BASE


def default_options(cluster: Cluster) -> Options:
    """Everything, in the 16-bit dtype that the cluster's GPU has."""
    return Options(base=replace(BASE, dtype="bf16" if cluster.gpu.bf16 else "fp16"))


def search(
    model: Model,
    cluster: Cluster,
    *,
    batch: int,
    options: Options | None = None,
    constants: Efficiency | None = None,
    keep: int = 20,
) -> SearchResult:
    """Ranks all plans that run, and says why the others do not.

    Args:
        model: its ``sequence`` is the length of a training sequence.
        batch: sequences of one step, over all GPUs.
        options: what to try; ``None`` for everything, in bf16 or, where the GPU has none, fp16.
        constants: efficiencies of the hardware; ``None`` for those of the GPU's generation.
        keep: how many of the fastest plans get a full estimate with a simulated schedule.

    Returns:
        A result without plans, but with ``smallest`` set, where nothing fits.

    Raises:
        ValueError, TypeError: ``batch`` or ``keep`` is not a positive integer, or the GPU has no products in the dtype.
    """
    given = _Given(batch=batch, keep=keep)
    options = options or default_options(cluster)
    cluster.gpu.peak(options.base.dtype)  # raises where the GPU has no such products, since no plan would run
    constants = constants or efficiency(cluster.gpu.generation)
    rejected: list[Rejection] = []
    with _collector_paused():
        timed = [
            (step_seconds(model, cluster, plan, constants), plan)
            for plan in _feasible(model, cluster, given.batch, options, rejected)
        ]
    timed.sort(key=lambda item: item[0])
    ranking = tuple((plan, seconds) for seconds, plan in timed)
    plans = [estimate(model, cluster, plan, constants=constants) for plan, _ in ranking[: given.keep]]
    return SearchResult(
        model=model,
        cluster=cluster,
        plans=tuple(sorted(plans, key=lambda found: found.step)),
        ranking=ranking,
        rejected=tuple(rejected),
        sensitivity=sensitivity(model, cluster, [plan for plan, _ in ranking[:100]], constants),
        smallest=0 if plans else smallest_cluster(model, cluster, batch=batch, options=options),
    )


def smallest_cluster(model: Model, cluster: Cluster, *, batch: int, options: Options | None = None) -> int:
    """The fewest GPUs, doubling from one, on which some plan fits; 0 if 65,536 are not enough for this batch."""
    options = options or default_options(cluster)
    # Whether anything fits does not depend on the schedule that is fastest.
    quick = replace(options, schedules=("1f1b",), micro_batches=(1,))
    gpus = 1
    while gpus <= 65536:
        enough = replace(cluster, gpus=gpus, parts=())
        if next(_feasible(model, enough, batch, quick, []), None) is not None:
            return gpus
        gpus *= 2
    return 0


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection: a search keeps nearly all of its many objects, and looking through them again and again
    would be a quarter of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class _Given:
    batch: int
    keep: int

    def __post_init__(self) -> None:
        check_counts(self, ("batch", "keep"))


def _feasible(
    model: Model, cluster: Cluster, batch: int, options: Options, rejected: list[Rejection]
) -> Iterator[Plan]:
    """The plans that run; the reasons of the others go to ``rejected``."""
    for placed in _placements(model, cluster, batch, options, rejected):
        for zero in options.zero:
            sharded = unchecked(placed, zero=zero)
            found = _states_problem(model, cluster, sharded, options)
            if found:
                rejected.append(_rejection(sharded, found))
                continue
            for plan in _variants(model, cluster, sharded, batch, options):
                fitting = _first_that_fits(model, cluster, plan, options, rejected)
                if fitting:
                    yield fitting


def _placements(
    model: Model, cluster: Cluster, batch: int, options: Options, rejected: list[Rejection]
) -> Iterator[Plan]:
    """Sizes whose product is the number of GPUs and that the model's sizes allow, with the reasons of the others."""
    divisors = [n for n in range(1, cluster.gpus + 1) if cluster.gpus % n == 0]
    longest = max(1, model.sequence // options.context_tokens)
    for tp, pp, cp in itertools.product(divisors, divisors, divisors):
        if cluster.gpus % (tp * pp * cp) or cp > longest:
            continue
        dp = cluster.gpus // (tp * pp * cp)
        if batch % dp:
            plan = replace(options.base, dp=dp, tp=tp, pp=pp, cp=cp, global_batch=dp)
            reason = f"DP {dp} does not divide the batch of {batch}"
            rejected.append(_rejection(plan, ("batch does not divide", reason)))
            continue
        for ep in _expert_sizes(model, dp * cp):
            plan = replace(options.base, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, global_batch=batch)
            found = problem(model, cluster, plan)
            if found:
                rejected.append(_rejection(plan, found))
            else:
                yield plan


def _expert_sizes(model: Model, ranks: int) -> list[int]:
    return [n for n in range(1, max(1, model.experts) + 1) if ranks % n == 0 and max(1, model.experts) % n == 0]


def _states_problem(model: Model, cluster: Cluster, plan: Plan, options: Options) -> tuple[str, str] | None:
    """Whether parameters and gradients alone, with the optimizer where nothing is offloaded, are too much for the
    GPU."""
    widths = list(state_bytes(plan))
    if any(offload != "none" for offload in options.offload):
        widths[2] = 0
    ranks = group_size(plan, "dp")
    worst, needs = 0, 0.0
    for stage in {0, plan.pp // 2, plan.pp - 1}:
        dense, expert = stage_parameters(model, plan, stage)
        owned = dense / ranks + expert / (ranks // plan.ep)
        held = [owned if plan.zero >= level else dense + expert for level in (3, 2, 1)]
        total = sum(width * parameters for width, parameters in zip(widths, held, strict=True))
        worst, needs = max((worst, needs), (stage, total), key=lambda item: item[1])
    available = cluster.stage_gpus(plan.pp)[worst].memory
    if needs <= available:
        return None
    return "memory of model states", (
        f"stage {worst} needs {needs / GIB:.1f} GiB of {available / GIB:.1f} for its model states alone"
    )


def _variants(model: Model, cluster: Cluster, placed: Plan, batch: int, options: Options) -> Iterator[Plan]:
    """Schedules, micro-batches, sequence parallelism and kinds of context parallelism of one placement."""
    schedules = [
        (kind, v)
        for kind in (options.schedules if placed.pp > 1 else ("1f1b",))
        for v in (options.virtual_stages if kind == "interleaved" else (2 if kind in V_SHAPED else 1,))
    ]
    sharding = options.sequence_parallel if placed.tp > 1 else (False,)
    cp_kinds = options.cp_kinds if placed.cp > 1 else ("ring",)
    for micro_batch in options.micro_batches:
        if batch % (placed.dp * micro_batch):
            continue
        for (kind, v), sequence_parallel, cp_kind in itertools.product(schedules, sharding, cp_kinds):
            plan = unchecked(
                placed,
                schedule=kind,
                virtual_stages=v,
                micro_batch=micro_batch,
                sequence_parallel=sequence_parallel,
                cp_kind=cp_kind,
            )
            yield unchecked(plan, layers_per_chunk=balanced_chunks(model, cluster, plan)) if cluster.parts else plan


def _first_that_fits(
    model: Model, cluster: Cluster, plan: Plan, options: Options, rejected: list[Rejection]
) -> Plan | None:
    """The plan with the least recomputation, then offload, that fits."""
    problems: dict[str, tuple[str, str] | None] = {}
    memory = None
    for offload, recompute in itertools.product(options.offload, options.recompute):
        kind = recompute if plan.schedule in SPLIT_BACKWARD else ""  # all that a problem depends on here
        if kind not in problems:
            problems[kind] = problem(model, cluster, unchecked(plan, recompute=recompute))
        found = problems[kind]
        if found is None:
            memory = memory or MemoryCheck(model, cluster, plan)
            found = memory.problem(recompute, offload)
        if found is None:
            return unchecked(plan, offload=offload, recompute=recompute)
        rejected.append(Rejection(plan, *found, recompute, offload))
    return None


def _rejection(plan: Plan, found: tuple[str, str]) -> Rejection:
    return Rejection(plan, *found, plan.recompute, plan.offload)
