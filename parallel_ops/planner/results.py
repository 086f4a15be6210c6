"""Results of the planner: memory of a stage, traffic of a group, the estimate of a plan."""

from dataclasses import dataclass, fields, replace

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.software import CURRENT
from parallel_ops.planner.error_band import ErrorBand, error_band
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan

GIB = 2**30
# Least band of the time with adapters: NeMo AutoModel's two published runs took 4 % less and 28 % more.
ADAPTERS = 0.28


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
        return self.states + self.activations + self.logits + self.buffers + self.runtime

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer together."""
        return self.parameters + self.gradients + self.optimizer


DEVICE_MEMORY = tuple(f.name for f in fields(StageMemory) if f.name not in ("stage", "host", "in_flight"))


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
        tokens_per_second: of the whole cluster, padding and tokens that count in no loss among them.
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
        found = error_band(self.cluster, self.plan, software=self.software, experts=self.model.expert_kind)
        return replace(found, time=max(found.time, ADAPTERS)) if self.model.lora_rank else found

    @property
    def tflops_per_gpu(self) -> float:
        """TFLOP/s of one GPU, without recomputation."""
        return self.model_flops / self.step / self.plan.gpus / 1e12

    @property
    def data_tokens_per_second(self) -> float:
        """Tokens of documents, without padding."""
        return self.tokens_per_second * (1 - self.model.padding)

    @property
    def loss_tokens_per_second(self) -> float:
        """Tokens that count in the loss."""
        return self.data_tokens_per_second * self.model.loss_fraction

    def days(self, tokens: float) -> float:
        """Days to train on ``tokens`` tokens of documents."""
        return tokens / self.data_tokens_per_second / 86400
