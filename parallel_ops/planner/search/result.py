"""Results of a search: ranked plans, rejected ones with their reasons, sensitivity to the constants."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.error_band import tied
from parallel_ops.planner.feasibility import MemoryCheck, Problem, excess
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan, restored, unchecked
from parallel_ops.planner.results import Estimate
from parallel_ops.planner.validation.recipes import Recipe

# A near miss exceeds a GPU's memory by at most this share of it.
NEAR = 0.1


class Rejection(NamedTuple):
    """A plan that cannot run, and the reason.

    Attributes:
        base: the plan, but for ``recompute`` and ``offload``.
        kind: kind of reason, for grouping.
        reason: a sentence: ``stage 0 needs 91.2 GiB of 80.0: 11.2 too much``.
        excess: bytes of memory that are missing; 0 for other reasons.
        recompute, offload: of the plan.
    """

    base: Plan
    kind: str
    reason: str
    excess: float
    recompute: str
    offload: str

    @property
    def plan(self) -> Plan:
        """The rejected plan."""
        return unchecked(self.base, recompute=self.recompute, offload=self.offload)


# Changes of a plan's fields, why it cannot run with these, and with which pairs of offload and recomputation.
Variant = tuple[dict[str, Any], Problem, tuple[tuple[str, str], ...]]
# A plan, its offload and recomputation, and the stage that needs too much memory with what it needs and has.
Large = tuple[Any, tuple[str, str], int, float, float]


class Rejections:
    """Plans that cannot run, in the order of the search: first those that could not whatever the memory.

    There may be a million, so a ``Rejection`` and its sentence are made when they are read.
    """

    def __init__(self, model: Model, cluster: Cluster) -> None:
        self._model, self._cluster = model, cluster
        self._near = NEAR * cluster.gpu.memory
        # Of a plan from another process the values.
        self._others: list[tuple[Any, tuple[Variant, ...]]] = []
        self._large: list[Large] = []

    def add(self, plan: Plan, variants: tuple[Variant, ...]) -> None:
        """Adds ``variants`` of the plan."""
        self._others.append((plan, variants))

    def add_large(self, plan: Plan, pair: tuple[str, str], worst: tuple[int, float, float]) -> bool:
        """Adds a plan of which a stage, ``worst``, needs more bytes than are available; whether it is not ``near``."""
        self._large.append((plan, pair, *worst))
        return worst[1] - worst[2] > self._near

    def add_larger(self, plan: Plan, pair: tuple[str, str]) -> None:
        """Adds a plan that needs at least as much as one that is not ``near``: it is counted when it is read."""
        self._large.append((plan, pair, 0, math.inf, 0.0))

    def taken(self) -> tuple[list[Any], list[Any]]:
        """What has been added, for ``extend``; it is no longer here."""
        found = self._others, self._large
        self._others, self._large = [], []
        return found

    def extend(self, others: list[Any], large: list[Any]) -> None:
        """Adds what others have ``taken``."""
        self._others += others
        self._large += large

    def __len__(self) -> int:
        return len(self._large) + sum(len(pairs) for _, variants in self._others for *_, pairs in variants)

    def __iter__(self) -> Iterator[Rejection]:
        for plan, variants in self._others:
            for variant in variants:
                yield from self._of_variant(plan, variant)
        yield from map(self._of_large, self._large)

    def nearest(self) -> dict[str, tuple[int, Rejection]]:
        """Number of plans and the one that lacks the least memory, by kind of reason, the most frequent first."""
        counts: Counter[str] = Counter()
        least: dict[str, tuple[float, Any, Variant]] = {}
        for plan, variants in self._others:
            for variant in variants:
                _, (kind, _, lacks), pairs = variant
                counts[kind] += len(pairs)
                if kind not in least or lacks < least[kind][0]:
                    least[kind] = lacks, plan, variant
        found = {kind: next(self._of_variant(plan, variant)) for kind, (_, plan, variant) in least.items()}
        if self._large:
            counts["memory"] = len(self._large)
            found["memory"] = self._of_large(min(self._large, key=_lacks))
        return {kind: (count, found[kind]) for kind, count in counts.most_common()}

    def near(self, most: int) -> list[Rejection]:
        """``most`` of the plans that fit but for at most ``NEAR`` of a GPU's memory, the least excess first."""
        found = sorted((large for large in self._large if _lacks(large) <= self._near), key=_lacks)
        return [self._of_large(large) for large in found[:most]]

    def _of_variant(self, plan: Any, variant: Variant) -> Iterator[Rejection]:
        changes, found, pairs = variant
        base = unchecked(_plan(plan), **changes)
        for offload, recompute in pairs:
            yield Rejection(base, found.kind, found.reason, found.excess, recompute, offload)

    def _of_large(self, large: Large) -> Rejection:
        (offload, recompute), worst, plan = large[1], large[2:], _plan(large[0])
        if worst[1] == math.inf:
            worst = MemoryCheck(self._model, self._cluster, plan).worst(recompute, offload)
        found = excess("memory", *worst)
        assert found is not None
        return Rejection(plan, found.kind, found.reason, found.excess, recompute, offload)


