"""All plans of a model on a cluster: which run, how fast, and why the others do not.

    for each way to write the GPUs as dp * tp * pp * cp, each ep and ZeRO stage:
        reject what cannot be placed, or what does not fit with its model states alone
        for each schedule, micro-batch, with and without sequence parallelism:
            the cheapest recomputation and offload that fit
            uneven stages, where these make the slowest rank faster and fit too
    rank by a simulation of a smaller pipeline; simulate the schedules of the best and rank these again

Recomputation and offload only ever cost time, so a plan that fits without them is not tried with them.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parallel_ops.planner._check import check_counts
from parallel_ops.planner.balance import balanced_chunks
from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.efficiency import Efficiency, efficiency
from parallel_ops.planner.estimate import estimate
from parallel_ops.planner.export import Target
from parallel_ops.planner.export import target as find_target
from parallel_ops.planner.feasibility import SPLIT_BACKWARD, MemoryCheck, Problem, excess, problem
from parallel_ops.planner.memory import stage_parameters, state_bytes
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import group_size
from parallel_ops.planner.plan import OFFLOAD, RECOMPUTE, V_SHAPED, Plan, unchecked
from parallel_ops.planner.results import NearMiss, Rejection, SearchResult, family
from parallel_ops.planner.sensitivity import sensitivity
from parallel_ops.planner.step import Step, step_seconds

BASE = Plan(fused_loss=True)
# Not GPipe, whose bubble 1F1B has in less memory, nor ZB-2p, which gains by what no system but its own does: to leave
# out the barrier at the optimizer.
USUAL_SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
# A plan that needs at most this share of a GPU's memory too much is a near miss where it would be this much faster.
NEAR, FASTER = 0.1, 0.01
# So many of them are timed, those that need the least first.
MISSES_TIMED, MISSES_KEPT = 2000, 5


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a search tries, besides all ways to write the number of GPUs as ``dp * tp * pp * cp``.

    Attributes:
        target: a name in ``parallel_ops.planner.export.TARGETS``: only plans that this system can run, with what it
            does of its own accord; empty for any.
        dp, tp, pp, cp, ep: sizes to try; empty for all.
        micro_batches: sizes of a micro-batch. ``virtual_stages``: of interleaved 1F1B.
        context_tokens: context parallelism leaves each rank at least so many tokens of a sequence.
        zero, schedules, recompute, offload, cp_kinds, sequence_parallel: as in ``Plan``; ``recompute`` and ``offload``
            with the cheaper ones first.
        base: the plan whose other fields (dtype, fused loss, ...) all plans take. ``fixed``: fields that they have
            whatever a target does of its own accord.
    """

    target: str = ""
    dp: tuple[int, ...] = ()
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


