"""Search over all plans of a model on a cluster.

    for each factorisation of the GPUs into dp * tp * pp * cp, each ep, dtype and ZeRO stage:
        with ZeRO-3 over several nodes also shards inside a node, with one replica per node
        reject plans that cannot be placed, or whose model states alone do not fit
        for each schedule and micro-batch, with and without sequence parallelism:
            the cheapest recomputation and offload that fit
            uneven stages, if they make the slowest rank faster and fit too
    rank by a simulation of a smaller pipeline; simulate the schedules of the best plans and rank these again
    the simplest of those that are within 2 % of the fastest, and that a public system runs, comes first

Recomputation and offload only cost time, so a plan that fits without them is not tried with them.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from parallel_ops.planner.checks import check_count
from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.software import CURRENT, constants_of
from parallel_ops.planner.error_band import error_band
from parallel_ops.planner.estimate import estimate
from parallel_ops.planner.export import TARGETS, find_target, systems
from parallel_ops.planner.export.trainer import TRAINER
from parallel_ops.planner.feasibility import MemoryCheck
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import Estimate
from parallel_ops.planner.search.candidates import Candidates
from parallel_ops.planner.search.options import SearchOptions, default_options, within_target
from parallel_ops.planner.search.result import NearMiss, Rejections, SearchResult, division, features, twins
from parallel_ops.planner.search.sensitivity import gains, sensitivity
from parallel_ops.planner.search.timing import Request, timed_plans
from parallel_ops.planner.speed import without_collection
from parallel_ops.planner.step import StepTime, step_seconds
from parallel_ops.planner.validation.recipes import Recipe, published_recipe

# A near miss is faster than the best plan by at least this share.
FASTER = 0.01
# The simplest of the plans that take at most this much longer than the fastest comes first.
NEARLY = 0.02
# The fastest plans whose order the sensitivity to constants is about.
MOST_COMPARED = 60
# Plans that are estimated in search of a simpler one.
MOST_SIMPLER = 12
# Plans among which the fastest of each division is looked for, with room for an error of the memory.
MOST_VARIANTS = 1500
# Near misses that are timed, the least excess first, and that are returned.
MISSES_TIMED, MISSES_KEPT = 2000, 5


@without_collection()
def search(
    model: Model,
    cluster: Cluster,
    *,
    batch: int,
    options: SearchOptions | None = None,
    constants: Efficiency | None = None,
    software: str = "",
    keep: int = 20,
    processes: int = 1,
) -> SearchResult:
    """Ranks all plans that can run, and collects the reasons against the others.

    Args:
        model: the model; ``seq_length`` is the length of a training sequence.
        cluster: the cluster; plans use all its GPUs.
        batch: sequences of one step, over all GPUs.
        options: values to try; ``None`` for ``default_options``.
        constants: efficiencies of the hardware; ``None`` for those of the GPU's generation and ``software``.
        software: name of an era (``parallel_ops.planner.compute.software.eras``); empty for that of the target, or for
            what runs today.
        keep: number of the fastest plans that get a full estimate with a simulated schedule.
        processes: with 2 or more, a second process, which imports the program's main module, counts half of a search
            that is large. The result is the same.

    Returns:
        The ranked plans. If no plan fits, there are none and ``smallest`` is set.

    Raises:
        ValueError, TypeError: ``batch``, ``keep`` or ``processes`` is not a positive integer, the GPU has no matmuls in
            the dtype, or the target cannot train the model or supports no value that the options have for a field.
    """
    for name, value in (("batch", batch), ("keep", keep), ("processes", processes)):
        check_count("search", name, value)
    given_options = options or default_options(cluster)
    options = within_target(given_options)
    for dtype in options.dtype:
        cluster.gpu.peak(dtype)  # raises if the GPU has no such matmuls: no plan could run
    if options.target and (reason := next(find_target(options.target).models(model), None)):
        raise ValueError(f"{options.target} cannot train {model.name}: {reason}")
    software = software or (find_target(options.target).software if options.target else CURRENT)
    constants = constants or constants_of(cluster, software)
    request = Request(model, cluster, batch, options, given_options, constants)
    timed, rejected = timed_plans(request, processes)
    timed.sort(key=lambda item: item[0])
    ranking = tuple((plan, seconds) for seconds, plan in timed)
    estimated = functools.partial(estimate, model, cluster, constants=constants, software=software)
    known = functools.partial(_known, model, cluster, ranking, options)
    tight = functools.partial(_tight, model, cluster, software)
    exact = functools.cache(lambda plan: StepTime(model, cluster, plan, constants).simulated_seconds())
    plans = [estimated(plan) for plan in _of_divisions(known(), keep, tight, exact)]
    plans.sort(key=lambda found: (found.tight, found.step))
    if plans:
        first = _simplest(plans, known(seconds=plans[0].step), estimated)
        others = (found for found in plans if found.tight > first.tight or division(found.plan) != division(first.plan))
        plans = [first, *others][:keep]
    misses = _nearest_misses(model, cluster, constants, rejected, min((p.step for p in plans), default=math.inf))
    return SearchResult(
        model=model,
        cluster=cluster,
        plans=tuple(plans),
        ranking=ranking,
        rejected=rejected,
        misses=misses,
        gains=gains(model, cluster, plans[0].plan, constants, misses) if plans else (),
        sensitivity=sensitivity(model, cluster, [plan for plan, _ in ranking[:MOST_COMPARED]], constants),
        **(_beside(ranking, plans[0], options, estimated, tight, exact) if plans else {}),
        smallest=0 if plans else smallest_cluster(model, cluster, batch=batch, options=options),
    )


def _simplest(plans: list[Estimate], known: Iterable[Plan], estimated: Callable[[Plan], Estimate]) -> Estimate:
    """The simplest of the plans that are at most ``NEARLY`` slower than the first of ``plans``, of these and of
    ``known``, whose times are those of a smaller pipeline."""
    most, tight = plans[0].step * (1 + NEARLY), plans[0].tight
    near = [found for found in plans if found.step <= most and found.tight == tight]
    best = min(near, key=lambda found: (features(found.plan), found.step))
    simpler = [plan for plan in known if features(plan) < features(best.plan)]
    for plan in sorted(simpler, key=features)[:MOST_SIMPLER]:
        found = estimated(plan)
        if found.step <= most and found.tight == tight:
            return found
    return best


def _beside(
    ranking: Sequence[tuple[Plan, float]], best: Estimate, options: SearchOptions,
    estimated: Callable[[Plan], Estimate], tight: Callable[[Plan], bool], exact: Callable[[Plan], float],
) -> dict[str, Any]:  # fmt: skip
    """``SearchResult.own``, ``plain``, ``recipe`` and ``published``."""
    own, model, cluster = None, best.model, best.cluster
    if not options.target:
        faster = (plan for plan, seconds in ranking if seconds < best.step * (1 - FASTER))
        alone = (plan for plan in faster if systems(model, cluster, plan) == (TRAINER.name,))
        found = next((each for each in map(estimated, itertools.islice(alone, MOST_SIMPLER)) if not each.tight), None)
        own = found if found and found.step < best.step * (1 - FASTER) else None

    def fastest(divides: Callable[[Plan], bool]) -> Estimate | None:
        variants = _of_divisions((plan for plan, _ in ranking if divides(plan)), 1, tight, exact)
        return estimated(variants[0]) if variants else None

    undivided = Recipe("", 1, 1, 1, 1)
    plain = None if undivided.divides(best.plan) else fastest(undivided.divides)
    recipe = published_recipe(model, cluster)
    return {"own": own, "plain": plain, "recipe": recipe, "published": fastest(recipe.divides) if recipe else None}


def smallest_cluster(model: Model, cluster: Cluster, *, batch: int, options: SearchOptions | None = None) -> int:
    """The fewest GPUs, a power of two or the whole nodes that have as many, on which a plan fits; 0 if 65,536 are not
    enough. Arguments: see ``search``."""
    options = within_target(options or default_options(cluster))
    # One schedule and micro-batch suffice to find out whether a plan fits.
    quick = replace(options, micro_batches=options.micro_batches[:1])
    if "1f1b" in options.schedules:
        quick = replace(quick, schedules=("1f1b",))
    constants = constants_of(cluster)
    node, powers = cluster.gpus_per_node, (2**power for power in range(17))
    for gpus in (size if size <= node else math.ceil(size / node) * node for size in powers):
        enough = replace(cluster, gpus=gpus, parts=())
        if next(Candidates(model, enough, batch, quick, constants).plans(), None) is not None:
            return gpus
    return 0


def _known(
    model: Model,
    cluster: Cluster,
    ranking: Sequence[tuple[Plan, float]],
    options: SearchOptions,
    seconds: float = math.inf,
) -> Iterator[Plan]:
    """The plans of a ranking that a public system runs, within ``NEARLY`` of ``seconds``; with ``any_system``, or a
    target, all. Where no public system runs any, those of ``parallel-ops train``."""
    found = (plan for plan, time in ranking if time <= seconds * (1 + NEARLY))
    if options.any_system or options.target:
        return found
    public = [system for name, system in TARGETS.items() if name != TRAINER.name]
    run = (plan for plan in found if any(system.runs(model, cluster, plan) for system in public))
    first = next(run, None)
    if first is None:
        return (plan for plan, _ in ranking if TRAINER.runs(model, cluster, plan))
    return itertools.chain((first,), run)


def _of_divisions(
    plans: Iterable[Plan], count: int, tight: Callable[[Plan], bool], seconds: Callable[[Plan], float]
) -> list[Plan]:
    """The fastest plan of each of ``count`` divisions, and as many that are ``tight`` but come before these.

    The order of ``plans`` is that of smaller pipelines, which not all schedules gain from alike: of each schedule the
    first plan is compared by ``seconds``.
    """
    roomy: dict[object, dict[object, Plan]] = {}
    close: dict[object, Plan] = {}
    for plan in itertools.islice(plans, MOST_VARIANTS):
        key, order = division(plan), (plan.schedule, plan.virtual_stages)
        if order in roomy.get(key, ()) or (key not in roomy and len(roomy) == 2 * count):
            continue
        if not tight(plan):
            roomy.setdefault(key, {})[order] = plan
        elif key not in roomy:
            close.setdefault(key, plan)
    found = _without_twins(min(variants.values(), key=seconds) for variants in roomy.values())
    return [*sorted(found, key=seconds)[:count], *_without_twins(close.values())[:count]]


def _without_twins(plans: Iterable[Plan]) -> list[Plan]:
    """The plans without those that only split the tokens of a rank otherwise: over more context-parallel ranks."""
    found: dict[object, Plan] = {}
    for plan in sorted(plans, key=lambda each: each.cp):
        found.setdefault(twins(plan), plan)
    return list(found.values())


def _tight(model: Model, cluster: Cluster, software: str, plan: Plan) -> bool:
    """``Estimate.tight``, without an estimate, from the stage that has the least left."""
    _, needed, available = MemoryCheck(model, cluster, plan).worst(plan.recompute, plan.offload)
    band = error_band(cluster, plan, software=software, experts=model.expert_kind).memory
    return needed * (1 + band / 2) > available


def _nearest_misses(
    model: Model, cluster: Cluster, constants: Efficiency, rejected: Rejections, best: float
) -> tuple[NearMiss, ...]:
    """Rejected plans that are faster than ``best`` seconds and exceed the memory by little, the least excess first."""
    chosen: dict[object, NearMiss] = {}
    shared: dict[object, Any] = {}
    for rejection in rejected.near(MISSES_TIMED):
        plan = rejection.plan
        if division(plan) in chosen or step_seconds(model, cluster, plan, constants, shared) >= best * (1 - FASTER):
            continue
        seconds = StepTime(model, cluster, plan, constants).simulated_seconds()
        if seconds < best * (1 - FASTER):
            chosen[division(plan)] = NearMiss(plan, rejection.reason, rejection.excess, seconds)
            if len(chosen) == MISSES_KEPT:
                break
    return tuple(chosen.values())
