"""scaled_masked_softmax: attention scores under a padding mask that all heads share."""

import math

import torch
from torch import Tensor

from benchmarks.spec import Benchmark, Inputs, Shape, Traffic, randn, score_shapes
from parallel_ops.ops import scaled_masked_softmax

SCALE = 0.125


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    b, _, sq, sk = shape
    # Any mask costs the same: the kernels read every score. One in ten is masked out, never a whole row.
    mask = torch.rand(b, 1, sq, sk, device=device) < 0.1
    mask[..., 0] = False
    return randn(*shape, dtype=dtype, device=device), mask


def ours(scores: Tensor, mask: Tensor) -> Tensor:
    return scaled_masked_softmax(scores, mask, SCALE)


def eager(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((scores * SCALE).masked_fill(mask, float("-inf")), dim=-1)


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    b, _, sq, sk = shape
    n = math.prod(shape)
    return Traffic(
        forward=2 * n * dtype.itemsize + b * sq * sk,  # reads scores and the mask (a byte each), writes y
        backward=3 * n * dtype.itemsize,  # reads dy and y, writes dx
    )


BENCHMARK = Benchmark("scaled_masked_softmax", build, ours, eager, traffic, score_shapes, tiny=(2, 2, 4, 8))
