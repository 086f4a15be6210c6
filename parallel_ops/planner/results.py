"""Results of the planner: memory of a stage, traffic of a group, the estimate of a plan, a search."""

from dataclasses import dataclass, fields
from typing import NamedTuple

from parallel_ops.planner.cluster import GPU, Cluster
from parallel_ops.planner.compute.software import CURRENT
from parallel_ops.planner.error_band import ErrorBand, error_band, tied
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan, unchecked

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Peak memory of one GPU of a pipeline stage, in bytes.

    Attributes:
        stage: index of the stage, from 0.
        parameters, gradients, optimizer: the model states; master weights count as optimizer.
        activations: kept for the backward pass by all micro-batches in flight, and the working memory of one layer.
        logits: logits, their gradient and the softmax of the loss.
        buffers: communication buffers: gathered parameters of ZeRO-3, gradient buckets, pipeline messages.
        runtime: memory of the driver, NCCL and the allocator.
        host: host memory that one GPU offloads to; not part of ``total``.
        in_flight: micro-batches whose activations are held at the peak.
    """

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    runtime: float
    host: float = 0.0
    in_flight: float = 1.0

    @property
    def total(self) -> float:
        """All device memory."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.buffers + self.runtime

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer together."""
        return self.parameters + self.gradients + self.optimizer


DEVICE_MEMORY = tuple(f.name for f in fields(StageMemory) if f.name not in ("stage", "host", "in_flight"))


class StageGroup(NamedTuple):
    """Consecutive stages ``first`` to ``last`` on one kind of GPU, each with ``memory``."""

    first: int
    last: int
    memory: StageMemory
    gpu: GPU

    @property
    def label(self) -> str:
        """``"3"`` or ``"3-6"``."""
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One kind of collective in one step, on one GPU of the slowest stage.

    Attributes:
        group: ``"dp"``, ``"dp_replicate"``, ``"tp"``, ``"pp"``, ``"cp"`` or ``"ep"``; ``"host"`` for offload.
        collective: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"all-to-all"``, ``"send-receive"`` or
            ``"copy"``.
        algorithm: ``"ring"``, ``"tree"`` or ``"direct"``.
        link: name of the slowest link used.
        size: ranks of the group.
        count: collectives per step, on average over the layers if only some are recomputed.
        bytes: bytes that one GPU sends per step.
        seconds: time of all these collectives per step.
        exposed: the part of ``seconds`` that is not hidden behind computation.
    """

    group: str
    collective: str
    algorithm: str
    link: str
    size: int
    count: float
    bytes: float
    seconds: float
    exposed: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Cost of one plan. Times are seconds per optimizer step, memory is in bytes.

    Attributes:
        model, cluster, plan, software: the arguments of ``estimate``.
        memory: of each pipeline stage, the first stage first.
        transfers: traffic by group and collective.
        step: time of a step, the sum of ``compute``, ``bubble``, ``exposed`` and ``optimizer``.
        compute: forward, backward and recomputation of the slowest stage.
        bubble: time that the slowest stage waits for other stages and their messages.
        exposed: communication that is not hidden behind computation.
        optimizer: update of the parameters.
        bubble_fraction: ``bubble / (step - exposed data-parallel communication - optimizer)``.
        tokens_per_second: of the whole cluster.
        model_flops, hardware_flops: FLOPs of one step over all GPUs, without and with recomputation.
        mfu, hfu: model and hardware FLOP/s over the peak.
        broken_rules: name and reason of each rule of thumb (``parallel_ops.planner.rules``) that the plan breaks.
        cost: of one step, in the currency of ``cluster.price``; 0 if that is unknown.
        energy: of one step, in joules; 0 if the GPU's power is unknown.
    """

    model: Model
    cluster: Cluster
    plan: Plan
    memory: tuple[StageMemory, ...]
    transfers: tuple[Transfer, ...]
    step: float
    compute: float
    bubble: float
    exposed: float
    optimizer: float
    bubble_fraction: float
    tokens_per_second: float
    model_flops: float
    hardware_flops: float
    mfu: float
    hfu: float
    broken_rules: tuple[tuple[str, str], ...] = ()
    cost: float = 0.0
    energy: float = 0.0
    software: str = CURRENT

    @property
    def peak_memory(self) -> StageMemory:
        """The stage that needs the most memory."""
        return max(self.memory, key=lambda stage: stage.total)

    @property
    def tight(self) -> bool:
        """Whether the memory exceeds that of the GPU once it is half of its error band larger than estimated."""
        gpus, band = self.cluster.stage_gpus(self.plan.pp), self.error_band.memory
        return any(stage.total * (1 + band / 2) > gpus[stage.stage].memory for stage in self.memory)

    @property
    def error_band(self) -> ErrorBand:
        """Error band of the step time and the memory."""
        return error_band(self.cluster, self.plan, software=self.software, experts=self.model.expert_kind)

    @property
    def tflops_per_gpu(self) -> float:
        """TFLOP/s of one GPU, without recomputation."""
        return self.model_flops / self.step / self.plan.gpus / 1e12

    def stage_groups(self) -> list[StageGroup]:
        """The stages in order. Neighbours are grouped if every part of their memory differs by less than 0.005 GiB."""

        def alike(one: StageMemory, other: StageMemory) -> bool:
            return all(abs(getattr(one, name) - getattr(other, name)) < 0.005 * GIB for name in DEVICE_MEMORY)

        groups: list[StageGroup] = []
        for stage, gpu in zip(self.memory, self.cluster.stage_gpus(self.plan.pp), strict=True):
            if groups and groups[-1].gpu == gpu and alike(groups[-1].memory, stage):
                groups[-1] = groups[-1]._replace(last=stage.stage)
            else:
                groups.append(StageGroup(stage.stage, stage.stage, stage, gpu))
        return groups

    def days(self, tokens: float) -> float:
        """Days to train on ``tokens`` tokens."""
        return tokens / self.tokens_per_second / 86400


class Rejection(NamedTuple):
    """A plan that cannot run, and the reason.

    A search rejects hundreds of thousands of plans, so ``plan`` is built on access, from a plan that many share.

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


