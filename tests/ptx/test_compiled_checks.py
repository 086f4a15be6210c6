"""What the checks of compiled kernels must reject: kernels that look well in their static code and move data badly."""

import pytest
import torch
import triton
import triton.language as tl

from ptx import aot
from ptx.kernels import check_compiled, meta


@triton.jit
def _row_sum_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    """As it should be."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, cols, BLOCK):
        col = first + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0)
    tl.store(y_ptr + row, tl.sum(total))


@triton.jit
def _strided_loop_kernel(table_ptr, x_ptr, y_ptr, rows, cols, BLOCK: tl.constexpr):
    """A wide prologue, then a loop in which neighbouring threads read two bytes of different rows."""
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(12):
        total += tl.load(table_ptr + i * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for col in range(0, cols):
        total += tl.load(x_ptr + row * cols + col, mask=row < rows, other=0.0)
    tl.store(y_ptr + row, total, mask=row < rows)


@triton.jit
def _row_a_lane_kernel(x_ptr, y_ptr, rows, cols, BLOCK: tl.constexpr):
    """128 bits a thread, but each thread of a warp in another row."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    total = tl.zeros((BLOCK, 8), tl.float32)
    for first in range(0, cols, 8):
        total += tl.load(x_ptr + row * cols + first + tl.arange(0, 8)[None, :], mask=row < rows, other=0.0)
    tl.store(y_ptr + row, tl.sum(total, axis=1, keep_dims=True), mask=row < rows)


@triton.jit
def _three_passes_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    """The softmax of a row that would fit the registers, read three times."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    for first in range(0, cols, BLOCK):
        largest = tl.maximum(largest, tl.load(x_ptr + row * cols + first + tl.arange(0, BLOCK)).to(tl.float32))
    top = tl.max(largest)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, cols, BLOCK):
        total += tl.exp(tl.load(x_ptr + row * cols + first + tl.arange(0, BLOCK)).to(tl.float32) - top)
    sum = tl.sum(total)
    for first in range(0, cols, BLOCK):
        at = row * cols + first + tl.arange(0, BLOCK)
        tl.store(y_ptr + at, (tl.exp(tl.load(x_ptr + at).to(tl.float32) - top) / sum).to(y_ptr.dtype.element_ty))


ROWS, COLS = 1024, 4096


def launches(kernel, *args, grid, **meta_arguments):
    with aot.recorded() as recorded:
        kernel[grid](*args, **meta_arguments)
    return recorded


def tensors():
    return meta(ROWS, COLS, dtype=torch.bfloat16), meta(ROWS, dtype=torch.float32)


@pytest.mark.aot
def test_a_good_kernel_passes():
    check_compiled(launches(_row_sum_kernel, *tensors(), COLS, grid=(ROWS,), BLOCK=1024), COLS, 90)


@pytest.mark.aot
def test_strided_loads_in_a_loop_are_rejected():
    cols = 512  # each takes the interpreter milliseconds
    x, y = meta(ROWS, cols, dtype=torch.bfloat16), meta(ROWS, dtype=torch.float32)
    table = meta(12, 1024, dtype=torch.bfloat16)
    bad = launches(_strided_loop_kernel, table, x, y, ROWS, cols, grid=(1,), BLOCK=1024)
    with pytest.raises(AssertionError, match="load of x moves in narrow pieces"):
        check_compiled(bad, cols, 90)


@pytest.mark.aot
def test_a_row_a_lane_is_rejected():
    bad = launches(_row_a_lane_kernel, *tensors(), ROWS, COLS, grid=(ROWS // 128,), BLOCK=128)
    with pytest.raises(AssertionError, match="load of x takes"):
        check_compiled(bad, COLS, 90)


@pytest.mark.aot
def test_three_passes_are_rejected():
    x, _ = tensors()
    bad = launches(_three_passes_kernel, x, x, COLS, grid=(ROWS,), BLOCK=1024)
    with pytest.raises(AssertionError, match="load of x moves 24576 bytes where 8192 are touched"):
        check_compiled(bad, COLS, 90)
    check_compiled(bad, COLS, 90, passes=3)
