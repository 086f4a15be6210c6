"""All plans of a model on a cluster: which run, how fast, and why the others do not.

    for each way to write the GPUs as dp * tp * pp * cp, each ep and ZeRO stage:
        with ZeRO-3 over several nodes also shards that stay in a node, with a replica in each
        reject what cannot be placed, or what does not fit with its model states alone
        for each schedule, micro-batch, with and without sequence parallelism:
            the cheapest recomputation and offload that fit
            uneven stages, where these make the slowest rank faster and fit too
    rank by a simulation of a smaller pipeline; simulate the schedules of the best and rank these again

Recomputation and offload only ever cost time, so a plan that fits without them is not tried with them.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from parallel_ops.planner.checks import check_counts
from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.efficiency import Efficiency, efficiency
from parallel_ops.planner.estimate import estimate
from parallel_ops.planner.export import ExportTarget, find_target
from parallel_ops.planner.feasibility import SPLIT_BACKWARD, MemoryCheck, Problem, excess, problem
from parallel_ops.planner.memory.states import state_memory
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import V_SHAPED, Plan, unchecked
from parallel_ops.planner.results import NearMiss, Rejection, SearchResult, family
from parallel_ops.planner.search.balance import balanced_chunks
from parallel_ops.planner.search.options import SearchOptions, default_options, within_target
from parallel_ops.planner.search.sensitivity import sensitivity
from parallel_ops.planner.step import StepTime, step_seconds

# A plan that needs at most this share of a GPU's memory too much is a near miss where it would be this much faster.
NEAR, FASTER = 0.1, 0.01
# So many of them are timed, those that need the least first.
MISSES_TIMED, MISSES_KEPT = 2000, 5


def search(
    model: Model,
    cluster: Cluster,
    *,
    batch: int,
    options: SearchOptions | None = None,
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
    options = within_target(options or default_options(cluster))
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


def smallest_cluster(model: Model, cluster: Cluster, *, batch: int, options: SearchOptions | None = None) -> int:
    """The fewest GPUs, doubling from one, on which some plan fits; 0 if 65,536 are not enough for this batch."""
    options = within_target(options or default_options(cluster))
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
        seconds = StepTime(model, cluster, plan, constants).simulated_seconds()
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
        options: SearchOptions,
        constants: Efficiency,
        rejected: list[Rejection],
    ) -> None:
        self.model, self.cluster, self.batch = model, cluster, batch
        self.options, self.constants, self.rejected = options, constants, rejected
        self.system: ExportTarget | None = find_target(options.target) if options.target else None

    def plans(self) -> Iterator[Plan]:
        for placed in self._placements():
            for sharded in self._shardings(placed):
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
        longest = max(1, model.seq_length // options.context_tokens)
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

    def _shardings(self, placed: Plan) -> Iterator[Plan]:
        """ZeRO stages, and replicas of their shards."""
        for zero in self.options.zero:
            plan = self._as_target_does(unchecked(placed, zero=zero))
            for replicas in self.options.dp_replicate or (1, *self._replicas(placed, zero)):
                found = _replica_problem(plan, replicas)
                if found:
                    self._reject(plan, found)
                else:
                    yield unchecked(plan, dp_replicate=replicas)

    def _replicas(self, placed: Plan, zero: int) -> tuple[int, ...]:
        """One a node, where ZeRO-3 without a pipeline would gather every layer of every micro-batch between nodes."""
        inside = self.cluster.node_size // (placed.tp * placed.cp)
        if zero < 3 or placed.pp > 1 or inside < 2 or placed.dp <= inside:
            return ()
        if placed.dp % inside or inside * placed.cp % placed.ep:
            return ()
        return (placed.dp // inside,)

    def _states_problem(self, plan: Plan) -> Problem | None:
        """Whether parameters and gradients alone, with the optimizer where nothing is offloaded, are too much for the
        GPU."""
        offloaded = any(offload != "none" for offload in self.options.offload)
        worst, needs = 0, 0.0
        for stage in {0, plan.pp // 2, plan.pp - 1}:
            states = state_memory(self.model, plan, stage, plan.zero)
            worst, needs = max((worst, needs), (stage, sum(states[: 2 if offloaded else 3])), key=lambda item: item[1])
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


def _replica_problem(plan: Plan, replicas: int) -> Problem | None:
    reason = ""
    if replicas > 1 and not plan.zero:
        reason = f"ZeRO-0 has no shards to have {replicas} replicas of"
    elif plan.dp % replicas:
        reason = f"{replicas} replicas do not divide DP {plan.dp}"
    elif (plan.dp // replicas * plan.cp) % plan.ep:
        reason = f"EP {plan.ep} does not divide the {plan.dp // replicas * plan.cp} shards of a replica"
    return Problem("replicas", reason) if reason else None


def _expert_sizes(model: Model, ranks: int) -> list[int]:
    return [n for n in range(1, max(1, model.experts) + 1) if ranks % n == 0 and max(1, model.experts) % n == 0]
