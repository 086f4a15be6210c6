"""Backward kernels of both softmaxes, from the saved output."""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import aligned, quotient, reread, to_acc
from parallel_ops.triton_kernels.softmaxes.causal import hide, reach, seen_by_all, seen_by_any, visible


@triton.jit
def _add_both(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _mean(weighted, total, share_ptr, sink_grad_ptr, row, in_rows):
    """The gradient's mean under the row's probabilities, and the gradient of the row's sink where there is one.

    The saved probabilities are rounded, so they are divided by what they sum to, not by what they should sum to: else a
    gradient with a mean would leave that mean times the rounding error of the sum.
    """
    mean = tl.where(total == 0.0, 0.0, quotient(weighted, total))
    if share_ptr is not None:
        share = tl.load(share_ptr + row, mask=in_rows, other=0.0)
        mean *= 1.0 - share
        tl.store(sink_grad_ptr + row, -share * mean, mask=in_rows)
    return mean


@triton.jit
def _gradient(grad, y, mean, scale):
    """scale * y * (grad - mean), zero where y is, even beside inf and NaN."""
    return tl.where(y == 0.0, 0.0, tl.cast(scale, y.dtype) * (y * (grad - mean)))


@triton.jit(do_not_specialize=["rows", "window"])
def _backward_kernel(
    grad_ptr, y_ptr, share_ptr, dx_ptr, sink_grad_ptr, rows, cols, grad_stride, y_stride, scale: tl.float64,
    queries, window, UNIT: tl.constexpr, CAUSAL: tl.constexpr, ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    cols, grad_stride, y_stride = aligned(cols, UNIT), aligned(grad_stride, UNIT), aligned(y_stride, UNIT)
    first_row = tl.program_id(0).to(rows.dtype) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    in_rows = (row < rows) | (BLOCK_ROWS == 1)
    grad_ptr += row.to(tl.int64) * grad_stride
    y_ptr += row.to(tl.int64) * y_stride
    dx_ptr += row.to(tl.int64) * cols
    first, end, any_first, any_end = 0, cols, 0, cols
    if CAUSAL:
        first, end = visible((row % queries).to(tl.int32), queries, cols, window)
        any_first, any_end = seen_by_any(first_row, queries, cols, window, BLOCK_ROWS)
        all_first, all_end = seen_by_all(first_row, queries, cols, window, BLOCK_ROWS)
    acc: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32

    grads = ()
    ys = ()
    for chunk in tl.static_range(CHUNKS):
        col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
        loaded = in_rows & (col < cols)
        if CAUSAL:
            loaded = reach(col, first, end, loaded, ALIGN)
        grads += (tl.load(grad_ptr + col, mask=loaded, other=0.0),)
        ys += (tl.load(y_ptr + col, mask=loaded, other=0.0),)
    weighted = tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc)
    totals = tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc)
    for chunk in tl.static_range(CHUNKS):
        if (chunk * BLOCK_COLS < any_end) & ((chunk + 1) * BLOCK_COLS > any_first):
            grad, y = to_acc(grads[chunk]), to_acc(ys[chunk])
            if CAUSAL:
                start = chunk * BLOCK_COLS
                grad = hide(grad, first - start, end - start, all_first - start, all_end - start, 0.0)
            weighted += grad * y
            totals += y
    product, total = tl.reduce((weighted, totals), 1, _add_both, keep_dims=True)
    mean = _mean(product, total, share_ptr, sink_grad_ptr, row, in_rows)
    for chunk in tl.static_range(CHUNKS):
        col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
        dx = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dx_ptr.dtype.element_ty)
        if (chunk * BLOCK_COLS < any_end) & ((chunk + 1) * BLOCK_COLS > any_first):
            grad, y = to_acc(reread(grads[chunk])), to_acc(reread(ys[chunk]))
            dx = _gradient(grad, y, mean, scale).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + col, dx, mask=in_rows & (col < cols))


@triton.jit(do_not_specialize=["rows", "window"])
def _backward_loop_kernel(
    grad_ptr, y_ptr, share_ptr, dx_ptr, sink_grad_ptr, rows, cols, grad_stride, y_stride, scale: tl.float64,
    queries, window, UNIT: tl.constexpr, CAUSAL: tl.constexpr, ALIGN: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    cols, grad_stride, y_stride = aligned(cols, UNIT), aligned(grad_stride, UNIT), aligned(y_stride, UNIT)
    row = tl.program_id(0)
    grad_ptr += row.to(tl.int64) * grad_stride
    y_ptr += row.to(tl.int64) * y_stride
    dx_ptr += row.to(tl.int64) * cols
    first, end = 0, cols
    begin = 0
    if CAUSAL:
        first, end = visible((row % queries).to(tl.int32), queries, cols, window)
        begin = first // BLOCK_COLS * BLOCK_COLS

    acc: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    weighted = tl.zeros((BLOCK_COLS,), acc)
    totals = tl.zeros((BLOCK_COLS,), acc)
    for start in range(begin, end, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        loaded = reach(col, first, end, col < cols, ALIGN) if CAUSAL else col < cols
        grad = to_acc(tl.load(grad_ptr + col, mask=loaded, other=0.0))
        y = to_acc(tl.load(y_ptr + col, mask=loaded, other=0.0))
        if CAUSAL:
            grad = tl.where((col >= first) & (col < end), grad, 0.0)
        weighted += grad * y
        totals += y
    product, total = tl.reduce((weighted, totals), 0, _add_both, keep_dims=True)
    mean = _mean(product, total, share_ptr, sink_grad_ptr, row + tl.arange(0, 1), row < rows)

    for start in range(0, begin, BLOCK_COLS):
        tl.store(dx_ptr + start + tl.arange(0, BLOCK_COLS), tl.zeros((BLOCK_COLS,), dx_ptr.dtype.element_ty))
    for start in range(begin, end, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        loaded = reach(col, first, end, col < cols, ALIGN) if CAUSAL else col < cols
        grad = to_acc(tl.load(grad_ptr + col, mask=loaded, other=0.0))
        y = to_acc(tl.load(y_ptr + col, mask=loaded, other=0.0))
        dx = _gradient(grad, y, mean, scale)
        tl.store(dx_ptr + col, dx.to(dx_ptr.dtype.element_ty), mask=col < cols)
    for start in range(tl.cdiv(end, BLOCK_COLS) * BLOCK_COLS, cols, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        tl.store(dx_ptr + col, tl.zeros((BLOCK_COLS,), dx_ptr.dtype.element_ty), mask=col < cols)
