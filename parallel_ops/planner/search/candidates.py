"""Enumeration of the plans of a search: those that can run, and the reasons against the others."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.export import ExportTarget, find_target
from parallel_ops.planner.feasibility import (
    SPLIT_BACKWARD,
    MemoryCheck,
    Problem,
    division_problem,
    excess,
    saving_problem,
)
from parallel_ops.planner.memory.states import state_memory
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import V_SHAPED, Plan, unchecked
from parallel_ops.planner.precision import stored
from parallel_ops.planner.search.balance import balanced_chunks
from parallel_ops.planner.search.options import STATES, SearchOptions
from parallel_ops.planner.search.result import Rejections, Variant

# Why a plan cannot run, apart from memory, by offload and recomputation.
_Problems = Mapping[tuple[str, str], Problem | None]
# Changes of fields, and the problems with them.
_Tried = tuple[dict[str, Any], _Problems]


class Candidates:
    """The candidates of a search with a global batch of ``batch`` sequences: see ``plans``."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        batch: int,
        options: SearchOptions,
        constants: Efficiency,
    ) -> None:
        self.model, self.cluster, self.batch = model, cluster, batch
        self.options, self.constants, self.rejected = options, constants, Rejections(model, cluster)
        self._shared: dict[object, Any] = {}  # memory of the variants of one placement and sharding
        # Of these, by kind, the smallest micro-batch with which a pair of offload and recomputation is no near miss.
        self._large: dict[object, dict[tuple[str, str], int]] = {}
        self._sizes: tuple[int, int, int] | None = None  # TP, PP and CP of the last placement
        self._found: dict[object, Any] = {}  # variants and uneven stages of one TP, PP and CP
        # Offload and recomputation, the cheapest first.
        self.least = tuple(itertools.product(options.offload, options.recompute))
        self.system: ExportTarget | None = find_target(options.target) if options.target else None

    def plans(self) -> Iterator[Plan]:
        """Yields every plan that can run, with its cheapest recomputation and offload. Collects ``rejected`` ones."""
        return itertools.chain.from_iterable(map(self.of_placement, self.placements()))

    def of_placement(self, placed: Plan) -> Iterator[Plan]:
        """``plans`` of one of ``placements``."""
        sizes = placed.tp, placed.pp, placed.cp
        if sizes != self._sizes:
            self._sizes, self._found = sizes, {}
        for sharded in self._shardings(placed):
            found = self._states_problem(sharded)
            if found:
                self._reject(sharded, found)
                continue
            self._shared, self._large = {}, {}
            roomy = set()
            tried, others = self._variants(sharded)
            self.rejected.add(sharded, others)
            for changes, problems in tried:
                plan = unchecked(sharded, **changes)
                variant = _variant(plan)
                # Sequence parallelism sends as much and divides more. Without it a plan is only tried where memory
                # is short: the input that a linear gathers is whole for a moment.
                if not plan.sequence_parallel and variant in roomy:
                    continue
                for fitting in self._that_fit(plan, problems):
                    # Systems offload with ZeRO alone, on one GPU too.
                    if plan.zero and fitting.offload == "none" and self._alone(plan):
                        continue
                    if plan.sequence_parallel and fitting.offload == "none" and fitting.recompute != "full":
                        roomy.add(variant)
                    yield fitting

    def _reject(self, plan: Plan, found: Problem) -> None:
        self.rejected.add(plan, (({}, found, ((plan.offload, plan.recompute),)),))

    def _alone(self, plan: Plan) -> bool:
        """Nobody to share with: ZeRO is the same as ZeRO-0, but for a target or in fixed stages."""
        return plan.dp * plan.cp == 1 and not self.system and 0 in self.options.zero

    def _own(self, plan: Plan) -> dict[str, Any]:
        """What the target does, as changes of fields."""
        return {**(self.system.own(plan) if self.system else {}), **self.options.fixed}

    def placements(self) -> Iterator[Plan]:
        """Sizes of parallelism that multiply to the number of GPUs and that the model allows. Those that differ only
        in EP follow each other."""
        model, gpus, options = self.model, self.cluster.gpus, self.options
        for name in ("dp", "tp", "pp", "cp"):
            for size in getattr(options, name):
                if gpus % size:
                    whole = replace(options.base, tp=1, expert_tp=0)
                    plan = replace(whole, **{name: size}, global_batch=size if name == "dp" else 1)
                    self._reject(plan, Problem("size", f"{name}={size} does not divide the {gpus} GPUs"))
        divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
        longest = max(1, model.seq_length // options.context_tokens)
        sizes = ([n for n in divisors if n in (given or divisors)] for given in (options.tp, options.pp, options.cp))
        for tp, pp, cp in itertools.product(*sizes):
            if gpus % (tp * pp * cp) or (cp > longest and not options.cp):
                continue
            dp, shards = gpus // (tp * pp * cp), options.base.expert_tp or tp
            if options.dp and dp not in options.dp:
                continue
            if tp % shards:
                plan = replace(options.base, dp=dp, tp=tp, pp=pp, cp=cp, expert_tp=0, global_batch=dp)
                self._reject(plan, Problem("tp does not divide", f"expert_tp={shards} does not divide TP {tp}"))
                continue
            if self.batch % dp:
                plan = replace(options.base, dp=dp, tp=tp, pp=pp, cp=cp, global_batch=dp)
                reason = f"DP {dp} does not divide the batch of {self.batch}"
                self._reject(plan, Problem("batch does not divide", reason))
                continue
            for ep in _expert_sizes(model, dp * cp * tp // shards):
                if options.ep and ep not in options.ep:
                    continue
                plan = replace(options.base, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, global_batch=self.batch)
                found = division_problem(model, self.cluster, plan, plan.recompute)
                if found:
                    self._reject(plan, found)
                else:
                    yield plan

    def _shardings(self, placed: Plan) -> Iterator[Plan]:
        """Dtypes and other values of ``STATES``, ZeRO stages, and replicas of their shards, of one placement."""
        alone = self._alone(placed) and self.cluster.gpus > 1
        tried = itertools.product(*(getattr(self.options, name) for name in STATES))
        for values, zero in itertools.product(tried, self.options.zero):
            if zero and alone:
                continue  # nobody to share with: the same as ZeRO-0
            changes = dict(zip(STATES, values, strict=True))
            if changes["grad_dtype"] not in ("fp32", stored(changes["dtype"])):
                continue
            plan = unchecked(placed, **changes, zero=zero)
            plan = unchecked(plan, **self._own(plan))
            for replicas in self.options.dp_replicate or (1, *self._replicas(placed, zero)):
                found = _replica_problem(plan, replicas)
                if found:
                    self._reject(plan, found)
                else:
                    yield unchecked(plan, dp_replicate=replicas)

    def _replicas(self, placed: Plan, zero: int) -> tuple[int, ...]:
        """One replica per node, if ZeRO-3 without a pipeline would gather layers between nodes in every micro-batch."""
        inside = self.cluster.node_size // (placed.tp * placed.cp)
        if zero < 3 or placed.pp > 1 or inside < 2 or placed.dp <= inside:
            return ()
        if placed.dp % inside or inside * placed.cp % placed.ep:
            return ()
        return (placed.dp // inside,)

    def _states_problem(self, plan: Plan) -> Problem | None:
        """The problem if parameters and gradients alone (and the optimizer, if none of the options offloads it) exceed
        a GPU's memory; else ``None``."""
        offloaded = any("optimizer" in offload for offload in self.options.offload)
        worst, needs = 0, 0.0
        for stage in {0, plan.pp // 2, plan.pp - 1}:
            states = state_memory(self.model, plan, stage, plan.zero)
            worst, needs = max((worst, needs), (stage, sum(states[: 2 if offloaded else 3])), key=lambda item: item[1])
        found = excess("memory of model states", worst, needs, self.cluster.stage_gpus(plan.pp)[worst].memory)
        return found and found._replace(reason=f"{found.reason}, for its model states alone")

    def _variants(self, placed: Plan) -> tuple[list[_Tried], tuple[Variant, ...]]:
        """Schedules, micro-batches, sequence parallelism and kinds of context parallelism for one placement and
        sharding, as changes of fields: what can run if the memory suffices, and the others. EP changes neither."""
        zero = placed.zero if self.system else placed.zero == 3  # a target may do more by it
        key = "variants", zero, *(getattr(placed, name) for name in STATES)
        if key not in self._found:
            tried: list[_Tried] = []
            others: list[Variant] = []
            for values in self._changes(placed):
                own = self._own(unchecked(placed, **values))
                changes = {**values, **own}
                problems = self._problems(unchecked(placed, **changes))
                if not all(problems.values()):
                    tried.append((changes, problems))
                    continue
                for found in filter(None, dict.fromkeys(problems.values())):
                    others.append((changes, found, tuple(pair for pair in self.least if problems[pair] == found)))
            self._found[key] = tried, tuple(others)
        known: tuple[list[_Tried], tuple[Variant, ...]] = self._found[key]
        return known

    def _changes(self, placed: Plan) -> Iterator[dict[str, Any]]:
        options = self.options
        schedules = [
            (kind, v)
            for kind in (options.schedules if placed.pp > 1 else ("1f1b",))
            for v in (options.virtual_stages if kind == "interleaved" else (2 if kind in V_SHAPED else 1,))
        ]
        sharding = options.sequence_parallel if placed.tp > 1 else (False,)
        cp_kinds = options.cp_kinds if placed.cp > 1 else ("ring",)
        names = "schedule", "virtual_stages", "micro_batch", "sequence_parallel", "cp_kind"
        for micro_batch in options.micro_batches:
            if self.batch % (placed.dp * micro_batch) == 0:
                for schedule, sequence_parallel, cp_kind in itertools.product(schedules, sharding, cp_kinds):
                    values = *schedule, micro_batch, sequence_parallel, cp_kind
                    yield dict(zip(names, values, strict=True))

    def _problems(self, plan: Plan) -> _Problems:
        """``feasibility.problem`` of the plan with each offload and recomputation. It never depends on how
        ``balanced_chunks`` spreads the layers; what it says of EP, ``placements`` has asked."""
        kinds = self.options.recompute if plan.schedule in SPLIT_BACKWARD else (plan.recompute,)
        divided = {kind: division_problem(self.model, self.cluster, plan, kind) for kind in kinds}
        return {
            (offload, kind): divided.get(kind, divided[kinds[0]]) or saving_problem(self.model, plan, kind, offload)
            for offload, kind in self.least
        }

    def _that_fit(self, plan: Plan, problems: _Problems) -> Iterator[Plan]:
        """The plan with the cheapest recomputation and offload that fit; with uneven stages if these are faster.

        If uneven stages need more recomputation or offload than even ones, both are returned. On a cluster with several
        kinds of GPU only uneven stages are tried.
        """
        uneven = self._uneven(plan) if plan.pp > 1 else ()
        if self.cluster.parts:
            even, found = None, self._least(unchecked(plan, layers_per_chunk=uneven), problems, self.rejected)
        else:
            # Reasons are recorded for even stages only.
            even = self._least(plan, problems, self.rejected)
            found = self._least(unchecked(plan, layers_per_chunk=uneven), problems, None) if uneven else None
        if found:
            yield found
        if even and not (found and (even.recompute, even.offload) == (found.recompute, found.offload)):
            yield even

    def _uneven(self, plan: Plan) -> tuple[int, ...]:
        """``balanced_chunks``, which ZeRO only changes by what a system does with it."""
        states = plan.dtype, plan.grad_dtype, plan.cuda_graph, plan.dispatcher, plan.fsdp, plan.flash_attention
        key = *_variant(plan), plan.sequence_parallel, *states, plan.fused_loss, plan.ep
        if key not in self._found:
            self._found[key] = balanced_chunks(self.model, self.cluster, plan, self.constants)
        found: tuple[int, ...] = self._found[key]
        return found

    def _least(self, plan: Plan, problems: _Problems, rejected: Rejections | None) -> Plan | None:
        """The plan with the first offload and recomputation that fit; ``None`` if none do. ``rejected``: collects the
        others."""
        memory, size = None, plan.micro_batch
        kind = plan.schedule, plan.virtual_stages, plan.cp_kind, plan.sequence_parallel, plan.layers_per_chunk
        large = self._large.setdefault(kind, {})
        for pair in self.least:
            offload, recompute = pair
            found = problems[pair]
            if found is None and self.system:
                tried = unchecked(plan, recompute=recompute, offload=offload)
                reason = self.system.problem(self.model, self.cluster, tried)
                found = Problem(f"{self.system.name} cannot run it", reason) if reason else None
            if found is not None:
                if rejected is not None:
                    rejected.add(plan, (({}, found, (pair,)),))
                continue
            # A larger micro-batch needs as much memory or more, but for gradients that one alone reduces by layers.
            if rejected is not None and large.get(pair, size) < size and plan.micro_batches > 1:
                rejected.add_larger(plan, pair)
                continue
            memory = memory or MemoryCheck(self.model, self.cluster, plan, self._shared)
            worst = memory.worst(recompute, offload)
            if worst[1] <= worst[2]:
                same = offload == plan.offload and recompute == plan.recompute
                return plan if same else unchecked(plan, offload=offload, recompute=recompute)
            if rejected is not None and rejected.add_large(plan, pair, worst):
                large.setdefault(pair, size)
        return None


def _variant(plan: Plan) -> tuple[object, ...]:
    return plan.micro_batch, plan.schedule, plan.virtual_stages, plan.cp_kind


def _replica_problem(plan: Plan, replicas: int) -> Problem | None:
    reason = ""
    if replicas > 1 and not plan.zero:
        reason = f"ZeRO-0 has no shards to have {replicas} replicas of"
    elif plan.dp % replicas:
        reason = f"{replicas} replicas do not divide DP {plan.dp}"
    elif (ranks := plan.dp // replicas * plan.cp * plan.tp // plan.expert_shards) % plan.ep:
        reason = f"EP {plan.ep} does not divide the {ranks} shards of a replica"
    return Problem("replicas", reason) if reason else None


def _expert_sizes(model: Model, ranks: int) -> list[int]:
    return [n for n in range(1, max(1, model.experts) + 1) if ranks % n == 0 and max(1, model.experts) % n == 0]
