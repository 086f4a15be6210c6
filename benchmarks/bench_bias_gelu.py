"""bias_gelu: an MLP's first linear hands over [s, b, h] and its bias."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.spec import Benchmark, Inputs, Shape, Traffic, hidden_shapes, randn
from parallel_ops.ops import bias_gelu


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    return randn(*shape, dtype=dtype, device=device), randn(shape[-1], dtype=dtype, device=device)


def eager(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    n, h = math.prod(shape), shape[-1]
    return Traffic(
        forward=(2 * n + h) * dtype.itemsize,  # reads x and bias, writes y
        backward=(3 * n + 2 * h) * dtype.itemsize,  # reads dy, x and bias, writes dx and dbias
    )


BENCHMARK = Benchmark("bias_gelu", build, bias_gelu, eager, traffic, hidden_shapes, tiny=(2, 2, 8))