def _plan(given: Any) -> Plan:
    return given if isinstance(given, Plan) else restored(given)


def _lacks(large: Large) -> float:
    return large[3] - large[4]


class NearMiss(NamedTuple):
    """A plan that is faster than the best (``seconds`` per step) but needs ``excess`` bytes more than a GPU has."""

    plan: Plan
    reason: str
    excess: float
    seconds: float


class Gain(NamedTuple):
    """The step with ``more`` of one resource.

    Attributes:
        resource: ``"memory"`` of a GPU in bytes; ``"flops"``, ``"bandwidth"`` (of its memory), ``"intra"`` and
            ``"inter"`` (links) in FLOP/s or bytes/s a GPU; ``"gpus"``.
        more: the addition.
        plan, seconds: the first plan, with more memory the fastest near miss, with more GPUs on further data-parallel
            ranks; its time of a step.
    """

    resource: str
    more: float
    plan: Plan
    seconds: float


def division(plan: Plan) -> tuple[object, ...]:
    """A key that plans share which divide the ranks alike and compute in the same dtypes. Variants of a division differ
    in ZeRO, schedule, micro-batch, recomputation and offload."""
    sizes = plan.dp, plan.tp, plan.pp, plan.cp, plan.ep, plan.expert_shards
    return (*sizes, plan.dtype, plan.grad_dtype, plan.moment_dtype, plan.cuda_graph)


def twins(plan: Plan) -> tuple[object, ...]:
    """A key that plans share which differ only in ZeRO, or in how the tokens of a rank are split: micro-batches of two
    sequences on two context-parallel ranks, or of one on each of two data-parallel ranks."""
    same = {"dp": plan.dp * plan.cp, "cp": 1, "cp_kind": "", "micro_batch": plan.micro_batch / plan.cp, "zero": 0}
    return tuple({**vars(plan), **same}.values())


