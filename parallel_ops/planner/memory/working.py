"""Memory of a stage at work: gathered parameters, gradients before they are reduced, tensors of one layer, buffers."""

from parallel_ops.planner.compute.linears import linear_shapes
from parallel_ops.planner.memory.states import (
    element_bytes,
    end_parameters,
    sharded_states,
    stage_parameters,
    state_bytes,
)
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import group_size
from parallel_ops.planner.plan import Plan

# ZeRO-3 of DeepSpeed keeps gathered parameters up to ``stage3_max_live_parameters`` and reduces gradients in buckets of
# ``reduce_bucket_size``: elements, its defaults (deepspeed/runtime/zero/config.py). A larger parameter is alone there.
LIVE_PARAMETERS, REDUCE_BUCKET = 1e9, 5e8


def gathered_ends(model: Model, plan: Plan, stage: int) -> float:
    """Bytes that FSDP keeps gathered during the passes of the layers: input and output embedding, and the gradient of
    the larger one until it is reduced."""
    width, gradient, _ = state_bytes(plan)
    gradient = 0 if model.lora_rank else gradient
    ends = end_parameters(model, plan, stage)
    return width * sum(ends) + gradient * max(ends, default=0)


def autograd_owns_gradients(model: Model, plan: Plan) -> bool:
    """False if matmuls add weight gradients to a buffer of the optimizer, as Megatron-LM's do. Under LoRA, weights of
    the model have none."""
    return plan.fsdp or plan.gather_parameters or plan.zero > 1 or bool(model.lora_rank)


def _dummy_gradients(model: Model, plan: Plan) -> float:
    """Bytes of the weight gradients that Transformer Engine hands to autograd, one a shape for the whole process, where
    the GEMM adds the real one to Megatron-LM's buffer (transformer_engine/pytorch/module/base.py, ``get_dummy_wgrad``:
    linears since 2.3, grouped ones since 2.10)."""
    if autograd_owns_gradients(model, plan):
        return 0.0
    linears = (each for shape, sparse in model.kinds for each in linear_shapes(shape, plan.tp, 1.0, sparse=sparse))
    # The router is not one of its modules.
    shapes = {(inputs, outputs) for _, inputs, outputs, _ in linears if outputs != model.experts}
    if model.experts:
        ffn = model.expert_ffn / plan.expert_shards
        shapes |= {(model.hidden_size, (2 if model.gated else 1) * ffn), (ffn, model.hidden_size)}
    return element_bytes(plan) * sum(inputs * outputs for inputs, outputs in shapes)


def layer_work(model: Model, plan: Plan, tokens: float) -> float:
    """Working memory of one layer: its gathered parameters and those of the next, its gradients until they are reduced,
    gradients of its activations, and tensors gathered for tensor parallelism."""
    width, gradient, _ = state_bytes(plan)
    gradient = 0 if model.lora_rank else gradient  # those of adapters are small
    sparse = model.sparse_layers > 0
    largest = max(shape.layer_parameters(has) for shape, has in model.kinds if has == sparse) / plan.tp
    largest += model.experts * model.expert_weights / plan.ep / plan.expert_shards if sparse else 0
    total = 0.0
    if group_size(plan, "dp") > 1 and plan.zero == 3 and plan.gather_parameters:
        whole = sum(stage_parameters(model, plan, 0))
        one = _largest_parameter(model, plan)
        total += width * max(one, min(LIVE_PARAMETERS, whole)) + gradient * max(one, min(REDUCE_BUCKET, whole))
    elif group_size(plan, "dp") > 1 and (plan.zero >= 2 or sharded_states(plan) == 2):
        total += largest * (gradient + (2 * width if plan.zero == 3 else 0))
    if model.frozen != "16bit":
        total += width * _largest_parameter(model, plan)  # converted to 16 bits
    routed = model.experts_per_token * model.expert_load(plan.ep, plan.capacity_factor)
    ffn = model.expert_ffn * (routed + model.shared_experts) if sparse else model.ffn_hidden_size
    total += width * tokens * (2 if model.gated else 1) * ffn / plan.tp
    message = width * tokens * model.hidden_size
    total += 2 * message  # gradients of the input and of the output
    if plan.tp > 1 and plan.sequence_parallel:
        total += 2 * message  # the gathered input of a linear, and an output that is not yet reduced
    if plan.ep > 1:
        total += 2 * message * routed / plan.tp  # dispatched and combined tokens
    return total


def _largest_parameter(model: Model, plan: Plan) -> float:
    """Elements of the largest parameter of a layer on one GPU, each linear with a matrix of its own."""
    h = model.hidden_size
    own = h * max(shape.value_width for shape, _ in model.kinds) / plan.tp
    if model.mlp_layers:
        own = max(own, h * model.ffn_hidden_size / plan.tp)
    return max(own, h * model.expert_ffn / plan.expert_shards) if model.sparse_layers else own


def layer_buffers(model: Model, plan: Plan, tokens: float) -> float:
    """Buffers of context parallelism and of Transformer Engine."""
    width, total = element_bytes(plan), _dummy_gradients(model, plan)
    if plan.cp > 1 and plan.cp_kind == "ring":
        # Keys and values that are being received, and their gradients.
        total += 4 * width * tokens * max(shape.key_value_width for shape, _ in model.kinds) / plan.tp
    return total