class NearMiss(NamedTuple):
    """A plan that is faster than the best (``seconds`` per step) but needs ``excess`` bytes more than a GPU has."""

    plan: Plan
    reason: str
    excess: float
    seconds: float


def family(plan: Plan) -> tuple[object, ...]:
    """A key that near-twins share: plans that differ only in ZeRO 1 or 2 (or, with one rank to shard over, in any ZeRO
    stage), or in how the tokens of a rank are split (micro-batches of two sequences on two context-parallel ranks, or
    of one on each of two data-parallel ranks)."""
    same = {"dp": plan.dp * plan.cp, "cp": 1, "cp_kind": "", "micro_batch": plan.micro_batch / plan.cp}
    zero = 0 if plan.dp * plan.cp == 1 else plan.zero - (plan.zero == 2)
    return tuple({**vars(plan), **same, "zero": zero}.values())


def features(plan: Plan) -> int:
    """How much a plan asks of a system and a model: kinds of parallelism, recomputation and the like.

    Data parallelism and ZeRO of any stage leave the model as it is; the other kinds divide it.
    """
    divided = 4 * sum(getattr(plan, name) > 1 for name in ("tp", "pp", "cp", "ep"))
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
        plans: estimates of the fastest plans that a known system can run, one per ``family``. First is the simplest of
            those within 2 % of the fastest. Plans that only just fit (``Estimate.tight``) come after the others.
        rejected: the plans that cannot run.
        sensitivity: dependence of the choice on each constant.
        ranking: every plan that runs, with its seconds per step from a simulation of a smaller pipeline.
        misses: rejected plans that are faster than the best and need little more memory, the least excess first.
        smallest: if no plan runs, the fewest GPUs of this kind that suffice; 0 if none do, or if a plan runs.
    """

    model: Model
    cluster: Cluster
    plans: tuple[Estimate, ...]
    rejected: tuple[Rejection, ...]
    sensitivity: tuple[Sensitivity, ...] = ()
    ranking: tuple[tuple[Plan, float], ...] = ()
    misses: tuple[NearMiss, ...] = ()
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
        would = f"{self.smallest:,} of these GPUs would do" if self.smallest else "no number of these GPUs would do"
        if self.smallest and self.smallest <= self.cluster.gpus and self.rejected:
            kind = next(iter(self.reasons()))
            example = next(rejection for rejection in self.rejected if rejection.kind == kind)
            return (
                f"no plan of {self.model.name} runs on all {self.cluster.gpus:,} GPUs of {self.cluster.name}, mostly "
                f"since {example.reason}; {would}"
            )
        large = [rejection for rejection in self.rejected if rejection.excess]
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
        counts: dict[str, int] = {}
        for rejection in self.rejected:
            counts[rejection.kind] = counts.get(rejection.kind, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: -item[1]))
