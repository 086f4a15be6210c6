"""Memory of one GPU of every pipeline stage.

Notation: P parameters of the stage over tp, N the ranks that ZeRO shards over, s sequence over cp, b micro-batch, h
hidden, a heads, t tp, f MLP width, V vocabulary.

    states        (2 + 2 + 12) P bytes in mixed precision: 16-bit parameters and gradients, fp32 master weights and two
                  Adam moments; 18 P with fp32 gradients. ZeRO-1 divides the 12 by N, ZeRO-2 the gradients too, ZeRO-3
                  all.                                                             arXiv:1910.02054, section 3.1
    activations   s b h (10 + 24/t + 5 a s_k / (h t)) bytes a layer of a GPT; (34 + 5 a s_k / h) / t with sequence
    parallelism;
                  without the last term under selective recomputation; 2 s b h under full.       arXiv:2205.05198, table
                  2
    in flight     how many micro-batches a stage holds: ``placement.in_flight``
    ends          s b h dropout mask after the embedding; 4 s b h + 4 s b V / t before the loss   arXiv:2205.05198,
    section 4.3

The terms are added up tensor by tensor below, so that grouped queries, gated MLPs, experts and FlashAttention, which
stores no scores (arXiv:2205.14135), are covered. With FlashAttention "selective" recomputes what else is cheap instead:
the outputs of norms and activation functions, and the heads that latent attention expands (arXiv:2412.19437, section
3.2.3).
"""

from functools import lru_cache

from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import group_size, has_embedding, has_head, in_flight, layers_of
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import GIB, StageMemory

# What a process holds beyond tensors: CUDA context and kernels, NCCL's buffers, what the allocator cannot reuse.
# Assumed.
RUNTIME_BYTES = 2 * GIB
# The chunk of logits of parallel_ops.vocab_parallel_linear_cross_entropy on a GPU.
FUSED_LOSS_BYTES = 256 * 2**20


def memory(model: Model, plan: Plan) -> tuple[StageMemory, ...]:
    """Peak memory of one GPU of each pipeline stage, the first stage first.

    The formulas and their sources are at the top of ``parallel_ops/planner/memory.py``.

    Args:
        model: its ``sequence`` is the length of a training sequence.
        plan: must fit the model (``parallel_ops.planner.feasibility.problem`` says so).
    """
    return tuple(stage_memory(model, plan, stage) for stage in range(plan.pp))


def stage_memory(model: Model, plan: Plan, stage: int) -> StageMemory:
    """Peak memory of one GPU of one pipeline stage."""
    layers = layers_of(model, plan)[stage]
    sparse = sum(model.is_sparse(layer) for layer in layers)
    head, embedding = has_head(plan, stage), has_embedding(plan, stage)
    dense_parameters, expert_parameters = stage_parameters(model, plan, stage)
    states = _states(plan, dense_parameters, expert_parameters)
    tokens = model.sequence * plan.micro_batch / plan.cp
    held = in_flight(plan, stage)
    shard = plan.tp if plan.sequence_parallel else 1

    kinds = ((False, len(layers) - sparse), (True, sparse))
    kept = sum(count * layer_activations(model, plan, is_sparse) for is_sparse, count in kinds)
    activations = held * kept * tokens
    if plan.recompute == "full":
        # One layer at a time comes back whole.
        activations += tokens * max(_layer_tensors(model, plan, is_sparse) for is_sparse, count in kinds if count)
    host = states.host
    if plan.offload == "optimizer+activations":
        # The layer at work and the next stay on the device.
        resident = min(1.0, 2 / (held * len(layers)))
        host += activations * (1 - resident)
        activations *= resident
    if embedding and model.dropout:
        activations += held * tokens * model.hidden / plan.tp
    width = _width(plan)
    logits = buffers = 0.0
    if head:
        activations += 2 * width * tokens * model.hidden / shard
        if plan.fused_loss:
            logits = FUSED_LOSS_BYTES + 4.0 * model.hidden * model.vocab / plan.tp
        else:
            logits = 4.0 * tokens * model.vocab / plan.tp
            buffers += width * tokens * model.vocab / plan.tp
    return StageMemory(
        stage=stage,
        parameters=states.parameters,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=activations,
        logits=logits,
        buffers=buffers + _buffers(model, plan, tokens),
        runtime=RUNTIME_BYTES,
        host=host,
        in_flight=held,
    )


@lru_cache(maxsize=65536)
def _stage_parameters(
    model: Model, layers: tuple[int, ...], tp: int, ep: int, embedding: bool, head: bool
) -> tuple[float, float]:
    sparse = sum(model.is_sparse(layer) for layer in layers)
    dense = len(layers) * model.attention_parameters + (len(layers) - sparse) * model.mlp_parameters
    dense += sparse * model.router_parameters
    dense += model.embedding_parameters if embedding else 0
    if head:
        shared = model.hidden * model.vocab if embedding and model.tied_embeddings else 0
        dense += model.head_parameters - shared
    return dense / tp, sparse * model.experts * model.expert_weights / tp / ep


def stage_parameters(model: Model, plan: Plan, stage: int) -> tuple[float, float]:
    """Parameters of one GPU of a stage before ZeRO: those that all data-parallel ranks share, and those of its
    experts."""
    layers = layers_of(model, plan)[stage]
    ends = has_embedding(plan, stage), has_head(plan, stage)
    return _stage_parameters(model, layers, plan.tp, plan.ep, *ends)


