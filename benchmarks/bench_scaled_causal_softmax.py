"""scaled_causal_softmax: attention scores where query i sees the keys up to its own position."""

import math

import torch
from torch import Tensor

from benchmarks.spec import Benchmark, Inputs, Shape, Traffic, randn, score_shapes
from parallel_ops.ops import scaled_causal_softmax

SCALE = 0.125


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    sq, sk = shape[-2:]
    # The composite needs a mask; models build it once and keep it, so making it is not timed.
    hidden = torch.ones(sq, sk, dtype=torch.bool, device=device).triu(1 + sk - sq)
    return randn(*shape, dtype=dtype, device=device), hidden


def ours(scores: Tensor, hidden: Tensor) -> Tensor:
    return scaled_causal_softmax(scores, SCALE)


def eager(scores: Tensor, hidden: Tensor) -> Tensor:
    return torch.softmax((scores * SCALE).masked_fill(hidden, float("-inf")), dim=-1)


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    *heads, sq, sk = shape
    n = math.prod(shape)
    visible = math.prod(heads) * (sq * (sk - sq) + sq * (sq + 1) // 2)  # on and under the bottom-right diagonal
    return Traffic(
        forward=(visible + n) * dtype.itemsize,  # reads the visible scores, writes y with its zeros
        backward=(2 * visible + n) * dtype.itemsize,  # reads the visible part of dy and y, writes dx with its zeros
    )


BENCHMARK = Benchmark("scaled_causal_softmax", build, ours, eager, traffic, score_shapes, tiny=(2, 2, 4, 8))
