"""rotary_embedding: the queries of one layer, [s, b, h, d] with heads of 128, fully rotated in halves."""

import math

import torch
from torch import Tensor

from benchmarks.harness.spec import Benchmark, Inputs, Shape, Traffic, hidden_shapes, randn
from parallel_ops.ops import rotary_embedding

_DIMS = 128


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    s, half = shape[0], shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(s, dtype=torch.float64)[:, None] * frequencies
    cos, sin = (t.to(device, torch.float32) for t in (angle.cos(), angle.sin()))
    return randn(*shape, dtype=dtype, device=device), cos, sin


def eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (torch.cat((t, t), dim=-1)[:, None, None].to(x.dtype) for t in (cos, sin))
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


def shapes(device: str, dtype: torch.dtype, quick: bool) -> list[Shape]:
    return [(s, b, h // _DIMS, _DIMS) for s, b, h in hidden_shapes(device, dtype, quick)]


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    n, angles = math.prod(shape), 4 * shape[0] * shape[-1]  # cos and sin, fp32
    one_way = 2 * n * dtype.itemsize + angles  # reads x and the angles, writes y; backward likewise
    return Traffic(forward=one_way, backward=one_way)


BENCHMARKS = (Benchmark("rotary_embedding", build, rotary_embedding, eager, traffic, shapes, tiny=(2, 2, 2, 8)),)