def features(plan: Plan) -> int:
    """How much a plan asks of a system and a model: kinds of parallelism, recomputation and the like.

    Data parallelism and ZeRO of any stage leave the model as it is; the other kinds divide it.
    """
    divided = 4 * ((plan.pp > 1) + (plan.ep > 1)) + (2 + plan.cp.bit_length() if plan.cp > 1 else 0)
    # Each doubling of tensor parallelism makes matmuls narrower.
    divided += 1 + 3 * (plan.tp.bit_length() - 1) if plan.tp > 1 else 0
    sharded = (plan.zero > 0) + (plan.zero == 3) + (plan.dp_replicate > 1)
    uneven, schedule = bool(plan.layers_per_chunk), 2 * (plan.schedule not in ("1f1b", "interleaved"))
    memory = (plan.recompute != "none") + 2 * (plan.offload != "none")
    return divided + sharded + uneven + schedule + (plan.schedule == "interleaved") + memory


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """How the ranking depends on one constant of ``Efficiency``.

    Attributes:
        constant: name of the constant.
        low, high: the best plan if the constant is 20 % lower or higher.
        changes: whether ``low`` or ``high`` differs from the best plan.
        seconds: change of the best plan's step time from low to high, relative to the step time.
    """

    constant: str
    low: Plan
    high: Plan
    changes: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """All plans of a model on a cluster: those that run, fastest first, and the others with their reasons.

    Attributes:
        model, cluster: the arguments of ``search``.
        plans: estimates of the fastest plan of each ``division`` that a known system can run. First is the simplest of
            those within 2 % of the fastest. Variants that only just fit (``Estimate.tight``) but are faster come after
            the others.
        rejected: the plans that cannot run.
        sensitivity: dependence of the choice on each constant.
        ranking: every plan that runs, with its seconds per step from a simulation of a smaller pipeline.
        misses: rejected plans that are faster than the best and need little more memory, the least excess first.
        own: the fastest plan that ``parallel-ops train`` alone runs, if it is faster than the first; else ``None``.
        plain: the fastest plan of data parallelism and ZeRO alone, if one fits and the first divides the model.
        recipe: the published run of this model that is nearest, if there is one.
        published: the fastest plan that divides the model as ``recipe`` does; ``None`` if none fits.
        gains: the step with more of one resource, the one that shortens it most first: the binding constraint. More
            GPUs come last.
        smallest: if no plan runs, the fewest GPUs of this kind that suffice; 0 if none do, or if a plan runs.
    """

    model: Model
    cluster: Cluster
    plans: tuple[Estimate, ...]
    rejected: Rejections
    sensitivity: tuple[Sensitivity, ...] = ()
    ranking: tuple[tuple[Plan, float], ...] = ()
    misses: tuple[NearMiss, ...] = ()
    gains: tuple[Gain, ...] = ()
    own: Estimate | None = None
    plain: Estimate | None = None
    recipe: Recipe | None = None
    published: Estimate | None = None
    smallest: int = 0

    @property
    def best(self) -> Estimate:
        """The first plan: the simplest of those within 2 % of the fastest.

        Raises:
            ValueError: no plan fits; names the smallest cluster that suffices.
        """
        if not self.plans:
            raise ValueError(self.nothing_fits())
        return self.plans[0]

    @property
    def simplest(self) -> Estimate:
        """The plan within the error band of the best that has the fewest kinds of parallelism and devices
        against a lack of memory."""
        return min(self.plans[: self.ties], key=lambda found: (features(found.plan), found.step))

    @property
    def ties(self) -> int:
        """Number of ``plans`` within the error band of the best (``tied``), the best included."""
        width, best = self.best.error_band.time, self.best.step
        return sum((tied(found.step, best, width) and not found.tight) or found is self.best for found in self.plans)

    def nothing_fits(self) -> str:
        """Error message of a search without plans."""
        if self.ranking:
            first, where = self.ranking[0][0].describe(), f"{self.model.name} that fit on {self.cluster.name}"
            return f"no known system runs the plans of {where}, such as {first}; try --any, or --for SYSTEM"
        would = f"{self.smallest:,} of these GPUs would do" if self.smallest else "no number of these GPUs would do"
        if self.smallest and self.smallest <= self.cluster.gpus and self.rejected:
            example = next(rejection for _, rejection in self.rejected.nearest().values())
            return (
                f"no plan of {self.model.name} runs on all {self.cluster.gpus:,} GPUs of {self.cluster.name}, mostly "
                f"since {example.reason}; {would}"
            )
        large = [rejection for _, rejection in self.rejected.nearest().values() if rejection.excess]
        if self.rejected and not large:
            reasons = dict.fromkeys(rejection.reason for rejection in self.rejected)
            more = f", and {len(reasons) - 3} more reasons" if len(reasons) > 3 else ""
            return f"no plan of {self.model.name} runs on {self.cluster.name}: {'; '.join(list(reasons)[:3])}{more}" + (
                f"; {would}" if self.smallest else ""
            )
        fits = f"no plan of {self.model.name} fits on {self.cluster.name}; {would}"
        if large:
            nearest = min(large, key=lambda rejection: rejection.excess)
            fits += f"; the nearest is {nearest.plan.describe()}: {nearest.reason}"
        return fits

    def reasons(self) -> dict[str, int]:
        """Number of rejected plans by kind of reason, the most frequent first."""
        return {kind: count for kind, (count, _) in self.rejected.nearest().items()}