# The fields of ``Options`` that hold values of a field of ``Plan`` by another name.
PLURALS = {
    "micro_batch": "micro_batches",
    "schedule": "schedules",
    "cp_kind": "cp_kinds",
}


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
        ValueError, TypeError: ``batch`` or ``keep`` is not a positive integer, the GPU has no products in the dtype, or
            the target has none of what the options ask for.
    """
    given = _Given(batch=batch, keep=keep)
    options = _within_target(options or default_options(cluster))
    cluster.gpu.peak(options.base.dtype)  # raises where the GPU has no such products, since no plan would run
    constants = constants or efficiency(cluster.gpu.generation)
    rejected: list[Rejection] = []
    feasible = _Search(model, cluster, given.batch, options, constants, rejected).plans()
    timed = [(step_seconds(model, cluster, plan, constants), plan) for plan in feasible]
    timed.sort(key=lambda item: item[0])
    ranking = tuple((plan, seconds) for seconds, plan in timed)
    plans = [estimate(model, cluster, plan, constants=constants) for plan in _distinct(ranking, given.keep)]
    return SearchResult(
        model=model,
        cluster=cluster,
        plans=tuple(sorted(plans, key=lambda found: found.step)),
        ranking=ranking,
        rejected=tuple(rejected),
        misses=_nearest_misses(model, cluster, constants, rejected, min((p.step for p in plans), default=math.inf)),
        sensitivity=sensitivity(model, cluster, [plan for plan, _ in ranking[:100]], constants),
        smallest=0 if plans else smallest_cluster(model, cluster, batch=batch, options=options),
    )


def smallest_cluster(model: Model, cluster: Cluster, *, batch: int, options: Options | None = None) -> int:
    """The fewest GPUs, doubling from one, on which some plan fits; 0 if 65,536 are not enough for this batch."""
    options = _within_target(options or default_options(cluster))
    # Whether anything fits does not depend on the schedule that is fastest.
    quick = replace(options, micro_batches=options.micro_batches[:1])
    if "1f1b" in options.schedules:
        quick = replace(quick, schedules=("1f1b",))
    constants = efficiency(cluster.gpu.generation)
    gpus = 1
    while gpus <= 65536:
        enough = replace(cluster, gpus=gpus, parts=())
        if next(_Search(model, enough, batch, quick, constants, []).plans(), None) is not None:
            return gpus
        gpus *= 2
    return 0


def _within_target(options: Options) -> Options:
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


def _distinct(ranking: Sequence[tuple[Plan, float]], count: int) -> list[Plan]:
    """The first plans, without near-twins of one before."""
    chosen: dict[object, Plan] = {}
    for plan, _ in ranking:
        chosen.setdefault(family(plan), plan)
        if len(chosen) == count:
            break
    return list(chosen.values())


def _nearest_misses(
    model: Model, cluster: Cluster, constants: Efficiency, rejected: Sequence[Rejection], best: float
) -> tuple[NearMiss, ...]:
    """Of the plans that need too much memory, those nearest to fitting that would be faster than the best."""
    most = NEAR * cluster.gpu.memory
    misses = [rejection for rejection in rejected if rejection.kind == "memory" and rejection.excess <= most]
    misses.sort(key=lambda rejection: rejection.excess)
    chosen: dict[object, NearMiss] = {}
    for rejection in misses[:MISSES_TIMED]:
        plan = rejection.plan
        seconds = step_seconds(model, cluster, plan, constants)
        if seconds >= best * (1 - FASTER) or family(plan) in chosen:
            continue
        seconds = Step(model, cluster, plan, constants).simulated_seconds()
        if seconds < best * (1 - FASTER):
            chosen[family(plan)] = NearMiss(plan, rejection.reason, rejection.excess, seconds)
            if len(chosen) == MISSES_KEPT:
                break
    return tuple(chosen.values())


@dataclass(frozen=True)
class _Given:
    batch: int
    keep: int

    def __post_init__(self) -> None:
        check_counts(self, ("batch", "keep"))


class _Search:
    """One search in the making: ``plans`` are those that run, ``rejected`` gets why the others do not."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        batch: int,
        options: Options,
        constants: Efficiency,
        rejected: list[Rejection],
    ) -> None:
        self.model, self.cluster, self.batch = model, cluster, batch
        self.options, self.constants, self.rejected = options, constants, rejected
        self.system: Target | None = find_target(options.target) if options.target else None

    def plans(self) -> Iterator[Plan]:
        for placed in self._placements():
            for zero in self.options.zero:
                sharded = self._as_target_does(unchecked(placed, zero=zero))
                found = self._states_problem(sharded)
                if found:
                    self._reject(sharded, found)
                    continue
                for plan in self._variants(sharded):
                    yield from self._that_fit(plan)

    def _reject(self, plan: Plan, found: Problem) -> None:
        self.rejected.append(Rejection(plan, *found, plan.recompute, plan.offload))

    def _as_target_does(self, plan: Plan) -> Plan:
        own = self.system.own(plan) if self.system else {}
        return unchecked(plan, **{**own, **self.options.fixed})

    def _placements(self) -> Iterator[Plan]:
        """Sizes whose product is the number of GPUs and that the model's sizes allow."""
        model, gpus, options = self.model, self.cluster.gpus, self.options
        divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
        longest = max(1, model.sequence // options.context_tokens)
        sizes = ([n for n in divisors if n in (given or divisors)] for given in (options.tp, options.pp, options.cp))
        for tp, pp, cp in itertools.product(*sizes):
            if gpus % (tp * pp * cp) or (cp > longest and not options.cp):
                continue
            dp = gpus // (tp * pp * cp)
            if options.dp and dp not in options.dp:
                continue
            if self.batch % dp:
                plan = replace(options.base, dp=dp, tp=tp, pp=pp, cp=cp, global_batch=dp)
                reason = f"DP {dp} does not divide the batch of {self.batch}"
                self._reject(plan, Problem("batch does not divide", reason))
                continue
            for ep in _expert_sizes(model, dp * cp):
                if options.ep and ep not in options.ep:
                    continue
                plan = replace(options.base, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, global_batch=self.batch)
                found = problem(model, self.cluster, plan)
                if found:
                    self._reject(plan, found)
                else:
                    yield plan

    def _states_problem(self, plan: Plan) -> Problem | None:
        """Whether parameters and gradients alone, with the optimizer where nothing is offloaded, are too much for the
        GPU."""
        widths = list(state_bytes(plan))
        if any(offload != "none" for offload in self.options.offload):
            widths[2] = 0
        ranks = group_size(plan, "dp")
        worst, needs = 0, 0.0
        for stage in {0, plan.pp // 2, plan.pp - 1}:
            dense, expert = stage_parameters(self.model, plan, stage)
            owned = dense / ranks + expert / (ranks // plan.ep)
            held = [owned if plan.zero >= level else dense + expert for level in (3, 2, 1)]
            total = sum(width * parameters for width, parameters in zip(widths, held, strict=True))
            worst, needs = max((worst, needs), (stage, total), key=lambda item: item[1])
        found = excess("memory of model states", worst, needs, self.cluster.stage_gpus(plan.pp)[worst].memory)
        return found and found._replace(reason=f"{found.reason}, for its model states alone")

    def _variants(self, placed: Plan) -> Iterator[Plan]:
        """Schedules, micro-batches, sequence parallelism and kinds of context parallelism of one placement."""
        options = self.options
        schedules = [
            (kind, v)
            for kind in (options.schedules if placed.pp > 1 else ("1f1b",))
            for v in (options.virtual_stages if kind == "interleaved" else (2 if kind in V_SHAPED else 1,))
        ]
        sharding = options.sequence_parallel if placed.tp > 1 else (False,)
        cp_kinds = options.cp_kinds if placed.cp > 1 else ("ring",)
        for micro_batch in options.micro_batches:
            if self.batch % (placed.dp * micro_batch):
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
                yield self._as_target_does(plan) if self.system else plan

    def _that_fit(self, plan: Plan) -> Iterator[Plan]:
        """The plan with the least recomputation, then offload, that fits; with uneven stages where these are faster.

        Where uneven stages need more recomputation or offload than even ones, both are tried. Of two kinds of GPUs even
        stages are never the better ones.
        """
        uneven = balanced_chunks(self.model, self.cluster, plan, self.constants)
        balanced = unchecked(plan, layers_per_chunk=uneven)
        if self.cluster.parts:
            even, found = None, self._least(balanced, self.rejected)
        else:
            # The reasons of even stages stand for these.
            even, found = self._least(plan, self.rejected), self._least(balanced, []) if uneven else None
        if found:
            yield found
        if even and not (found and (even.recompute, even.offload) == (found.recompute, found.offload)):
            yield even

    def _least(self, plan: Plan, rejected: list[Rejection]) -> Plan | None:
        problems: dict[str, Problem | None] = {}
        memory = None
        for offload, recompute in itertools.product(self.options.offload, self.options.recompute):
            kind = recompute if plan.schedule in SPLIT_BACKWARD else ""  # all that a problem depends on here
            if kind not in problems:
                problems[kind] = problem(self.model, self.cluster, unchecked(plan, recompute=recompute))
            found = problems[kind]
            if found is None and self.system:
                found = self._target_problem(unchecked(plan, recompute=recompute, offload=offload))
            if found is None:
                memory = memory or MemoryCheck(self.model, self.cluster, plan)
                found = memory.problem(recompute, offload)
            if found is None:
                return unchecked(plan, offload=offload, recompute=recompute)
            rejected.append(Rejection(plan, *found, recompute, offload))
        return None

    def _target_problem(self, plan: Plan) -> Problem | None:
        if self.system is None:
            return None
        reason = self.system.problem(self.model, self.cluster, plan)
        return Problem(f"{self.system.name} cannot run it", reason) if reason else None


def _expert_sizes(model: Model, ranks: int) -> list[int]:
    return [n for n in range(1, max(1, model.experts) + 1) if ranks % n == 0 and max(1, model.experts) % n == 0]
