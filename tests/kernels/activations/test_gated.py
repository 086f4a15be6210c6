"""silu_mul and gelu_mul, whose kernels are those of bias_swiglu with two tensors; here what those tests leave out."""

import functools
import itertools

import pytest
import torch

from parallel_ops.ops import gelu_mul_reference, silu_mul_reference
from ptx.kernels import differentiable, poisoned
from support.numerics import suite
from support.numerics.suite import randn


def interpreted(activation):
    from parallel_ops.triton_kernels import activations as kernels

    options = OPTIONS if activation == "silu with options" else {}
    activation = activation.removesuffix(" with options")

    def forward(gate, up, weights):
        y = poisoned(gate.shape, gate)
        kernels.forward(gate, up, None, weights, y, activation=activation, **options)
        return y

    def backward(grad, gate, up, weights):
        dgate, dup = poisoned(gate.shape, gate), poisoned(gate.shape, gate)
        dweights = gate.new_empty(0) if weights is None else poisoned(weights.shape, weights)
        kernels.backward(
            grad, gate, up, None, weights, dgate, dup, gate.new_empty(0), dweights, activation=activation, **options
        )  # fmt: skip
        return dgate, dup, None if weights is None else dweights

    return differentiable(forward, backward)


OPTIONS = {"alpha": 1.702, "limit": 1.1, "up_offset": 0.7}  # none of them has all its digits in fp32
REFERENCES = {
    "silu": silu_mul_reference,
    "silu with options": functools.partial(silu_mul_reference, **OPTIONS),
    "gelu tanh": gelu_mul_reference,
    "gelu": functools.partial(gelu_mul_reference, approximate="none"),
}


@pytest.mark.executed
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        *itertools.product(REFERENCES, [torch.float32]),
        *itertools.product(["silu with options"], [torch.bfloat16, torch.float16, torch.float64]),
    ],
    ids=str,
)
def test_interpreted(activation, dtype):
    """1,032 columns are two blocks, so that a row's weight has a gradient from each; fp64 shows constants in fp32."""
    slack = 32 if dtype is torch.float64 else 2  # PyTorch's own fp64 is the oracle
    for shape in ((3, 1032), (2, 5, 40), (0, 8)):
        gate, up = (randn(*shape, dtype=dtype, seed=i, scale=2) for i in (0, 1))
        weights, grad = (randn(*s, dtype=dtype, seed=i) for i, s in ((2, shape[:-1]), (3, shape)))

        def reference(gate, up, weights):
            return REFERENCES[activation](gate, up, weights=weights)

        for w in (None, weights):
            suite.check_numerics(interpreted(activation), reference, [gate, up, w], grad.detach(), slack_ulps=slack)
