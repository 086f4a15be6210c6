"""The kernels behind both softmaxes: whole rows on chip where they fit, else two walks over each row.

Rows of up to ``MAX_BLOCK`` elements are loaded once and stay in registers, several short ones to a program. Longer ones
are walked twice, first for maximum and sum (online: one exp per element, rescaling the sums when the maximum grows;
Milakov and Gimelshein, arXiv:1805.02867), then to write; the second walk finds most of the row in the L2 cache.

Masks come as broadcast strides, never expanded. With CAUSAL, what a query does not see is not loaded: the bounds of
the loads are rounded outwards to ``ALIGN`` elements, because a bound inside a 16-byte vector would split every load of
the row into single elements, and the exact bounds are applied in registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import as_rows, cdiv, next_power_of_2, to_acc
from parallel_ops.triton_kernels._launch import launch

# The longest row kept on chip: 32 elements a thread at 16 warps, which compiles without spills for every variant.
MAX_BLOCK = 16384
# Elements a program takes at least, and elements a warp takes: 32 a thread are four 16-byte loads of bf16 in flight.
MIN_TILE = 4096
WARP_TILE = 1024
# Elements in 32 bytes of bf16, the smallest piece that memory moves; of fp32, in two.
ALIGN = 16
# Columns per step beyond MAX_BLOCK, and warps: 16 elements a thread beside as many running sums.
LOOP_BLOCK = 4096
LOOP_WARPS = 8


@triton.jit
def _visible(query, queries, cols, window):
    """The keys [first, end) that a query sees, the newest query aligned with the newest key."""
    end = query + (cols - queries) + 1
    return tl.maximum(end - window, 0), end


@triton.jit
def _reach(col, first, end, inside, ALIGN: tl.constexpr):
    """What is loaded of what is inside: the visible keys, rounded outwards."""
    return inside & (col >= first // ALIGN * ALIGN) & (col < tl.cdiv(end, ALIGN) * ALIGN)


@triton.jit
def _logits(
    scores_ptr, mask_ptr, mask_stride, col, scale, first, end, loaded,
    MASK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """scale * scores (+ mask) and whether each is hidden; hidden ones are -inf."""
    z = to_acc(tl.load(scores_ptr + col, mask=loaded, other=0.0))
    z = z * tl.cast(scale, z.dtype)
    hidden = ~loaded
    if CAUSAL:
        hidden = (col < first) | (col >= end)
    if MASK == "bool":
        hidden = hidden | tl.load(mask_ptr + col * mask_stride, mask=loaded, other=0).to(tl.int1)
    if MASK == "additive":
        added = to_acc(tl.load(mask_ptr + col * mask_stride, mask=loaded, other=0.0)).to(z.dtype)
        hidden = hidden | (added == float("-inf"))
        z += added
    return tl.where(hidden, float("-inf"), z), hidden


@triton.jit
def _inverse(total):
    """1 / total, and 0 for a row that sees no key at all."""
    return tl.where(total == 0.0, 0.0, 1.0 / total)


@triton.jit
def _mask_row(mask_ptr, row, size_1, size_2, stride_0, stride_1, stride_2):
    """Where the mask's row begins, for the row-th row of the scores."""
    last = (row % size_2).to(tl.int64)
    rest = row // size_2
    return (
        mask_ptr + (rest // size_1).to(tl.int64) * stride_0 + (rest % size_1).to(tl.int64) * stride_1 + last * stride_2
    )


@triton.jit
def _forward_kernel(
    scores_ptr, mask_ptr, y_ptr, rows, cols, row_stride, scale: tl.float64,
    size_1, size_2, stride_0, stride_1, stride_2, mask_stride, queries, window,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (row < rows) & (col < cols)
    loaded = inside
    first, end = 0, cols
    if CAUSAL:
        first, end = _visible((row % queries).to(tl.int32), queries, cols, window)
        loaded = _reach(col, first, end, inside, ALIGN)
    if MASK != "none":
        mask_ptr = _mask_row(mask_ptr, row, size_1, size_2, stride_0, stride_1, stride_2)
    z, hidden = _logits(
        scores_ptr + row * row_stride, mask_ptr, mask_stride, col, scale, first, end, loaded, MASK, CAUSAL
    )
    top = tl.max(z, axis=1, keep_dims=True)
    e = tl.exp(z - tl.where(top == float("-inf"), 0.0, top))
    y = e * _inverse(tl.sum(e, axis=1, keep_dims=True))
    y = tl.where(hidden, 0.0, y)
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _forward_loop_kernel(
    scores_ptr, mask_ptr, y_ptr, rows, cols, row_stride, scale: tl.float64,
    size_1, size_2, stride_0, stride_1, stride_2, mask_stride, queries, window,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, ALIGN: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    scores_ptr += row.to(tl.int64) * row_stride
    y_ptr += row.to(tl.int64) * cols
    first, end = 0, cols
    begin = 0
    if CAUSAL:
        first, end = _visible((row % queries).to(tl.int32), queries, cols, window)
        begin = first // BLOCK_COLS * BLOCK_COLS
    if MASK != "none":
        mask_ptr = _mask_row(mask_ptr, row, size_1, size_2, stride_0, stride_1, stride_2)

    acc: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    top = tl.full((1,), float("-inf"), acc)
    sums = tl.zeros((BLOCK_COLS,), acc)
    for start in range(begin, end, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        loaded = _reach(col, first, end, col < cols, ALIGN) if CAUSAL else col < cols
        z, _ = _logits(scores_ptr, mask_ptr, mask_stride, col, scale, first, end, loaded, MASK, CAUSAL)
        new_top = tl.maximum(top, tl.max(z, axis=0, keep_dims=True))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        sums = sums * tl.exp(top - shift) + tl.exp(z - shift)
        top = new_top
    shift = tl.where(top == float("-inf"), 0.0, top)
    inverse = _inverse(tl.sum(sums, axis=0, keep_dims=True))

    for start in range(0, begin, BLOCK_COLS):
        tl.store(y_ptr + start + tl.arange(0, BLOCK_COLS), tl.zeros((BLOCK_COLS,), y_ptr.dtype.element_ty))
    for start in range(begin, end, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        loaded = _reach(col, first, end, col < cols, ALIGN) if CAUSAL else col < cols
        z, hidden = _logits(scores_ptr, mask_ptr, mask_stride, col, scale, first, end, loaded, MASK, CAUSAL)
        y = tl.where(hidden, 0.0, tl.exp(z - shift) * inverse)
        tl.store(y_ptr + col, y.to(y_ptr.dtype.element_ty), mask=col < cols)
    for start in range(tl.cdiv(end, BLOCK_COLS) * BLOCK_COLS, cols, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        tl.store(y_ptr + col, tl.zeros((BLOCK_COLS,), y_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def _gradient(grad, y, total, scale):
    """scale * y * (grad - total), zero where y is, even beside inf and NaN."""
    return tl.where(y == 0.0, 0.0, tl.cast(scale, y.dtype) * (y * (grad - total)))


@triton.jit
def _backward_kernel(
    grad_ptr, y_ptr, dx_ptr, rows, cols, grad_stride, y_stride, scale: tl.float64, queries, window,
    CAUSAL: tl.constexpr, ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (row < rows) & (col < cols)
    loaded = inside
    if CAUSAL:
        first, end = _visible((row % queries).to(tl.int32), queries, cols, window)
        loaded = _reach(col, first, end, inside, ALIGN)
    grad = to_acc(tl.load(grad_ptr + row * grad_stride + col, mask=loaded, other=0.0))
    y = to_acc(tl.load(y_ptr + row * y_stride + col, mask=loaded, other=0.0))
    if CAUSAL:
        grad = tl.where((col >= first) & (col < end), grad, 0.0)
    total = tl.sum(grad * y, axis=1, keep_dims=True)
    dx = _gradient(grad, y, total, scale)
    tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_loop_kernel(
    grad_ptr, y_ptr, dx_ptr, rows, cols, grad_stride, y_stride, scale: tl.float64, queries, window,
    CAUSAL: tl.constexpr, ALIGN: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    grad_ptr += row.to(tl.int64) * grad_stride
    y_ptr += row.to(tl.int64) * y_stride
    dx_ptr += row.to(tl.int64) * cols
    first, end = 0, cols
    begin = 0
    if CAUSAL:
        first, end = _visible((row % queries).to(tl.int32), queries, cols, window)
        begin = first // BLOCK_COLS * BLOCK_COLS

    acc: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    sums = tl.zeros((BLOCK_COLS,), acc)
    for start in range(begin, end, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        loaded = _reach(col, first, end, col < cols, ALIGN) if CAUSAL else col < cols
        grad = to_acc(tl.load(grad_ptr + col, mask=loaded, other=0.0))
        y = to_acc(tl.load(y_ptr + col, mask=loaded, other=0.0))
        if CAUSAL:
            grad = tl.where((col >= first) & (col < end), grad, 0.0)
        sums += grad * y
    total = tl.sum(sums, axis=0, keep_dims=True)

    for start in range(0, begin, BLOCK_COLS):
        tl.store(dx_ptr + start + tl.arange(0, BLOCK_COLS), tl.zeros((BLOCK_COLS,), dx_ptr.dtype.element_ty))
    for start in range(begin, end, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        loaded = _reach(col, first, end, col < cols, ALIGN) if CAUSAL else col < cols
        grad = to_acc(tl.load(grad_ptr + col, mask=loaded, other=0.0))
        y = to_acc(tl.load(y_ptr + col, mask=loaded, other=0.0))
        dx = _gradient(grad, y, total, scale)
        tl.store(dx_ptr + col, dx.to(dx_ptr.dtype.element_ty), mask=col < cols)
    for start in range(tl.cdiv(end, BLOCK_COLS) * BLOCK_COLS, cols, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        tl.store(dx_ptr + col, tl.zeros((BLOCK_COLS,), dx_ptr.dtype.element_ty), mask=col < cols)


def tile(cols: int) -> dict[str, int]:
    """Rows and columns of one program, and its warps, for rows that fit on chip."""
    block_cols = max(8, next_power_of_2(cols))
    block_rows = max(1, MIN_TILE // block_cols)
    return {
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLS": block_cols,
        "num_warps": block_rows * block_cols // WARP_TILE,
    }


def launch_forward(
    scores: Tensor, mask: Tensor | None, mask_layout: tuple[int, ...], y: Tensor, scale: float, *,
    kind: str, causal: bool, window: int | None = None,
) -> None:  # fmt: skip
    """Scores as rows, the mask as sizes and strides over them; ``y`` is contiguous."""
    scores, rows, cols, stride = as_rows(scores)
    queries, window = _causal_sizes(y, causal, window)
    args = (scores, mask, y, rows, cols, stride, scale, *mask_layout, queries, window)
    if cols > MAX_BLOCK:
        launch(
            _forward_loop_kernel, (rows,),
            *args, MASK=kind, CAUSAL=causal, ALIGN=ALIGN, BLOCK_COLS=LOOP_BLOCK, num_warps=LOOP_WARPS,
        )  # fmt: skip
        return
    config = tile(cols)
    launch(_forward_kernel, (cdiv(rows, config["BLOCK_ROWS"]),), *args, MASK=kind, CAUSAL=causal, ALIGN=ALIGN, **config)


def launch_backward(
    grad: Tensor, y: Tensor, dx: Tensor, scale: float, *, causal: bool, window: int | None = None
) -> None:
    """``dx = scale * y * (grad - sum(grad * y))``; ``dx`` is contiguous."""
    if y.numel() == 0:
        return
    grad, rows, cols, grad_stride = as_rows(grad)
    y, _, _, y_stride = as_rows(y)
    queries, window = _causal_sizes(dx, causal, window)
    args = (grad, y, dx, rows, cols, grad_stride, y_stride, scale, queries, window)
    if cols > MAX_BLOCK:
        launch(
            _backward_loop_kernel, (rows,),
            *args, CAUSAL=causal, ALIGN=ALIGN, BLOCK_COLS=LOOP_BLOCK, num_warps=LOOP_WARPS,
        )  # fmt: skip
        return
    config = tile(cols)
    launch(_backward_kernel, (cdiv(rows, config["BLOCK_ROWS"]),), *args, CAUSAL=causal, ALIGN=ALIGN, **config)


def _causal_sizes(t: Tensor, causal: bool, window: int | None) -> tuple[int, int]:
    """Queries per matrix and the window, which is the whole row where there is none."""
    if not causal:
        return 1, 1
    return t.shape[-2], t.shape[-1] if window is None else min(window, t.shape[-1])
