"""silu_mul and gelu_mul, whose kernels are those of bias_swiglu with two tensors; here what those tests leave out."""

import functools
import itertools

import pytest
import torch

from parallel_ops import gelu_mul, silu_mul
from parallel_ops.ops import gelu_mul_reference, silu_mul_reference
from support.numerics import suite
from support.numerics.suite import randn

OPTIONS = {"alpha": 1.702, "limit": 1.1, "up_offset": 0.7}  # none of them has all its digits in fp32
PAIRS = {
    "silu": (silu_mul, silu_mul_reference),
    "silu with options": tuple(functools.partial(f, **OPTIONS) for f in (silu_mul, silu_mul_reference)),
    "gelu tanh": (gelu_mul, gelu_mul_reference),
    "gelu": tuple(functools.partial(f, approximate="none") for f in (gelu_mul, gelu_mul_reference)),
}


@pytest.mark.executed
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        *itertools.product(PAIRS, [torch.float32]),
        *itertools.product(["silu with options"], [torch.bfloat16, torch.float16, torch.float64]),
    ],
    ids=str,
)
def test_interpreted(activation, dtype):
    """1,032 columns are two blocks, so that a row's weight has a gradient from each; fp64 shows constants in fp32."""
    slack = 32 if dtype is torch.float64 else 2  # PyTorch's own fp64 is the oracle
    op, reference = (lambda gate, up, w, f=f: f(gate, up, weights=w) for f in PAIRS[activation])
    for shape in ((3, 1032), (2, 5, 40), (0, 8)):
        gate, up = (randn(*shape, dtype=dtype, seed=i, scale=2) for i in (0, 1))
        weights, grad = (randn(*s, dtype=dtype, seed=i) for i, s in ((2, shape[:-1]), (3, shape)))
        for w in (None, weights):
            suite.check_numerics(op, reference, [gate, up, w], grad.detach(), slack_ulps=slack)
