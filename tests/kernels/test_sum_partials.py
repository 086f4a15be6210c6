import pytest
import torch

from parallel_ops.comm.sum_partials import sum_partials, sum_partials_reference
from ptx import aot
from ptx.execution import rerun
from ptx.kernels import aot_cases, check_compiled, meta
from support.numerics.suite import randn


def launches(dtype, cols, counts=(8, 3, 32)):
    from parallel_ops.triton_kernels import sum_partials as kernels

    y, bias = meta(512, cols, dtype=dtype), meta(cols, dtype=dtype)
    with aot.recorded() as recorded:
        for count in counts:
            for b, residual in ((bias, y), (None, None)):
                kernels.sum_partials(meta(count, 512, cols, dtype=dtype), b, residual, y)
    return recorded


@pytest.mark.aot
@pytest.mark.parametrize(("dtype", "cols", "capability"), aot_cases())
def test_compiled_code(dtype, cols, capability):
    check_compiled(launches(dtype, cols), cols, capability)


@pytest.mark.aot
def test_eight_partials_in_16_bits_move_at_most_20_bytes_an_element():
    with_residual, without = (rerun(launch, 90, programs=1) for launch in launches(torch.bfloat16, 4096, counts=(8,)))
    for report, least in ((with_residual, 20), (without, 18)):
        operands = [*report.loads.items(), *report.stores.items()]
        moved = [t.bytes for name, t in operands if "bias" not in name]
        (written,) = (t.bytes for t in report.stores.values())
        assert sum(moved) / (written / 2) == least


@pytest.mark.aot
def test_grids_of_large_tensors_fit_the_device():
    """recorded() checks every grid. Without a bias 2^31 elements and more are not one row."""
    from parallel_ops.triton_kernels import sum_partials as kernels

    with aot.recorded():
        for shape in ((2**19, 8192), (2**31 - 2**15, 1), (1, 2**30)):
            y = meta(*shape, dtype=torch.bfloat16)
            kernels.sum_partials(meta(2, *shape, dtype=torch.bfloat16), None, None, y)


@pytest.mark.executed
@pytest.mark.parametrize(
    ("count", "shape", "dtype"),
    [
        (8, (5, 264), torch.bfloat16),
        (2, (3, 7, 9), torch.bfloat16),
        (3, (1030,), torch.float16),
        (1, (4, 8), torch.float32),
        (17, (3, 40), torch.bfloat16),
        (4, (2, 33), torch.float64),
        (2, (), torch.float32),
        (2, (0, 4), torch.float32),
    ],
    ids=str,
)
def test_the_bits_of_the_reference(count, shape, dtype):
    partials = randn(count, *shape, dtype=dtype).detach()
    bias = randn(shape[-1], dtype=dtype, seed=1).detach() if shape else None
    residual = randn(1, *shape, dtype=dtype, seed=2).detach()[0]
    for more in ((None, None), (bias, None), (None, residual), (bias, residual)):
        assert torch.equal(sum_partials(partials, *more), sum_partials_reference(partials, *more))


@pytest.mark.executed
def test_layouts_and_dtypes_of_their_own():
    partials = randn(3, 40, 6, dtype=torch.bfloat16).detach().transpose(1, 2)
    bias, residual = randn(80, dtype=torch.float32).detach()[::2], randn(6, 80, dtype=torch.bfloat16).detach()[:, ::2]
    assert torch.equal(sum_partials(partials, bias, residual), sum_partials_reference(partials, bias, residual))
