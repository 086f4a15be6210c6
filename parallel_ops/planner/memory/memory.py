"""Memory of one GPU of each pipeline stage.

Notation: s sequence length over cp, b micro-batch, h hidden size, a heads, t tp, s_k whole sequence length.

    states        parameters, gradients and optimizer: ``states.py``
    activations   s b h (10 + 24/t + 5 a s_k / (h t)) bytes per layer of a GPT; s b h (34 + 5 a s_k / h) / t with
                  sequence parallelism; without the last term under selective recomputation; 2 s b h under full.
                  arXiv:2205.05198, table 2
    in flight     micro-batches that a stage holds: ``placement.in_flight``
    ends          s b h dropout mask after the embedding; 4 s b h before the loss (arXiv:2205.05198, section 4.3);
                  logits of the loss: ``_LOSS_BYTES``

Activations are added up tensor by tensor in ``activations.py``.
"""

from operator import le, mul
from typing import Any, NamedTuple

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.memory.activations import layer_activations
from parallel_ops.planner.memory.communicators import process_bytes
from parallel_ops.planner.memory.states import element_bytes, sharded_states, state_memory
from parallel_ops.planner.memory.working import autograd_owns_gradients, gathered_ends, layer_buffers, layer_work
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import (
    group_size,
    head_rank,
    in_flight,
    layer_counts,
    recomputed_share,
    stage_layout,
)
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import StageMemory

# Memory that the allocator reserves beyond the counted tensors; more with FSDP in a pipeline, where micro-batches are
# allocated and freed beside gathered parameters. Chosen with torchtitan's tables in view (validation/torchtitan.json).
FRAGMENTATION, SHARDED_PIPELINE_FRAGMENTATION = 0.05, 0.125
# Peak bytes per logit of an unfused loss in PyTorch: fp32 logits, their log-softmax and its gradient; with tensor
# parallelism also the shifted logits.
_LOSS_BYTES, _SHARDED_LOSS_BYTES = 12, 16
# One chunk of logits in parallel_ops.vocab_parallel_linear_cross_entropy on a GPU.
FUSED_LOSS_BYTES = 256 * 2**20


def process_memory(cluster: Cluster, plan: Plan) -> dict[str, float]:
    """``runtime`` of ``memory`` on a cluster, and ``fragmentation`` where it differs from that of PyTorch.

    XLA plans the memory of a whole step, and TPUs have neither a driver's context nor NCCL. Nor have processes on CPUs.
    """
    generation = cluster.gpu.generation
    if generation == "cpu":
        return {"runtime": 0.0}
    if generation.startswith("tpu"):
        return {"runtime": 0.0, "fragmentation": 0.0}
    return {"runtime": process_bytes(plan, cluster)}


def memory(
    model: Model,
    plan: Plan,
    *,
    logit_chunk: float = FUSED_LOSS_BYTES,
    runtime: float | None = None,
    fragmentation: float | None = None,
) -> tuple[StageMemory, ...]:
    """Peak memory of one GPU of each pipeline stage, the first stage first.

    The formulas and their sources are at the top of ``parallel_ops/planner/memory/memory.py``.

    Args:
        model: the model; ``seq_length`` is the length of a training sequence.
        plan: a plan that ``parallel_ops.planner.feasibility.problem`` accepts for this model.
        logit_chunk: bytes of the chunk of logits of a fused loss; that of a GPU by default.
        runtime: bytes of the driver and NCCL; ``None`` for those of GPUs in nodes of eight (``communicators.py``).
        fragmentation: memory that the allocator reserves beyond tensors, as a share of them; ``None`` for that of
            PyTorch's.
    """
    found = PlanMemory(model, plan, logit_chunk=logit_chunk, runtime=runtime, fragmentation=fragmentation)
    return tuple(found.stage(stage) for stage in range(plan.pp))


