"""Softmaxes of attention scores [b, np, sq, sk]: under a causal mask, and under a padding mask that heads share."""

import math

import torch
from torch import Tensor

from benchmarks.harness.spec import Benchmark, Inputs, Shape, Traffic, randn, score_shapes
from parallel_ops.ops import scaled_causal_softmax, scaled_masked_softmax

_SCALE = 0.125


def with_causal_mask(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    sq, sk = shape[-2:]
    # The composite needs a mask; models build it once and keep it, so making it is not timed.
    hidden = torch.ones(sq, sk, dtype=torch.bool, device=device).triu(1 + sk - sq)
    return randn(*shape, dtype=dtype, device=device), hidden


def with_padding_mask(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    b, _, sq, sk = shape
    # Any mask costs the same: the kernels read every score. One in ten is masked out, never a whole row.
    mask = torch.rand(b, 1, sq, sk, device=device) < 0.1
    mask[..., 0] = False
    return randn(*shape, dtype=dtype, device=device), mask


def causal(scores: Tensor, hidden: Tensor) -> Tensor:
    return scaled_causal_softmax(scores, _SCALE)


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    return scaled_masked_softmax(scores, mask, _SCALE)


def eager(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((scores * _SCALE).masked_fill(mask, float("-inf")), dim=-1)


def causal_traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    *heads, sq, sk = shape
    n = math.prod(shape)
    visible = math.prod(heads) * (sq * (sk - sq) + sq * (sq + 1) // 2)  # on and under the bottom-right diagonal
    return Traffic(
        forward=(visible + n) * dtype.itemsize,  # reads the visible scores, writes y with its zeros
        backward=(2 * visible + n) * dtype.itemsize,  # reads the visible part of dy and y, writes dx with its zeros
    )


def masked_traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    b, _, sq, sk = shape
    n = math.prod(shape)
    return Traffic(
        forward=2 * n * dtype.itemsize + b * sq * sk,  # reads scores and the mask (a byte each), writes y
        backward=3 * n * dtype.itemsize,  # reads dy and y, writes dx
    )


BENCHMARKS = (
    Benchmark("scaled_causal_softmax", with_causal_mask, causal, eager, causal_traffic, score_shapes, (2, 2, 4, 8)),
    Benchmark("scaled_masked_softmax", with_padding_mask, masked, eager, masked_traffic, score_shapes, (2, 2, 4, 8)),
)
