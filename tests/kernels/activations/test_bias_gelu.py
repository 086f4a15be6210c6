import dataclasses
import functools

import pytest
import torch

from parallel_ops import bias_gelu
from parallel_ops.ops import bias_gelu_reference
from ptx import aot
from ptx.kernels import aot_cases, check_compiled, interpreted_cases, meta
from support.numerics import suite
from support.numerics.suite import randn


def launches(dtype, cols):
    from parallel_ops.triton_kernels.activations import activations as kernels

    x, b = meta(8192, cols, dtype=dtype), meta(cols, dtype=dtype)
    with aot.recorded() as recorded:
        for activation in ("gelu tanh", "gelu"):
            for bias, dbias in ((b, b), (None, b[:0])):
                kernels.forward(x, None, bias, None, x, activation=activation)
                kernels.backward(x, x, None, bias, None, x, None, dbias, b[:0], activation=activation)
    return recorded


@pytest.mark.aot
@pytest.mark.parametrize(("dtype", "cols", "capability"), aot_cases())
def test_compiled_code(dtype, cols, capability):
    check_compiled(launches(dtype, cols), cols, capability)


@pytest.mark.aot
def test_a_spilling_kernel_would_be_seen():
    """The checks read real code: the same kernel with its block widened 8 times does spill."""
    launch = next(l for l in launches(torch.bfloat16, 4096) if l.name == "_backward_kernel")
    constants = {**dict(launch.constants), "BLOCK_COLS": 8192}
    code = aot.compile_for(dataclasses.replace(launch, constants=tuple(constants.items())), 90)
    assert code.spills and code.spill_instructions


@pytest.mark.executed
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize(("shape", "dtype"), interpreted_cases((3, 5, 70), (520, 9), (2, 1030), (0, 4)))
def test_interpreted(shape, dtype, approximate):
    x, bias = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([shape, shape[-1:]]))
    grad = randn(*shape, dtype=dtype, seed=2).detach()
    op, reference = (functools.partial(f, approximate=approximate) for f in (bias_gelu, bias_gelu_reference))
    suite.check_numerics(op, reference, [x, bias], grad, slack_ulps=2)
    suite.check_numerics(op, reference, [x, None], grad, slack_ulps=2)
    transposed = x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    suite.check_numerics(op, reference, [transposed, bias], None, slack_ulps=2)
