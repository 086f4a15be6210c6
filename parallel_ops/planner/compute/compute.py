"""Time of one micro-batch in one layer: forward F, gradient of the input I, gradient of the weights W.

    linears           2 FLOPs per weight and token in each of F, I and W, as matmuls of their shapes (``matmuls.py``).
                      Only these are in low precision; their operands are converted first (``precision.py``)
    attention         4 s h FLOPs per token in F and twice that in I; FlashAttention skips masked blocks and recomputes
                      the scores in I
    elementwise ops   bytes read and written, at a share ``Efficiency.memory`` of the bandwidth
    recomputation     in I; selective: the scores (with FlashAttention the elementwise ops); full: F

FLOPs: arXiv:2104.04473, appendix; arXiv:2401.10241, table 1. Elementwise bytes are counted op by op below, with the
fused ops of this package (bias-GeLU, bias-dropout-add, masked softmax): each op reads its inputs and writes its output
once.
"""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from parallel_ops.planner.cluster import GPU
from parallel_ops.planner.compute.documents import shares
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.matmuls import Engine, linear, product
from parallel_ops.planner.memory.recomputation import recomputed
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import recomputed_share
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.precision import FORMATS, FROZEN_BYTES, stored

# 16-bit FLOPs and exponentials of an SM a clock, where FLOPs no longer take longer for heads of 64.
_SFU_BOUND = {"blackwell": (8192, 16)}
# Rows of scores in one block of FlashAttention.
_FLASH_BLOCK = 128
# Rows, inputs, outputs and count of a linear.
Shape = tuple[float, float, float, float]
# Spread of experts: expert parallelism, tensor-parallel ranks of one, ``Efficiency.grouped`` and ``grouped_rows``.
Spread = tuple[int, int, float, float]


