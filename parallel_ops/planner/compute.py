"""How long one micro-batch takes in one layer: forward F, gradient of the input I, gradient of the weights W.

    matrix products     2 FLOPs a weight and token in each of F, I and W, at ``matmul`` of the peak
    attention scores    4 s h FLOPs a token in F and twice that in I; half with FlashAttention, which skips masked
    blocks elementwise ops     the bytes that they read and write, at ``memory`` of the bandwidth
    recomputation       selective: the scores (or, with FlashAttention, the elementwise ops) again in I; full: F again
    in I

FLOPs: arXiv:2104.04473, appendix; arXiv:2401.10241, table 1. Elementwise bytes are counted op by op below, with the
fused ops of this package (bias-GeLU, bias-dropout-add, masked softmax): each op reads its inputs and writes its output
once.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from parallel_ops.planner.cluster import GPU
from parallel_ops.planner.efficiency import FLASH_EFFICIENCY, Efficiency
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan


@dataclass(frozen=True)
class Passes:
    """Seconds of the three passes of one micro-batch."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def total(self) -> float:
        return self.forward + self.input_grad + self.weight_grad

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(
            self.forward + other.forward, self.input_grad + other.input_grad, self.weight_grad + other.weight_grad
        )

    def times(self, factor: float) -> "Passes":
        return Passes(self.forward * factor, self.input_grad * factor, self.weight_grad * factor)


class Work(NamedTuple):
    """What decides the time of a layer: a part of a plan, so that equal ones are computed once."""

    dp: int
    tp: int
    cp: int
    ep: int
    micro_batch: int
    sequence_parallel: bool
    cp_kind: str
    recompute: str
    dtype: str
    flash_attention: bool
    fused_ops: bool
    fused_loss: bool
    grad_bytes: int


def work_of(plan: Plan) -> Work:
    return Work(
        dp=plan.dp,
        tp=plan.tp,
        cp=plan.cp,
        ep=plan.ep,
        micro_batch=plan.micro_batch,
        sequence_parallel=plan.sequence_parallel,
        cp_kind=plan.cp_kind,
        recompute=plan.recompute,
        dtype=plan.dtype,
        flash_attention=plan.flash_attention,
        fused_ops=plan.fused_ops,
        fused_loss=plan.fused_loss,
        grad_bytes=4 if "fp32" in (plan.grad_dtype, plan.dtype) else 2,
    )


@lru_cache(maxsize=65536)
def layer_passes(model: Model, gpu: GPU, efficiency: Efficiency, work: Work, sparse: bool) -> Passes:
    """Seconds of one micro-batch in one layer on one GPU, without communication."""
    tokens = model.sequence * work.micro_batch / work.cp
    flops = gpu.peak(work.dtype) * efficiency.matmul
    bandwidth = gpu.bandwidth * efficiency.memory
    weights = model.attention_weights + (_sparse_weights(model) if sparse else model.mlp_weights)
    product = 2 * tokens * weights / work.tp / flops
    if work.flash_attention:
        # A causal mask leaves half of the blocks.
        scores = tokens * model.attention_flops / 2 / work.tp / (gpu.peak(work.dtype) * FLASH_EFFICIENCY)
    else:
        scores = tokens * model.attention_flops / work.tp / flops
    width = 4 if work.dtype == "fp32" else 2
    shared, activation, score = _elementwise(model, work, sparse, width)
    forward = sum(part[0] for part in (shared, activation, score)) * tokens / bandwidth
    backward = sum(part[1] for part in (shared, activation, score)) * tokens / bandwidth
    # The gradient of a weight is added to what earlier micro-batches left: read it, read and write the sum.
    held = model.attention_weights + (sparse_parameters(model, work.ep) if sparse else model.mlp_weights)
    accumulate = (width + 2 * work.grad_bytes) * held / work.tp / bandwidth
    f = product + scores + forward
    again = 0.0
    if work.recompute == "full":
        again = f
    elif work.recompute == "selective":
        again = shared[0] / 2 * tokens / bandwidth + activation[0] * tokens / bandwidth if work.flash_attention else 0.0
        again += 0.0 if work.flash_attention else scores + score[0] * tokens / bandwidth
        if work.flash_attention and model.latent:
            again += 2 * tokens * model.latent_weights / work.tp / flops
    return Passes(f, product + 2 * scores + backward + again, product + accumulate)


