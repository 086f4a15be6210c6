import functools

import pytest
import torch

from parallel_ops import scaled_masked_softmax
from parallel_ops.ops import scaled_masked_softmax_reference
from ptx import aot
from ptx.execution import rerun
from ptx.kernels import check_compiled, check_machine_code, meta
from support.numerics.softmax import check_numerics, compiled_cases, walks
from support.numerics.suite import DTYPES, randn

ACC = torch.float32


def launches(dtype, cols):
    from parallel_ops.triton_kernels.softmaxes import launchers as kernels

    x, sink, by_row = (meta(*s, dtype=d) for s, d in (((2, 4, 64, cols), dtype), ((4,), ACC), ((512,), ACC)))
    masks = None, meta(2, 1, 64, cols, dtype=torch.bool), meta(2, 1, 1, cols, dtype=dtype)
    with aot.recorded() as recorded:
        for mask in masks:
            kernels.forward(x, mask, None, x, by_row, scale=0.125)
        kernels.forward(x, None, sink, x, by_row, scale=0.125)
        kernels.backward(x, x, None, x, by_row, scale=0.125)
        kernels.backward(x, x, by_row, x, by_row, scale=0.125)
    return recorded


@pytest.mark.aot
@pytest.mark.parametrize(("dtype", "cols", "capability"), compiled_cases())
def test_compiled_code(dtype, cols, capability):
    recorded = launches(dtype, cols)
    masked = [launch for launch in recorded if dict(launch.constants).get("MASK", "none") != "none"]
    check_compiled([launch for launch in recorded if launch not in masked], cols, capability, passes=walks(dtype, cols))
    # Rows of a program share a mask, and rows that are walked twice read it again. In the loop over fp32 rows a mask of
    # bytes sets 16 elements a thread, whose four loads take sectors together that none takes alone.
    for launch in masked:
        if dtype.itemsize == 4 and launch.name == "_forward_loop_kernel":
            check_machine_code(launch, capability)
        else:
            check_compiled([launch], cols, capability, passes=4)


def both(scale=1.0):
    return [functools.partial(f, scale=scale) for f in (scaled_masked_softmax, scaled_masked_softmax_reference)]


def masks(x):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.rand(x.shape, generator=generator) < 0.4
    hidden.view(-1, x.shape[-1])[:1] = True
    floating = torch.randint(-8, 8, x.shape, generator=generator) / 8
    yield None
    yield hidden
    yield hidden[..., :1, :]
    yield hidden[..., :1].byte()
    yield torch.where(hidden, -torch.inf, floating)[0].transpose(0, -1).contiguous().transpose(0, -1)
    yield floating[:1].bfloat16()


@pytest.mark.executed
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(((2, 3, 2, 70), dtype) for dtype in (*DTYPES, torch.float64)),
        *((shape, torch.float32) for shape in [(5, 1030), (3, 1, 1), (2, 0, 4)]),
    ],
    ids=str,
)
def test_interpreted(shape, dtype):
    x, grad = randn(*shape, dtype=dtype, scale=3), randn(*shape, dtype=dtype, seed=2).detach()
    for mask in masks(x):
        check_numerics(*both(-0.5), [x, mask], grad, -0.5)
    transposed = x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    check_numerics(*both(-0.5), [transposed, None], grad, -0.5)


@pytest.mark.executed
def test_interpreted_rows_too_long_for_one_block(monkeypatch):
    from parallel_ops.triton_kernels.softmaxes import launchers as _softmax

    monkeypatch.setattr(_softmax, "MAX_ROW", 64 * 4)
    monkeypatch.setattr(_softmax, "LOOP_BLOCK", 32)
    x, grad = randn(2, 2, 2, 150, dtype=torch.float32, scale=3), randn(2, 2, 2, 150, dtype=torch.float32, seed=2)
    for mask in masks(x):
        check_numerics(*both(0.5), [x, mask], grad.detach(), 0.5)


@pytest.mark.executed(smoke=False)
def test_interpreted_masks_broadcast_in_turns():
    x, grad = randn(2, 3, 2, 3, 2, 5, dtype=torch.float32), randn(2, 3, 2, 3, 2, 5, dtype=torch.float32, seed=2)
    for shape in [(2, 1, 2, 1, 2, 5), (3, 1, 3, 1, 5), (2, 1), (5,), ()]:
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
        check_numerics(*both(), [x, mask], grad.detach(), 1.0)


@pytest.mark.executed
@pytest.mark.parametrize("limit", [128 * 1024, 64])
def test_interpreted_special_values(monkeypatch, limit):
    from parallel_ops.triton_kernels.softmaxes import launchers as _softmax

    monkeypatch.setattr(_softmax, "MAX_ROW", limit)
    x = randn(5, 70, dtype=torch.float32).detach()
    hidden = torch.zeros(5, 70, dtype=torch.bool)
    hidden[:, 60:] = True
    x[0, 65] = torch.nan
    x[1, 3] = torch.nan
    x[2, 3] = torch.inf
    x[3, :60] = -torch.inf
    for mask in (hidden, torch.where(hidden, -torch.inf, 0.0)):
        y = scaled_masked_softmax(x, mask)
        assert not y[:, 60:].any()
        assert y[1:3, :60].isnan().all() and not y[3].any()
        torch.testing.assert_close(y[[0, 4], :60], x[[0, 4], :60].softmax(-1))


@pytest.mark.executed(smoke=False)
@pytest.mark.parametrize("limit", [128 * 1024, 64])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 3, 2, 70), torch.float32), ((1, 3, 1, 2060), torch.bfloat16)], ids=str
)
def test_interpreted_sink(monkeypatch, shape, dtype, limit):
    """A sink in the dtype of the scores, beside several rows a program and beside one."""
    from parallel_ops.triton_kernels.softmaxes import launchers as _softmax

    monkeypatch.setattr(_softmax, "MAX_ROW", limit)
    op, reference = (lambda x, mask, sink, f=f: f(x, mask, sink=sink) for f in both(0.5))
    x, grad = randn(*shape, dtype=dtype, scale=3), randn(*shape, dtype=dtype, seed=2)
    hidden = torch.rand(shape[0], 1, *shape[2:], generator=torch.Generator().manual_seed(5)) < 0.4
    for sink in (randn(3, dtype=dtype, seed=3), randn(1, dtype=dtype)):
        check_numerics(op, reference, [x, hidden, sink], grad.detach(), 0.5)


@pytest.mark.aot
def test_masks_whose_strides_take_64_bits():
    from parallel_ops.triton_kernels.softmaxes import launchers as kernels

    x, by_row = meta(1, 1, 5, 16, dtype=torch.bfloat16), meta(5, dtype=ACC)
    mask = torch.empty_strided((1, 1, 5, 16), (1, 1, 2**29, 1), dtype=torch.bool, device="meta")
    with aot.recorded() as recorded:
        kernels.forward(x, mask, None, x, by_row, scale=1.0)
    rerun(recorded[0], 90, programs=5)  # which raises where an address is not the mask's


@pytest.mark.executed(smoke=False)
def test_interpreted_gradient_with_a_large_mean():
    """The saved bf16 output sums to one to three digits only; that must not be multiplied by the gradient's mean."""
    x = randn(8, 1000, dtype=torch.bfloat16)
    grad = (100 + randn(8, 1000, dtype=torch.float32, seed=1).detach()).bfloat16()
    check_numerics(*both(), [x, None], grad, 1.0, gradient_unit=1.0)