def _width(plan: Plan) -> int:
    """Bytes of a parameter or an activation. fp8 is a format of matrix products, not of what is kept."""
    return 4 if plan.dtype == "fp32" else 2


def state_bytes(plan: Plan) -> tuple[int, int, int]:
    """Bytes of parameter, gradient and optimizer state for each parameter, before ZeRO."""
    width = _width(plan)
    gradient = 4 if plan.grad_dtype == "fp32" else width
    return width, gradient, 8 if plan.dtype == "fp32" else 12


def _states(plan: Plan, dense: float, expert: float) -> StageMemory:
    width, gradient, optimizer = state_bytes(plan)
    ranks = group_size(plan, "dp")

    def sharded(stage: int) -> float:
        return dense / ranks + expert / (ranks // plan.ep) if plan.zero >= stage else dense + expert

    states: float = optimizer * sharded(1)
    host = 0.0
    if plan.offload != "none":
        states, host = 0.0, states
    return StageMemory(
        stage=0,
        parameters=width * sharded(3),
        gradients=gradient * sharded(2),
        optimizer=states,
        activations=0,
        logits=0,
        buffers=0,
        runtime=0,
        host=host,
    )


def _buffers(model: Model, plan: Plan, tokens: float) -> float:
    """What communication needs beside the tensors that it moves."""
    width, gradient, _ = state_bytes(plan)
    total = 0.0
    if group_size(plan, "dp") > 1 and plan.zero >= 2:
        sparse = model.sparse_layers > 0
        largest: float = model.attention_parameters + (model.router_parameters if sparse else model.mlp_parameters)
        largest += model.experts * model.expert_weights / plan.ep if sparse else 0
        # One layer's gradients until they are reduced; with ZeRO-3 also its parameters and those of the next.
        total += largest / plan.tp * (gradient + (2 * width if plan.zero == 3 else 0))
    message = width * tokens * model.hidden
    if plan.pp > 1:
        # One message each way, received while another is in use.
        total += 2 * message / (plan.tp if plan.sequence_parallel else 1)
    if plan.tp > 1 and plan.sequence_parallel:
        total += message  # the gathered input of a linear
    if plan.cp > 1 and plan.cp_kind == "ring":
        # Keys and values that arrive, and their gradients, while others are in use.
        total += 4 * width * tokens * model.key_value_width / plan.tp
    if plan.ep > 1:
        total += 2 * message * model.experts_per_token / plan.tp  # dispatched and combined tokens
    return total


@lru_cache(maxsize=65536)
def _layer_bytes(model: Model, sparse: bool, tp: int, shard: int, flash: bool, recompute: str, dtype: str) -> float:
    h, unsharded, sharded = model.hidden, 0.0, 0.0
    width = 4 if dtype == "fp32" else 2
    narrow = 1 if dtype == "fp8" else width  # what fp8 products and a recomputed activation function read
    mask = 1 if model.dropout else 0
    cheap = 0 if flash and recompute == "selective" else 1
    unsharded += width * h + cheap * width * h + mask * h  # input of the norm, its output, mask after attention
    unsharded += width * h + cheap * width * h + mask * h  # the same of the MLP
    sharded += width * model.value_width
    if not model.latent or cheap:
        sharded += width * (model.query_width + model.key_value_width)
    if model.latent:
        unsharded += width * (model.latent.query_rank + model.latent.key_value_rank + model.latent.rope_head)
    if flash:
        sharded += 4 * model.heads  # the logsumexp of each row
    elif recompute != "selective":
        sharded += model.heads * model.sequence * (2 * width + 1 if model.dropout else width)
    # Before and after the activation function; a gated one has two inputs.
    per_ffn = narrow * ((2 if model.gated else 1) + cheap)
    if not sparse:
        sharded += per_ffn * model.ffn
    else:
        used = model.experts_per_token + model.shared_experts
        sharded += per_ffn * model.expert_ffn * used + 4 * model.experts
        unsharded += narrow * h * model.experts_per_token  # dispatched tokens
    return unsharded / shard + sharded / tp


def _layer_tensors(model: Model, plan: Plan, sparse: bool) -> float:
    """Bytes that one layer keeps for each token when nothing of it is recomputed."""
    shard = plan.tp if plan.sequence_parallel else 1
    return _layer_bytes(model, sparse, plan.tp, shard, plan.flash_attention, "none", plan.dtype)


def layer_activations(model: Model, plan: Plan, sparse: bool) -> float:
    """Bytes that one layer keeps for the backward pass, for each token of one micro-batch on one GPU."""
    shard = plan.tp if plan.sequence_parallel else 1
    if plan.recompute == "full":
        return _width(plan) * model.hidden / shard
    return _layer_bytes(model, sparse, plan.tp, shard, plan.flash_attention, plan.recompute, plan.dtype)


def deepest_stages(plan: Plan) -> tuple[int, ...]:
    """Stages of which one needs the most memory: the ends, and those that get a layer more or the first experts."""
    if plan.layers_per_chunk:
        return tuple(range(plan.pp))
    return tuple(sorted({*range(min(4, plan.pp)), plan.pp - 1}))