class FixedMemory(NamedTuple):
    """Memory of one stage that does not depend on recomputation and offload.

    Attributes:
        counts: numbers of layers of each of ``Model.kinds``.
        held: micro-batches in flight.
        parameters, gradients, optimizer, logits, buffers: bytes, see ``StageMemory``.
        embedding, head: bytes of activations before and after the layers.
    """

    counts: tuple[int, ...]
    held: float
    parameters: float
    gradients: float
    optimizer: float
    embedding: float
    head: float
    logits: float
    buffers: float

    def within(self, most: "FixedMemory") -> bool:
        """Whether a stage with this memory needs at most as much as one with ``most`` under any recomputation, if no
        activations are offloaded. Sums of floats that are no larger are no larger, also after rounding."""
        figures = map(le, self[1:], most[1:])  # the first are the counts
        return self.logits == most.logits and all(map(le, self.counts, most.counts)) and all(figures)


class PlanMemory:
    """Memory of the stages of a plan.

    ``needs`` and ``total`` take recomputation and offload as arguments, since a search varies these for one plan.
    ``shared``: a dict for plans that differ only in schedule, micro-batch, sequence parallelism, ``cp_kind`` and layers
    of the stages, to pass to each of them: results that they have in common.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        *,
        logit_chunk: float = FUSED_LOSS_BYTES,
        runtime: float | None = None,
        fragmentation: float | None = None,
        shared: dict[object, Any] | None = None,
    ) -> None:
        self.model, self.plan = model, plan
        self._logit_chunk, self._runtime = logit_chunk, process_bytes(plan) if runtime is None else runtime
        self._tokens = model.seq_length * plan.micro_batch / plan.cp
        self.layout = stage_layout(plan)
        self._counts, self._head = layer_counts(model, self.layout), head_rank(self.layout)
        self._shared = {} if shared is None else shared
        key = plan.micro_batch, plan.sequence_parallel, plan.cp_kind
        if key not in self._shared:
            self._shared[key] = layer_buffers(model, plan, self._tokens), layer_work(model, plan, self._tokens), {}
        self._buffers, self._work, self._layers = self._shared[key]
        usual = SHARDED_PIPELINE_FRAGMENTATION if plan.pp > 1 and plan.zero >= 2 and plan.fsdp else FRAGMENTATION
        self._fragmentation = usual if fragmentation is None else fragmentation
        self._reserved = 1 + self._fragmentation
        self._fixed: dict[int, FixedMemory] = {}

    def stage(self, stage: int) -> StageMemory:
        """Peak memory of one GPU of a stage."""
        plan, found = self.plan, self.fixed(stage)
        kept, resident = self._layer_parts(found, plan.recompute)[0], self._resident(found, plan.offload)
        offloaded = "optimizer" in plan.offload
        total = self.total(self.needs(stage, plan.recompute, plan.offload), plan.offload)
        return StageMemory(
            stage=stage,
            parameters=0.0 if "parameters" in plan.offload else found.parameters,
            gradients=found.gradients,
            optimizer=0.0 if offloaded else found.optimizer,
            activations=self._activations(found, plan.recompute, plan.offload) + found.embedding + found.head,
            logits=found.logits,
            buffers=found.buffers,
            runtime=self._runtime + (total - self._runtime) * self._fragmentation / self._reserved,
            host=(found.optimizer if offloaded else 0.0)
            + (found.parameters if "parameters" in plan.offload else 0.0)
            + kept * (1 - resident),
            in_flight=found.held,
        )

    def needs(self, stage: int, recompute: str, offload: str) -> tuple[float, ...]:
        """The parts of ``total``, of which offload changes the activations only: parameters and gradients, optimizer,
        parameters alone, activations with the ends of the model, logits, buffers."""
        found = self.fixed(stage)
        held = self._activations(found, recompute, offload) + (found.embedding + found.head)
        states = found.parameters + found.gradients
        return states, found.optimizer, found.parameters, held, found.logits, found.buffers

    def total(self, needs: tuple[float, ...], offload: str) -> float:
        """``StageMemory.total`` of a stage with these ``needs``."""
        states, optimizer, parameters, held, logits, buffers = needs
        if "optimizer" not in offload:
            states += optimizer
        if "parameters" in offload:
            states -= parameters
        return (states + held + logits + buffers) * self._reserved + self._runtime

    def fixed(self, stage: int) -> FixedMemory:
        """The memory of a stage that does not depend on recomputation and offload."""
        if stage in self._fixed:
            return self._fixed[stage]
        model, plan, tokens = self.model, self.plan, self._tokens
        held, width = in_flight(plan, stage), element_bytes(plan)
        embedding = head = logits = buffers = 0.0
        if stage == 0 and model.dropout:
            embedding = held * tokens * model.hidden_size / plan.tp
        if stage == self._head:
            losses = 1 + model.prediction_layers
            head = 2 * width * tokens * model.hidden_size / (plan.tp if plan.sequence_parallel else 1) * losses
            if plan.fused_loss:
                logits = self._logit_chunk
                if not model.lora_rank:
                    logits += 4.0 * model.hidden_size * model.vocab_size / plan.tp * losses
            else:
                each = width + (_LOSS_BYTES if plan.tp == 1 else _SHARDED_LOSS_BYTES)
                each = 2 * width if plan.inplace_loss else each
                # Of other losses, the softmax in fp32 or the gradient in place of the logits.
                each += (losses - 1) * (width if plan.inplace_loss else 4)
                logits = each * tokens * model.vocab_size / plan.tp
            if plan.tp > 1 and plan.sequence_parallel:
                logits += (
                    2 * width * tokens * model.hidden_size
                )  # the gathered input, and its gradient before it is reduced
            if not (autograd_owns_gradients(model, plan) or plan.fused_loss):
                # The gradient that autograd gets in place of the one in Megatron-LM's buffer
                # (megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication).
                logits += width * model.hidden_size * model.vocab_size / plan.tp
        if plan.zero == 3 and group_size(plan, "dp") > 1:
            buffers = gathered_ends(model, plan, stage)
        sharded = sharded_states(plan)
        states: tuple[float, float, float] | None = self._shared.get((self.layout, stage, sharded))
        if states is None:
            states = self._shared[self.layout, stage, sharded] = state_memory(model, plan, stage, sharded, self.layout)
        if plan.zero == 2 and sharded == 1:
            buffers += states[1] / group_size(plan, "dp")  # the reduced gradients
        if plan.pp > 1:
            # One message each way; with FSDP, in torch's pipelining, for each micro-batch in flight.
            message = width * tokens * model.residual_streams * model.hidden_size
            message /= plan.tp if plan.sequence_parallel else 1
            buffers += 2 * message * (held * plan.virtual_stages if plan.zero >= 2 and plan.fsdp else 1)
        found = FixedMemory(self._counts[stage], held, *states, embedding, head, logits, buffers + self._buffers)
        self._fixed[stage] = found
        return found

    def _resident(self, found: FixedMemory, offload: str) -> float:
        """The share of the activations that stays on the device: layers that are not offloaded, the current layer and
        the next."""
        if "activations" not in offload:
            return 1.0
        away = recomputed_share(self.model, self.plan.offload_layers)
        return min(1.0, 1 - away + away * 2 / (found.held * max(1, sum(found.counts))))

    def layers(self, stage: int) -> tuple[float, float, float, float]:
        """Bytes of a stage's layers: activations of the micro-batches in flight, working memory of one layer, and what
        is recomputed of it at a time; and the share that stays on the device."""
        found = self.fixed(stage)
        return *self._layer_parts(found, self.plan.recompute), self._resident(found, self.plan.offload)

    def _activations(self, found: FixedMemory, recompute: str, offload: str) -> float:
        """Bytes of activations of the layers that are not offloaded, and of the layer at work."""
        kept, work, again = self._layer_parts(found, recompute)
        if "activations" in offload:
            kept *= self._resident(found, offload)
        # The logits are freed before the backward passes of the layers.
        return kept + max(0.0, work + again - found.logits)

    def _layer_parts(self, found: FixedMemory, recompute: str) -> tuple[float, float, float]:
        each = self._layers.get(recompute) or self._layer(recompute)
        kept, again = found.held * sum(map(mul, found.counts, each)) * self._tokens, 0.0
        if recompute == "full":
            # One layer at a time is recomputed.
            each = self._layers.get("none") or self._layer("none")
            again = self._tokens * max((size for size, n in zip(each, found.counts, strict=True) if n), default=0.0)
        return kept, self._work, again

    def _layer(self, recompute: str) -> tuple[float, ...]:
        """``layer_activations`` under ``recompute``."""
        self._layers[recompute] = layer_activations(self.model, self.plan, recompute)
        return self._layers[recompute]
