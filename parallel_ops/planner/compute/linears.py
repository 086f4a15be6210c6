"""The linears of a layer: their shapes on one rank, and the time of their matmuls and conversions."""

import math
from collections.abc import Iterator
from functools import lru_cache

from parallel_ops.planner.cluster import GPU
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.matmuls import Engine, linear
from parallel_ops.planner.model import Model
from parallel_ops.planner.precision import FORMATS, stored

# Rows, inputs, outputs and count of a linear.
Shape = tuple[float, float, float, float]
# Spread of experts: expert parallelism, tensor-parallel ranks of one, load of the fullest rank, ``Efficiency.grouped``
# and ``grouped_rows``.
Spread = tuple[int, int, float, float, float]
# Rows of a tile of grouped matmuls.
_TILE = 128


def operand_width(dtype: str) -> float:
    """Bytes of an operand of a matmul."""
    return FORMATS[dtype].width if dtype in FORMATS else 4 if dtype == "fp32" else 2


@lru_cache(maxsize=4096)
def engine_of(gpu: GPU, efficiency: Efficiency, dtype: str) -> Engine:
    """The rates of matmuls in ``dtype``; bf16 for low precision, which only the linears of layers use."""
    peak = gpu.peak(stored(dtype))
    return Engine(peak * efficiency.matmul, gpu.bandwidth * efficiency.memory, gpu.multiprocessors)


@lru_cache(maxsize=65536)
def linear_seconds(
    model: Model, engine: Engine, dtype: str, tp: int, spread: Spread | None, tokens: float
) -> tuple[float, float, float]:
    """Seconds of the linear layers: forward, gradient of the input, gradient of the weights.

    Most of the ``Work`` of a search differs in other fields only. ``spread``: of a layer with experts.
    """
    bandwidth, width, converted = engine.bandwidth, operand_width(dtype), FORMATS.get(dtype)
    f = i = w = 0.0
    shapes = [(shape, engine) for shape in linear_shapes(model, tp, tokens, sparse=spread is not None)]
    if spread:
        shapes += expert_products(model, engine, tp, spread, tokens)
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


def adapted_shapes(model: Model, tp: int, tokens: float, sparse: bool) -> list[Shape]:
    """Linears of a layer that have an adapter: see ``memory/adapters.py``."""
    return [shape for shape in linear_shapes(model, tp, tokens, sparse=sparse) if shape[2] != model.experts]


def expert_products(model: Model, engine: Engine, tp: int, spread: Spread, tokens: float) -> list[tuple[Shape, Engine]]:
    """The linears of the routed experts of the fullest rank, each with as many rows, and the rate of their matmuls."""
    ep, shards, load, rate, half = spread
    local = model.experts / ep
    rows = tokens * shards / tp * model.experts_per_token * load / local
    tiles = _TILE * math.ceil(rows / _TILE)  # a tile that is not full takes as long as a full one
    grouped = engine._replace(flops=engine.flops * rate * tiles / (tiles + half))
    return [
        ((rows, model.hidden_size, (2 if model.gated else 1) * model.expert_ffn / shards, local), grouped),
        ((rows, model.expert_ffn / shards, model.hidden_size, local), grouped),
    ]