class PassTimes(NamedTuple):
    """Seconds of the passes F, I and W of one micro-batch."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def total(self) -> float:
        """F + I + W."""
        return self.forward + self.input_grad + self.weight_grad

    def __add__(self, other: "PassTimes") -> "PassTimes":  # type: ignore[override]
        return PassTimes(
            self.forward + other.forward, self.input_grad + other.input_grad, self.weight_grad + other.weight_grad
        )

    def times(self, factor: float) -> "PassTimes":
        """All three, multiplied by ``factor``."""
        return PassTimes(self.forward * factor, self.input_grad * factor, self.weight_grad * factor)


class Work(NamedTuple):
    """The fields of a plan that determine the time of a layer. Plans that share them share cached results.

    Attributes:
        alone: no other rank has the same parameters.
    """

    tp: int
    cp: int
    ep: int
    expert_shards: int
    fsdp: bool
    alone: bool
    micro_batch: int
    sequence_parallel: bool
    cp_kind: str
    recompute: str
    recompute_layers: int
    dtype: str
    flash_attention: bool
    fused_ops: bool
    inplace_loss: bool
    fused_loss: bool
    grad_bytes: int
    tp_overlap: bool
    dropless: bool
    cuda_graph: str
    dispatcher: str


def work_of(plan: Plan) -> Work:
    """The ``Work`` of a plan."""
    return Work(
        tp=plan.tp,
        cp=plan.cp,
        ep=plan.ep,
        expert_shards=plan.expert_shards,
        fsdp=plan.fsdp,
        alone=plan.dp * plan.cp == 1,
        micro_batch=plan.micro_batch,
        sequence_parallel=plan.sequence_parallel,
        cp_kind=plan.cp_kind,
        recompute=plan.recompute,
        recompute_layers=plan.recompute_layers,
        dtype=plan.dtype,
        flash_attention=plan.flash_attention,
        fused_ops=plan.fused_ops,
        inplace_loss=plan.inplace_loss,
        fused_loss=plan.fused_loss,
        grad_bytes=4 if "fp32" in (plan.grad_dtype, plan.dtype) else 2,
        tp_overlap=plan.tp_overlap,
        dropless=plan.dropless,
        cuda_graph=plan.cuda_graph,
        dispatcher=plan.dispatcher,
    )


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
    spread = (work.ep, work.expert_shards, grouped, efficiency.grouped_rows) if sparse else None
    f, i, w = _linears(model, products, work.dtype, work.tp, spread, tokens)
    scores, scores_back = attention_seconds(model, gpu, efficiency, work, model.seq_length)
    width = 4 if work.dtype == "fp32" else 2
    shared, activation, score = (
        (forward * efficiency.elementwise, backward * efficiency.elementwise)
        for forward, backward in _elementwise(model, work, sparse, width)
    )
    forward = sum(part[0] for part in (shared, activation, score)) * tokens / bandwidth
    backward = sum(part[1] for part in (shared, activation, score)) * tokens / bandwidth
    # Accumulation of weight gradients: read the gradient, read and write the sum.
    mlp = model.router_parameters if sparse else model.mlp_weights if model.has_mlp else 0
    held = (model.attention_weights + mlp) / work.tp
    held += model.experts * model.expert_weights / work.ep / work.expert_shards if sparse else 0
    w += (width + 2 * work.grad_bytes) * held / bandwidth
    if model.lora_rank:
        held = model.lora_rank * sum(n * (i + o) for _, i, o, n in _adapted(model, work.tp, tokens, sparse))
        f, i, w = _with_adapters(model, engine, work, tokens, sparse, (f, i), (width + 2 * work.grad_bytes) * held)
    linears, f = f, f + scores + forward
    again = 0.0
    if work.recompute == "full":
        again = f
    elif work.recompute == "operators":
        again = linears / 2 + forward
    else:
        moved = shared[0], activation[0], score[0]
        seconds = tuple(each * tokens / bandwidth for each in moved)
        again = _modules_again(model, products, work, spread, tokens, scores, seconds)
    again *= recomputed_share(model, work.recompute_layers)
    return PassTimes(f, i + scores_back + backward + again, w)


def _adapted(model: Model, tp: int, tokens: float, sparse: bool) -> list[Shape]:
    """Linears of a layer that have an adapter: see ``memory/adapters.py``."""
    return [shape for shape in linear_shapes(model, tp, tokens, sparse=sparse) if shape[2] != model.experts]


def _with_adapters(
    model: Model, engine: Engine, work: Work, tokens: float, sparse: bool, linears: tuple[float, float], moved: float
) -> tuple[float, float, float]:
    """F, I and W of linears that are frozen, with adapters. ``moved``: bytes of the accumulation of their gradients.

    The adapter's output is added to the linear's, and its gradient to that of the input. Frozen weights of 4 bits are
    read and written in 16 before the matmuls of F and of I.
    """
    (f, i), w, width = linears, moved / engine.bandwidth, _width(stored(work.dtype))
    for rows, inputs, outputs, count in _adapted(model, work.tp, tokens, sparse):
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
    width, again = _width(work.dtype), 0.0

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
    routed = model.experts_per_token / (model.experts_per_token + model.shared_experts)
    experts, shared = modules & {"moe", "experts"}, modules & {"moe", "shared_experts"}
    if experts:
        grouped = _expert_products(model, products, work.tp, spread, tokens)
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
    logits = tokens * vocab / bandwidth
    w += (width + 2 * work.grad_bytes) * model.hidden_size * vocab / bandwidth
    return PassTimes(f + forward * logits, i + backward * logits, 0.0 if model.lora_rank else w)


def _width(dtype: str) -> float:
    """Bytes of an operand of a matmul."""
    return FORMATS[dtype].width if dtype in FORMATS else 4 if dtype == "fp32" else 2


@lru_cache(maxsize=4096)
def engine_of(gpu: GPU, efficiency: Efficiency, dtype: str) -> Engine:
    """The rates of matmuls in ``dtype``; bf16 for low precision, which only the linears of layers use."""
    peak = gpu.peak(stored(dtype))
    return Engine(peak * efficiency.matmul, gpu.bandwidth * efficiency.memory, gpu.multiprocessors)


@lru_cache(maxsize=1024)
def _exponentials(model: Model, generation: str) -> tuple[float, float]:
    """Time of FlashAttention, forward and backward, relative to that of heads of 128 for the same FLOPs.

    A score takes 4 FLOPs for each column of a head forward and 10 backward, and one exponential. Tensor cores have
    doubled with every generation, exponentials have not.
    """
    if generation not in _SFU_BOUND:
        return 1.0, 1.0
    tensor, exponentials = _SFU_BOUND[generation]
    head = (model.query_width + model.value_width) / model.num_heads / 2

    def slower(flops: int) -> float:
        return (flops / tensor + 1 / (exponentials * head)) / (flops / tensor + 1 / (exponentials * 128))

    return slower(4), slower(10)


def attention_seconds(model: Model, gpu: GPU, efficiency: Efficiency, work: Work, keys: float) -> tuple[float, float]:
    """Seconds of attention (scores and their matmul with the values) of one micro-batch, forward and backward.

    The queries are those of one rank; ``keys``: keys per sequence, all or those of one block of ring attention.
    """
    tokens = model.seq_length * work.micro_batch / work.cp
    if not model.scored:
        # Assumed: the share of the peak that FlashAttention reaches. Documents bound the entries that a query sees.
        flops = tokens * model.mixed_flops(min(keys, model.documents or keys)) / work.tp
        peak = gpu.peak(stored(work.dtype))
        return flops / (peak * efficiency.flash_forward), 2.5 * flops / (peak * efficiency.flash_backward)
    if work.flash_attention:
        # A causal mask leaves half of the blocks and the diagonal; so does a zigzag ring on each rank.
        left = 0.5 * (1 + min(1.0, _FLASH_BLOCK / keys))
        flops = left * tokens * model.attention_flops * keys / model.seq_length / work.tp
        peak = gpu.peak(stored(work.dtype))
        flops *= model.attended(keys)
        if work.cp_kind == "ring" and (found := shares(model, work.cp)):
            flops *= found.uneven
        ahead, back = _exponentials(model, gpu.generation)
        # The backward pass recomputes the scores: five matmuls instead of two.
        return ahead * flops / (peak * efficiency.flash_forward), 2.5 * back * flops / (
            peak * efficiency.flash_backward
        )
    engine, rows = engine_of(gpu, efficiency, work.dtype), model.seq_length / work.cp
    count, heads = work.micro_batch * model.num_heads / work.tp, model.num_heads
    head, value = model.query_width / heads, model.value_width / heads
    width = 4 if work.dtype == "fp32" else 2
    forward = product(engine, rows, keys, head, count=count, width=width)
    forward += product(engine, rows, value, keys, count=count, width=width)
    return forward, 2 * forward


@lru_cache(maxsize=65536)
def _linears(
    model: Model, engine: Engine, dtype: str, tp: int, spread: Spread | None, tokens: float
) -> tuple[float, float, float]:
    """Seconds of the linear layers: forward, gradient of the input, gradient of the weights.

    Most of the ``Work`` of a search differs in other fields only. ``spread``: of a layer with experts.
    """
    bandwidth, width, converted = engine.bandwidth, _width(dtype), FORMATS.get(dtype)
    f = i = w = 0.0
    shapes = [(shape, engine) for shape in linear_shapes(model, tp, tokens, sparse=spread is not None)]
    if spread:
        shapes += _expert_products(model, engine, tp, spread, tokens)
    for (rows, inputs, outputs, count), used in shapes:
        found = linear(used, rows, inputs, outputs, count=count, width=width)
        f, i, w = f + found[0], i + found[1], w + found[2]
        if converted:
            f += converted.forward * count * inputs * (rows + outputs) / bandwidth
            i += converted.backward * count * rows * outputs / bandwidth
            w += converted.transposed * count * rows * (inputs + outputs) / bandwidth
    return f, i, w


def linear_shapes(model: Model, tp: int, tokens: float, *, sparse: bool) -> Iterator[Shape]:
    """Rows, inputs, outputs and count of each linear of a layer on one rank, without routed experts."""
    h = model.hidden_size
    for width_in, width_out, number, split in model.mixer_linears:
        by_inputs, by_outputs, by_number = (tp if split == name else 1 for name in ("inputs", "outputs", "number"))
        yield tokens, width_in / by_inputs, width_out / by_outputs, number / by_number
    inputs = 2 if model.gated else 1
    if not model.has_mlp:
        return
    if not sparse:
        yield tokens, h, inputs * model.ffn_hidden_size / tp, 1
        yield tokens, model.ffn_hidden_size / tp, h, 1
        return
    yield tokens, h, model.experts, 1
    if model.shared_experts:
        shared = model.shared_experts * model.expert_ffn / tp
        yield tokens, h, inputs * shared, 1
        yield tokens, shared, h, 1


def _expert_products(
    model: Model, engine: Engine, tp: int, spread: Spread, tokens: float
) -> list[tuple[Shape, Engine]]:
    """The linears of the routed experts of one rank, with equally used experts, and the rate of their matmuls."""
    ep, shards, rate, half = spread
    local = model.experts / ep
    rows = tokens * shards / tp * model.experts_per_token / local
    grouped = engine._replace(flops=engine.flops * rate * rows / (rows + half))
    return [
        ((rows, model.hidden_size, (2 if model.gated else 1) * model.expert_ffn / shards, local), grouped),
        ((rows, model.expert_ffn / shards, model.hidden_size, local), grouped),
    ]


def _elementwise(
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
    inputs = 2 if model.gated else 1
    ffn = (model.experts_per_token + model.shared_experts) * model.expert_ffn if sparse else model.ffn_hidden_size
    ffn = ffn if model.has_mlp else 0
    activation = (inputs + 1) * width * ffn / work.tp, (2 * inputs + 1) * width * ffn / work.tp
    rotated = model.positions == "rotary" and model.mixer not in ("", "recurrent")
    rotary = 4 * (model.query_width + model.num_kv_heads * model.head_dim) if rotated else 0
    if model.mixer == "recurrent" and model.recurrent:
        rotary = 2 * width * model.recurrent.moved
    elif model.mixer and model.attention_gate:
        rotary += 3 * width * model.value_width
    routes = model.experts_per_token if sparse else 0
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
