"""Time of one micro-batch in one layer: forward F, gradient of the input I, gradient of the weights W.

    linears           2 FLOPs per weight and token in each of F, I and W, as matmuls of their shapes (``matmuls.py``).
                      Only these are in low precision; their operands are converted first (``precision.py``)
    attention         4 s h FLOPs per token in F and twice that in I; FlashAttention skips masked blocks and recomputes
                      the scores in I
    elementwise ops   bytes read and written, at a share ``Efficiency.memory`` of the bandwidth
    recomputation     in I; selective: the scores (with FlashAttention the elementwise ops); full: F

FLOPs: arXiv:2104.04473, appendix; arXiv:2401.10241, table 1. Elementwise bytes are counted op by op in
``elementwise.py``, with the fused ops of this package (bias-GeLU, bias-dropout-add, masked softmax): each op reads its
inputs and writes its output once.
"""

import math
from collections.abc import Iterable
from functools import lru_cache

from parallel_ops.planner.cluster import GPU
from parallel_ops.planner.compute.attention import attention_seconds
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.elementwise import elementwise_bytes
from parallel_ops.planner.compute.linears import (
    Shape,
    Spread,
    adapted_shapes,
    engine_of,
    expert_products,
    linear_seconds,
    linear_shapes,
    operand_width,
)
from parallel_ops.planner.compute.matmuls import Engine, linear
from parallel_ops.planner.compute.work import PassTimes, Work
from parallel_ops.planner.memory.recomputation import recomputed
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import recomputed_share
from parallel_ops.planner.precision import FORMATS, FROZEN_BYTES, stored


@lru_cache(maxsize=65536)
def layer_passes(model: Model, gpu: GPU, efficiency: Efficiency, work: Work, sparse: bool) -> PassTimes:
    """Seconds of one micro-batch in one layer on one GPU, without communication and launches."""
    tokens = model.seq_length * work.micro_batch / work.cp
    bandwidth = gpu.bandwidth * efficiency.memory
    engine = engine_of(gpu, efficiency, work.dtype)
    products = engine
    if work.dtype in FORMATS:
        rate = gpu.peak(work.dtype) * efficiency.fp8 * FORMATS[work.dtype].rate
        products = Engine(rate, bandwidth, gpu.multiprocessors)
    grouped = efficiency.grouped_fp8 if work.dtype in FORMATS else efficiency.grouped
    load = model.expert_load(work.ep, work.capacity_factor)
    spread = (work.ep, work.expert_shards, load, grouped, efficiency.grouped_rows) if sparse else None
    f, i, w = linear_seconds(model, products, work.dtype, work.tp, spread, tokens)
    scores, scores_back = attention_seconds(model, gpu, efficiency, work, model.seq_length)
    width = 4 if work.dtype == "fp32" else 2
    moved = [
        (forward * efficiency.elementwise, backward * efficiency.elementwise)
        for forward, backward in elementwise_bytes(model, work, sparse, width)
    ]
    forward, backward = (sum(parts) * tokens / bandwidth for parts in zip(*moved, strict=True))
    # Accumulation of weight gradients: read the gradient, read and write the sum.
    mlp = model.router_parameters if sparse else model.mlp_weights if model.has_mlp else 0
    held = (model.attention_weights + mlp) / work.tp
    held += model.experts * model.expert_weights / work.ep / work.expert_shards if sparse else 0
    w += (width + 2 * work.grad_bytes) * held / bandwidth
    if model.lora_rank:
        held = model.lora_rank * sum(n * (i + o) for _, i, o, n in adapted_shapes(model, work.tp, tokens, sparse))
        f, i, w = _with_adapters(model, engine, work, tokens, sparse, (f, i), (width + 2 * work.grad_bytes) * held)
    linears, f = f, f + scores + forward
    again = 0.0
    if work.recompute == "full":
        again = f
    elif work.recompute == "operators":
        again = linears / 2 + forward
    else:
        seconds = tuple(each * tokens / bandwidth for each, _ in moved)
        again = _modules_again(model, products, work, spread, tokens, scores, seconds)
    again *= recomputed_share(model, work.recompute_layers)
    return PassTimes(f, i + scores_back + backward + again, w)


