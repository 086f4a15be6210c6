"""bias_dropout_add: a block's output, its bias and dropout joined to the residual stream."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.spec import Benchmark, Inputs, Shape, Traffic, hidden_shapes, randn
from parallel_ops.ops import bias_dropout_add

P = 0.1


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    x, residual = (randn(*shape, dtype=dtype, device=device) for _ in range(2))
    return x, randn(shape[-1], dtype=dtype, device=device), residual


def ours(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return bias_dropout_add(x, bias, residual, P)


def eager(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual + F.dropout(x + bias, P, training=True)


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    n, h = math.prod(shape), shape[-1]
    return Traffic(
        forward=(3 * n + h) * dtype.itemsize,  # reads x, residual and bias, writes y
        backward=(2 * n + h) * dtype.itemsize,  # reads dy, writes dx and dbias; the residual's gradient is dy itself
    )


BENCHMARKS = (Benchmark("bias_dropout_add", build, ours, eager, traffic, hidden_shapes, tiny=(2, 2, 8)),)
