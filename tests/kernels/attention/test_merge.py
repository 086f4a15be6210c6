"""The merge of a block's rounded result into the running one, and the bytes that it moves."""

import pytest
import torch

from parallel_ops.ops.attention.block import merge_block
from ptx import aot
from ptx.kernels import check_machine_code, meta
from support.numerics.suite import randn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def kernel(*args):
    from parallel_ops.triton_kernels.attention import merge as kernels

    kernels.merge(*args)


def inputs(s, b, h, d, dtype):
    block, out = randn(s, b, h, d, dtype=dtype, seed=1).detach(), randn(s, b, h, d, dtype=FP32, seed=2).detach()
    lse = randn(b, h, s, dtype=FP32, seed=3, scale=3).detach()
    statistics = torch.stack([randn(b, h, s, dtype=FP32, seed=4, scale=3).detach(), torch.rand(b, h, s) + 1])
    return block, lse, out, statistics


@pytest.mark.executed
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("shape", [(150, 2, 3, 32), (70, 1, 2, 40), (1, 1, 1, 128)], ids=str)
def test_it_is_that_of_the_formula(shape, dtype):
    block, lse, out, statistics = inputs(*shape, dtype)
    statistics[0, ..., 0], statistics[1, ..., 0] = -torch.inf, 0.0  # a query that has seen nothing yet
    lse[..., -1] = 200.0
    double = out.double(), statistics.double()
    merge_block(block.double(), lse.double(), out=double[0], statistics=double[1], merge=True)
    kernel(block, lse, out, statistics)
    torch.testing.assert_close(out.double(), double[0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(statistics.double(), double[1], rtol=2e-6, atol=0)
    assert torch.equal(out[0], block[0].float()) or shape[0] == 1


@pytest.mark.executed(smoke=False)
def test_slices_of_other_tensors():
    """What a ring merges into: rows of a larger result, from heads before tokens."""
    block, lse, out, statistics = inputs(40, 1, 2, 16, BF16)
    whole, all_statistics = torch.zeros(100, 1, 2, 16), torch.zeros(2, 1, 2, 100)
    whole[30:70], all_statistics[..., 30:70] = out, statistics
    kernel(block, lse, out, statistics)
    turned = block.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    kernel(turned, lse, whole[30:70], all_statistics[..., 30:70])
    assert torch.equal(whole[30:70], out) and torch.equal(all_statistics[..., 30:70], statistics)
    assert not whole[:30].count_nonzero() and not whole[70:].count_nonzero()


@pytest.mark.parametrize("d", [1, 4, 8, 64])
def test_32_bits_hold_offsets_within_a_tile(d):
    """Of any width of heads, here and in the pass before a backward."""
    from parallel_ops.triton_kernels.attention import rows

    stride, s = 2**22 - 16, 8192
    x, out = (torch.empty_strided((s, 1, 1, d), (stride, d, d, 1), dtype=t, device="meta") for t in (BF16, FP32))
    lse, statistics, of_rows = (torch.empty(*shape, s, device="meta") for shape in ((1, 1), (2, 1, 1), (3, 1, 1)))
    with aot.recorded() as launches:
        kernel(x, lse, out, statistics)
        rows.gradient_rows(x, x, statistics, of_rows)
    assert len(launches) == 2
    for launch in launches:
        constants = dict(launch.constants)
        assert constants["WIDE"] or (constants["BLOCK_QUERIES"] - 1) * stride + d <= 2**31, launch


@pytest.mark.aot
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_compiled_code(d, capability):
    """One launch; 16 bytes an access for the two large tensors."""
    s, b, h = 4096, 1, 8
    with aot.recorded() as recorded, aot.chosen_for(capability):
        block, out = (meta(s, b, h, d, dtype=dtype) for dtype in (BF16, FP32))
        kernel(block, meta(b, h, s, dtype=FP32), out, meta(2, b, h, s, dtype=FP32))
    (launch,) = recorded
    check_machine_code(launch, capability)
    sass = aot.compile_for(launch, capability).sass
    assert "LDG.E.128" in sass and "STG.E.128" in sass
