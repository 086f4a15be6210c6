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
    around = blocks * ((2 + 3) * width + mask) * h / shard, blocks * ((4 + 2) * width + mask) * h / shard
    if (streams := model.residual_streams) > 1:
        # Read for the maps and for the input of the block, and with its output written; once more each for gradients.
        around = (
            around[0] + blocks * 3 * streams * width * h / shard,
            around[1] + blocks * 6 * streams * width * h / shard,
        )
    if model.ahead:
        # Three norms, and two tensors that are joined.
        around = around[0] + 10 * width * h / shard, around[1] + 13 * width * h / shard
    inputs = 2 if model.gated else 1
    routes = model.experts_per_token * model.expert_load(work.ep, work.capacity_factor) if sparse else 0
    ffn = (routes + model.shared_experts) * model.expert_ffn if sparse else model.ffn_hidden_size
    ffn = ffn if model.has_mlp else 0
    activation = (inputs + 1) * width * ffn / work.tp, (2 * inputs + 1) * width * ffn / work.tp
    rotated = model.positions == "rotary" and model.mixer not in ("", "recurrent")
    rotary = 4 * (model.query_width + model.num_kv_heads * model.head_dim) if rotated else 0
    if model.mixer == "recurrent" and model.recurrent:
        rotary = 2 * width * model.recurrent.moved
    elif model.mixer and model.attention_gate:
        rotary += 3 * width * model.value_width
    routed = 4 * width * h * routes  # permute and combine
    around = around[0] + rotary / work.tp + routed, around[1] + rotary / work.tp + routed
    if model.bias == "all":
        # Experts add biases one by one. Forward: bias times probability in fp32, sum, concatenation, conversion; clamps
        # of both halves, concatenated. Backward: conversions, and sums for bias and probability
        # (megatron/core/transformer/moe/experts.py, _apply_bias; fusions/fused_bias_geglu.py).
        activation = (
            activation[0] + routes * (28 * h + 8 * inputs * model.expert_ffn / work.expert_shards),
            activation[1] + routes * (36 * h + 10 * inputs * model.expert_ffn / work.expert_shards),
        )
    if not work.fused_ops:
        # Two biases, two dropouts and the bias before the activation each read and write.
        around = around[0] + 4 * 2 * width * h / shard, around[1] + 2 * 2 * width * h / shard
        activation = activation[0] + 2 * inputs * width * ffn / work.tp, activation[1]
    if work.flash_attention or not model.scored:
        return around, activation, (0.0, 0.0)
    # The scores' traffic in matmuls is counted there. Forward: softmax and dropout read and write. Backward: dropout
    # reads and writes, softmax reads P and dP and writes. Masks come on top.
    rows = model.num_heads * model.seq_length / work.tp
    forward = (4 if model.dropout else 2) * width + mask
    backward = (5 if model.dropout else 3) * width + mask
    if not work.fused_ops or work.micro_batch * model.num_heads // work.tp % 4:
        # Scale and mask each read and write, and the softmax is in fp32, with a conversion before and after it.
        forward += 4 * width + 1 + 2 * (width + 4) + 2 * (4 - width)
        backward += 4 * width + 1 + 2 * (width + 4)
    return around, activation, (forward * rows, backward * rows)
