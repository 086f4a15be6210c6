"""Model states: parameters, gradients and optimizer of one GPU of a pipeline stage.

With P parameters per tensor-parallel rank and N ranks that ZeRO shards over, in mixed precision (arXiv:1910.02054,
section 3.1):

                 16-bit parameters    gradients       fp32 master weights, two Adam moments (8 P with 16-bit moments)
    ZeRO-0       2 P                  2 P or 4 P      12 P
    ZeRO-1       2 P                  2 P or 4 P      12 P / N
    ZeRO-2       2 P                  over N          12 P / N
    ZeRO-3       2 P / N, or none     over N          12 P / N

ZeRO-3 in the paper, DeepSpeed and Megatron-LM keeps 16-bit shards beside the master weights. FSDP (``Plan.fsdp``) has
none: it casts the master weights when it gathers them. In fp32 the parameters are the master weights (4 P, and 8 P of
moments); with FSDP or replicate and ZeRO-0 to 2, the whole gathered parameters exist beside the owned shards.
"""

from functools import lru_cache

from parallel_ops.planner.memory.adapters import layer_adapters
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import (
    StageLayout,
    expert_replicas,
    group_size,
    head_rank,
    layer_counts,
    stage_layout,
)
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.precision import FROZEN_BYTES


def stage_parameters(model: Model, plan: Plan, stage: int, layout: StageLayout | None = None) -> tuple[float, float]:
    """Parameters on one GPU of a stage before ZeRO: those shared by all data-parallel ranks, and those of experts.
    ``layout``: that of the plan, if known."""
    return _stage_parameters(model, layout or stage_layout(plan), plan.tp, plan.ep * plan.expert_shards, stage)


@lru_cache(maxsize=65536)
def _stage_parameters(model: Model, layout: StageLayout, tp: int, parts: int, stage: int) -> tuple[float, float]:
    """``parts``: ranks that the experts are split over."""
    dense = model.embedding_parameters if stage == 0 else 0
    whole = experts = 0
    if stage == head_rank(layout):
        shared = model.hidden_size * model.vocab_size if stage == 0 and model.tied_embeddings else 0
        dense += model.head_parameters - shared + _second_table(model, stage)
        whole = model.head_parameters - model.hidden_size * model.vocab_size
    for count, (shape, sparse) in zip(layer_counts(model, layout)[stage], model.kinds, strict=True):
        dense += count * shape.layer_parameters(sparse)
        whole += count * shape.whole_in_layer(sparse, tp)
        experts += count * sparse * model.experts * model.expert_weights
    return (dense - whole) / tp + whole, experts / parts


def _second_table(model: Model, stage: int) -> int:
    """Parameters of the table of tokens that multi-token prediction needs on the stage with the loss; 0 if it has one
    anyway."""
    needs = model.prediction_layers and stage and not model.tied_embeddings
    return model.hidden_size * model.vocab_size if needs else 0


def trained_parameters(model: Model, layout: StageLayout, plan: Plan, stage: int) -> tuple[float, float]:
    """Trained parameters on one GPU of a stage before ZeRO: those shared by all data-parallel ranks, and of experts."""
    if not model.lora_rank:
        return stage_parameters(model, plan, stage, layout)
    counts = zip(layer_counts(model, layout)[stage], model.kinds, strict=True)
    return sum(count * layer_adapters(*kind, plan.tp) for count, kind in counts if count), 0.0


def frozen_bytes(model: Model, layout: StageLayout, plan: Plan, stage: int) -> tuple[float, float]:
    """Bytes of the frozen weights on one GPU of a stage before ZeRO: of those that all data-parallel ranks share, and
    of experts. Zeros for a model that is trained as a whole."""
    if not model.lora_rank:
        return 0.0, 0.0
    shared, experts = stage_parameters(model, plan, stage, layout)
    width, saved = 2.0, 2.0 - FROZEN_BYTES[model.frozen]
    counts = zip(layer_counts(model, layout)[stage], model.kinds, strict=True)
    linears = sum(count * shape.frozen_weights(sparse) for count, (shape, sparse) in counts)
    return width * shared - saved * linears / plan.tp, (width - saved) * experts


def end_parameters(model: Model, plan: Plan, stage: int) -> tuple[float, ...]:
    """Parameters per GPU of a stage before the first and after the last layer, before ZeRO. Empty for inner stages."""
    first, last = stage == 0, stage == head_rank(stage_layout(plan))
    shared = first and model.tied_embeddings
    ends = [model.embedding_parameters / plan.tp] * first
    output = model.hidden_size * model.vocab_size
    whole = model.head_parameters - output
    second = _second_table(model, stage) / plan.tp
    return (*ends, *[(0 if shared else output / plan.tp) + whole + second] * last)


def element_bytes(plan: Plan) -> int:
    """Bytes of a parameter or an activation; low-precision formats are those of matmuls only."""
    return 4 if plan.dtype == "fp32" else 2


def state_bytes(plan: Plan) -> tuple[int, int, int]:
    """Bytes of parameter, gradient and optimizer state per parameter, before ZeRO."""
    parameter = element_bytes(plan)
    gradient = 4 if plan.grad_dtype == "fp32" else parameter
    moments = {"fp32": 8, "bf16": 4, "8bit": 2}[plan.moment_dtype]
    return parameter, gradient, moments if plan.dtype == "fp32" else moments + plan.master_bytes


def sharded_states(plan: Plan) -> int:
    """The ZeRO stage by which states are sharded.

    FSDP accumulates whole gradients over micro-batches with ZeRO-1, in a pipeline with ZeRO-2 too, and reduces them
    once, as torch's runtime does; those of a single micro-batch it reduces layer by layer. Other systems (``Plan.fsdp``
    is False) reduce and shard them in every micro-batch, as Llama 3's training did (arXiv:2407.21783, section 3.3.2).
    """
    if plan.fsdp and plan.zero in (1, 2):
        return 2 if plan.micro_batches == 1 or (plan.zero == 2 and plan.pp == 1) else 1
    return plan.zero


def state_memory(
    model: Model, plan: Plan, stage: int, zero: int, layout: StageLayout | None = None
) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer (offloaded or not) on one GPU of a stage, sharded by ZeRO stage
    ``zero``. ``layout``: that of the plan, if known."""
    layout = layout or stage_layout(plan)
    dense, expert = trained_parameters(model, layout, plan, stage)
    ranks, (parameter, gradient, optimizer) = group_size(plan, "dp"), state_bytes(plan)
    whole, owned = dense + expert, dense / ranks + (expert / expert_replicas(plan) if expert else 0.0)
    frozen, of_experts = frozen_bytes(model, layout, plan, stage) if model.lora_rank else (0.0, 0.0)
    if zero >= 3:
        frozen, of_experts = frozen / ranks, of_experts / expert_replicas(plan)
    parameters = parameter * (owned if zero >= 3 else whole)
    if plan.fsdp and plan.dp * plan.cp > 1:
        if plan.dtype == "fp32" and (zero < 3 or ranks == 1):
            parameters += parameter * (owned if zero else whole)
        elif plan.dtype != "fp32" and zero == 3 and ranks > 1:
            parameters = 0.0
    return (
        parameters + frozen + of_experts,
        gradient * (owned if zero >= 2 else whole),
        optimizer * (owned if zero >= 1 else whole),
    )
