"""Bytes that the elementwise ops of a layer move."""

from parallel_ops.planner.compute.work import Work
from parallel_ops.planner.model import Model


def elementwise_bytes(
    model: Model, work: Work, sparse: bool, width: int
) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
    """Bytes per token that elementwise ops move, forward and backward: around the blocks, in the MLP, on the scores."""
    h, mask = model.hidden_size, 1 if model.dropout else 0
    shard = work.tp if work.sequence_parallel else 1
    # Two norms (read, write; read x, dy and the residual's gradient, write) and two bias-dropout-adds (read x and the
    # residual, write; read dy, write), each with its mask.
    blocks = model.blocks
    around, around_back = (blocks * (moved * width + mask) * h / shard for moved in (2 + 3, 4 + 2))
    if (streams := model.residual_streams) > 1:
        # Read for the maps and for the input of the block, and with its output written; once more each for gradients.
        around += blocks * 3 * streams * width * h / shard
        around_back += blocks * 6 * streams * width * h / shard
    if model.ahead:
        # Three norms, and two tensors that are joined.
        around += 10 * width * h / shard
        around_back += 13 * width * h / shard
    inputs = 2 if model.gated else 1
    routes = model.experts_per_token * model.expert_load(work.ep, work.capacity_factor) if sparse else 0
    ffn = (routes + model.shared_experts) * model.expert_ffn if sparse else model.ffn_hidden_size
    ffn = ffn if model.has_mlp else 0
    activation, activation_back = (moved * width * ffn / work.tp for moved in (inputs + 1, 2 * inputs + 1))
    rotated = model.positions == "rotary" and model.mixer not in ("", "recurrent")
    rotary = 4 * (model.query_width + model.num_kv_heads * model.head_dim) if rotated else 0
    if model.mixer == "recurrent" and model.recurrent:
        rotary = 2 * width * model.recurrent.moved
    elif model.mixer and model.attention_gate:
        rotary += 3 * width * model.value_width
    routed = 4 * width * h * routes  # permute and combine
    around, around_back = (moved + rotary / work.tp + routed for moved in (around, around_back))
    if model.bias == "all":
        # Experts add biases one by one. Forward: bias times probability in fp32, sum, concatenation, conversion; clamps
        # of both halves, concatenated. Backward: conversions, and sums for bias and probability
        # (megatron/core/transformer/moe/experts.py, _apply_bias; fusions/fused_bias_geglu.py).
        activation += routes * (28 * h + 8 * inputs * model.expert_ffn / work.expert_shards)
        activation_back += routes * (36 * h + 10 * inputs * model.expert_ffn / work.expert_shards)
    if not work.fused_ops:
        # Biases and dropouts each read and write. Backward, a norm reads x and dy again for its weights, and gradients
        # of both branches are summed. FlashAttention takes tokens without padding, which are gathered before it and
        # scattered after it (flash_attn/bert_padding.py).
        biases, dropouts = (2 if model.bias == "all" else 0), (2 if model.dropout else 0)
        padded = width * model.query_width / work.tp if work.flash_attention and model.scored else 0.0
        around = around + (biases + dropouts) * 2 * width * h / shard + 8 * padded
        around_back = around_back + (dropouts + blocks) * 2 * width * h / shard + 11 * padded
        activation += biases * inputs * width * ffn / work.tp
    outside = (around, around_back), (activation, activation_back)
    if work.flash_attention or not model.scored:
        return *outside, (0.0, 0.0)
    # The scores' traffic in matmuls is counted there. Dropout reads and writes, with its mask. The fused softmax reads
    # the half that a causal mask leaves and writes all; backward it reads that half of P and of dP.
    # (megatron/fused_kernels/scaled_upper_triang_masked_softmax.h)
    rows = model.num_heads * model.seq_length / work.tp
    dropped = 2 * width + mask if model.dropout else 0
    forward, backward = dropped + 1.5 * width, dropped + 2 * width
    if not work.fused_ops or work.micro_batch * model.num_heads // work.tp % 4:
        # Scale and mask each read and write, and the softmax is in fp32, with a conversion before and after it.
        forward = dropped + 6 * width + 1 + 2 * (width + 4) + 2 * (4 - width)
        backward = dropped + 7 * width + 1 + 2 * (width + 4)
    return *outside, (forward * rows, backward * rows)