@lru_cache(maxsize=65536)
def head_passes(model: Model, gpu: GPU, efficiency: Efficiency, work: Work) -> Passes:
    """Seconds of one micro-batch in the output embedding and the loss, on one GPU, without communication."""
    tokens = model.sequence * work.micro_batch / work.cp
    product = tokens * model.head_flops / work.tp / (gpu.peak(work.dtype) * efficiency.matmul)
    logits = tokens * model.vocab / work.tp / (gpu.bandwidth * efficiency.memory)
    # Unfused: logits written, read, widened to fp32, three passes over those; gradient in fp32, then narrowed.
    # Fused: written, read for the loss, read and written for the gradient, read by two products.
    forward, backward = (8, 4) if work.fused_loss else (20, 14)
    return Passes(product + forward * logits, product + backward * logits, product)


def sparse_parameters(model: Model, ep: int) -> float:
    """Parameters of a sparse MLP that one rank holds, over its tensor-parallel group."""
    return model.router_parameters + model.experts * model.expert_weights / ep


def _sparse_weights(model: Model) -> int:
    used = model.experts_per_token + model.shared_experts
    return used * model.expert_weights + model.hidden * model.experts


def _elementwise(
    model: Model, work: Work, sparse: bool, width: int
) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
    """Bytes a token that elementwise ops move forward and backward: around the blocks, in the MLP, on the scores."""
    h, mask = model.hidden, 1 if model.dropout else 0
    shard = work.tp if work.sequence_parallel else 1
    # Two norms (read, write; read x, dy and the residual's gradient, write) and two bias-dropout-adds (read x and the
    # residual, write; read dy, write), each with its mask.
    around = (2 * (2 + 3) * width + 2 * mask) * h / shard, (2 * (4 + 2) * width + 2 * mask) * h / shard
    inputs = 2 if model.gated else 1
    ffn = (model.experts_per_token + model.shared_experts) * model.expert_ffn if sparse else model.ffn
    activation = (inputs + 1) * width * ffn / work.tp, (2 * inputs + 1) * width * ffn / work.tp
    rotary = 4 * (model.query_width + model.kv_heads * model.head_dim) if model.positions == "rotary" else 0
    routed = 4 * width * h * model.experts_per_token if sparse else 0  # permute and combine
    around = around[0] + rotary / work.tp + routed, around[1] + rotary / work.tp + routed
    if not work.fused_ops:
        # Two biases and two dropouts read and write on their own, and so does the bias before the activation.
        around = around[0] + 4 * 2 * width * h / shard, around[1] + 2 * 2 * width * h / shard
        activation = activation[0] + 2 * inputs * width * ffn / work.tp, activation[1]
    if work.flash_attention:
        return around, activation, (0.0, 0.0)
    # Forward: scores written, softmax reads and writes, dropout reads and writes, product with V reads. Backward: dP
    # written, dropout, softmax reads P and dP and writes, three products read; masks on top.
    rows = model.heads * model.sequence / work.tp
    forward = (6 if model.dropout else 4) * width + mask
    backward = (10 if model.dropout else 7) * width + mask
    if not work.fused_ops:
        # Scale and mask read and write on their own, and the softmax is in fp32: widened before and narrowed after it.
        forward += 4 * width + 1 + 2 * (width + 4) + 2 * (4 - width)
        backward += 4 * width + 1 + 2 * (width + 4)
    return around, activation, (forward * rows, backward * rows)
