"""silu_mul with the options of gpt-oss: clamped, with a factor in the sigmoid and an offset."""

import math

import torch
from torch import Tensor

from benchmarks.spec import Benchmark, Inputs, Shape, Traffic, hidden_shapes, randn
from parallel_ops.ops import silu_mul

ALPHA, LIMIT = 1.702, 7.0


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    return randn(*shape, dtype=dtype, device=device), randn(*shape, dtype=dtype, device=device)


def ours(gate: Tensor, up: Tensor) -> Tensor:
    return silu_mul(gate, up, alpha=ALPHA, limit=LIMIT, up_offset=1.0)


def eager(gate: Tensor, up: Tensor) -> Tensor:
    """As Transformers has it."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(min=-LIMIT, max=LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    n = math.prod(shape) * dtype.itemsize
    return Traffic(forward=3 * n, backward=5 * n)  # reads gate and up, writes y; reads dy too, writes both gradients


BENCHMARK = Benchmark("gpt_oss_swiglu", build, ours, eager, traffic, hidden_shapes, tiny=(2, 2, 8))