def _with_adapters(
    model: Model, engine: Engine, work: Work, tokens: float, sparse: bool, linears: tuple[float, float], moved: float
) -> tuple[float, float, float]:
    """F, I and W of linears that are frozen, with adapters. ``moved``: bytes of the accumulation of their gradients.

    The adapter's output is added to the linear's, and its gradient to that of the input. Frozen weights of 4 bits are
    read and written in 16 before the matmuls of F and of I.
    """
    (f, i), w, width = linears, moved / engine.bandwidth, operand_width(stored(work.dtype))
    for rows, inputs, outputs, count in adapted_shapes(model, work.tp, tokens, sparse):
        for narrow in ((rows, inputs, model.lora_rank), (rows, model.lora_rank, outputs)):
            found = linear(engine, *narrow, count=count, width=width)
            f, i, w = f + found[0], i + found[1], w + found[2]
        f += 3 * width * count * rows * outputs / engine.bandwidth
        i += 3 * width * count * rows * inputs / engine.bandwidth
    if model.frozen != "16bit":
        weights = model.frozen_weights(sparse) / work.tp
        weights += model.experts * model.expert_weights / work.ep / work.expert_shards if sparse else 0
        converted = (FROZEN_BYTES[model.frozen] + width) * weights / engine.bandwidth
        f, i = f + converted, i + converted
    return f, i, w


def _modules_again(
    model: Model,
    products: Engine,
    work: Work,
    spread: Spread | None,
    tokens: float,
    scores: float,
    elementwise: tuple[float, ...],
) -> float:
    """Seconds of the forward pass of the modules of a layer that are recomputed.

    ``scores``: of attention; ``elementwise``: around the blocks, in the MLP and on the scores.
    """
    modules, (around, activation, score) = recomputed(work.recompute, work.flash_attention), elementwise
    width, again = operand_width(work.dtype), 0.0

    def linears(shapes: Iterable[Shape]) -> float:
        return sum(linear(products, *shape[:3], count=shape[3], width=width)[0] for shape in shapes)

    again += around / 2 if "layernorm" in modules else 0.0
    again += scores + score if "core_attn" in modules else 0.0
    if model.latent and "mla_up_proj" in modules:
        again += 2 * tokens * model.latent_weights / work.tp / products.flops
    if spread is None:
        whole = "mlp" in modules and model.has_mlp
        again += linears(list(linear_shapes(model, work.tp, tokens, sparse=False))[-2:]) if whole else 0.0
        return again + (activation if whole or "mlp_act" in modules else 0.0)
    routed = model.experts_per_token * spread[2]
    routed /= routed + model.shared_experts
    experts, shared = modules & {"moe", "experts"}, modules & {"moe", "shared_experts"}
    if experts:
        grouped = expert_products(model, products, work.tp, spread, tokens)
        again += sum(linear(engine, *shape[:3], count=shape[3], width=width)[0] for shape, engine in grouped)
    if shared and model.shared_experts:
        again += linears(list(linear_shapes(model, work.tp, tokens, sparse=True))[-2:])
    if "moe_act" in modules:
        return again + activation
    return again + activation * (routed * bool(experts) + (1 - routed) * bool(shared))


@lru_cache(maxsize=65536)
def head_passes(model: Model, gpu: GPU, efficiency: Efficiency, work: Work) -> PassTimes:
    """Seconds of one micro-batch in the output embedding and the loss, on one GPU, without communication."""
    tokens = model.seq_length * work.micro_batch / work.cp
    width = 4 if work.dtype == "fp32" else 2
    bandwidth = gpu.bandwidth * efficiency.memory
    vocab = math.ceil(model.vocab_size / work.tp)
    f, i, w = linear(engine_of(gpu, efficiency, work.dtype), tokens, model.hidden_size, vocab, width=width)
    # Bytes per logit. Unfused: written, read, converted to fp32, three passes in fp32; fp32 gradient, converted back.
    # Fused: written, read for the loss, read and written for the gradient, read by two matmuls.
    # In place: written, read twice, its gradient written over it and read by two matmuls.
    forward, backward = (8, 4) if work.fused_loss else (10, 4) if work.inplace_loss else (20, 14)
    if work.inplace_loss and not work.fused_ops:
        # Trainers of that kind compute metrics over the logits, too: llm-foundry cross-entropy and perplexity
        # (modeling_mpt.py, train_metrics). Chosen with the rows in view, between losses in 16 bits and in fp32.
        forward += 20
    logits = tokens * vocab / bandwidth
    w += (width + 2 * work.grad_bytes) * model.hidden_size * vocab / bandwidth
    return PassTimes(f + forward * logits, i + backward * logits, 0.0 if model.lora_rank else w)
