import dataclasses
import functools

import pytest
import torch

from parallel_ops.ops import scaled_masked_softmax_reference
from support import aot
from support.kernels import check_compiled, differentiable, meta, poisoned
from support.softmax import check_numerics, compiled_cases
from support.suite import DTYPES, randn


def launches(dtype, cols):
    from parallel_ops.triton_kernels import scaled_masked_softmax as kernels

    x = meta(2, 4, 64, cols, dtype=dtype)
    masks = None, meta(2, 1, 64, cols, dtype=torch.bool), meta(2, 1, 1, cols, dtype=dtype)
    with aot.recorded() as recorded:
        for mask in masks:
            kernels.forward(x, mask, x, scale=0.125)
        kernels.backward(x, x, x, scale=0.125)
    return recorded


@pytest.mark.aot
@pytest.mark.parametrize(("dtype", "cols", "capability"), compiled_cases())
def test_compiled_code(dtype, cols, capability):
    check_compiled(launches(dtype, cols), cols, capability)


@pytest.mark.aot
def test_a_spilling_kernel_would_be_seen():
    """The checks read real code: the same kernel with its longest row four times as long does spill."""
    launch = next(l for l in launches(torch.bfloat16, 16384) if l.name == "_backward_kernel")
    constants = {**dict(launch.constants), "BLOCK_COLS": 65536}
    code = aot.compile_for(dataclasses.replace(launch, constants=tuple(constants.items())), 90)
    assert code.spill_instructions and code.local_bytes + code.stack_bytes > 0


def interpreted(scale):
    from parallel_ops.triton_kernels import scaled_masked_softmax as kernels

    outputs = []

    def forward(x, mask):
        y = poisoned(x.shape, x)
        kernels.forward(x, mask, y, scale=scale)
        outputs.append(y.detach())
        return y

    def backward(grad, x, mask):
        dx = poisoned(x.shape, x)
        kernels.backward(grad, outputs[-1], dx, scale=scale)
        return dx, None

    return differentiable(forward, backward)


def masks(x):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.rand(x.shape, generator=generator) < 0.4
    hidden.view(-1, x.shape[-1])[:1] = True
    floating = torch.randint(-8, 8, x.shape, generator=generator) / 8
    yield None
    yield hidden
    yield hidden[..., :1, :]
    yield hidden[..., :1]
    yield torch.where(hidden, -torch.inf, floating)[0].transpose(0, -1).contiguous().transpose(0, -1)
    yield floating[:1].bfloat16()


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 2, 70), (5, 1030), (3, 1, 1), (2, 0, 4)], ids=str)
def test_interpreted(shape, dtype):
    x, grad = randn(*shape, dtype=dtype, scale=3), randn(*shape, dtype=dtype, seed=2).detach()
    reference = functools.partial(scaled_masked_softmax_reference, scale=-0.5)
    for mask in masks(x):
        check_numerics(interpreted(-0.5), reference, [x, mask], grad, -0.5)
    transposed = x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    check_numerics(interpreted(-0.5), reference, [transposed, None], grad, -0.5)


@pytest.mark.interpret
def test_interpreted_rows_too_long_for_one_block(monkeypatch):
    from parallel_ops.triton_kernels import _softmax

    monkeypatch.setattr(_softmax, "MAX_BLOCK", 64)
    monkeypatch.setattr(_softmax, "LOOP_BLOCK", 32)
    x, grad = randn(2, 2, 2, 150, dtype=torch.float32, scale=3), randn(2, 2, 2, 150, dtype=torch.float32, seed=2)
    reference = functools.partial(scaled_masked_softmax_reference, scale=0.5)
    for mask in masks(x):
        check_numerics(interpreted(0.5), reference, [x, mask], grad.detach(), 0.5)


@pytest.mark.interpret
def test_interpreted_masks_broadcast_in_turns():
    x, grad = randn(2, 3, 2, 3, 2, 5, dtype=torch.float32), randn(2, 3, 2, 3, 2, 5, dtype=torch.float32, seed=2)
    for shape in [(2, 1, 2, 1, 2, 5), (3, 1, 3, 1, 5), (2, 1), (5,), ()]:
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
        check_numerics(interpreted(1.0), scaled_masked_softmax_reference, [x, mask], grad.detach(), 1.0)


@pytest.mark.interpret
@pytest.mark.parametrize("limit", [16384, 64])
def test_interpreted_special_values(monkeypatch, limit):
    from parallel_ops.triton_kernels import _softmax

    monkeypatch.setattr(_softmax, "MAX_BLOCK", limit)
    x = randn(5, 70, dtype=torch.float32).detach()
    hidden = torch.zeros(5, 70, dtype=torch.bool)
    hidden[:, 60:] = True
    x[0, 65] = torch.nan
    x[1, 3] = torch.nan
    x[2, 3] = torch.inf
    x[3, :60] = -torch.inf
    for mask in (hidden, torch.where(hidden, -torch.inf, 0.0)):
        y = interpreted(1.0)(x, mask)
        assert not y[:, 60:].any()
        assert y[1:3, :60].isnan().all() and not y[3].any()
        torch.testing.assert_close(y[[0, 4], :60], x[[0, 4], :60].softmax(-1))
