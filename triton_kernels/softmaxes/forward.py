"""Forward kernels of both softmaxes; ``launchers.py`` chooses one for each shape."""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import aligned, computed_here, quotient, reread, to_acc
from parallel_ops.triton_kernels._math import LOG2_E, exp_nonpositive
from parallel_ops.triton_kernels.softmaxes.causal import hide, reach, seen_by_all, seen_by_any, visible


@triton.jit
def _exponential(z, FAST: tl.constexpr):
    """e to what was a logit less the row's maximum."""
    return tl.exp2(z) if FAST else exp_nonpositive(z, False)


@triton.jit
def _in_base(x, FAST: tl.constexpr):
    """Logits in the base of the exponential: e, or 2 where that saves a product and 16 bits hide its rounding."""
    return x * LOG2_E if FAST else x


@triton.jit
def _logits(
    x, mask_ptr, mask_stride, col, scale, first, end, loaded,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """scale * x (+ mask) in the base of ``_exponential``, and whether each is hidden; hidden ones are -inf."""
    z = to_acc(x)
    z = z * _in_base(tl.cast(scale, z.dtype), FAST)
    hidden = ~loaded
    if CAUSAL:
        hidden = (col < first) | (col >= end)
    if MASK == "bool":
        hidden = hidden | (tl.load(mask_ptr + col.to(tl.int64) * mask_stride, mask=loaded, other=0) != 0)
    if MASK == "additive":
        added = to_acc(tl.load(mask_ptr + col.to(tl.int64) * mask_stride, mask=loaded, other=0.0)).to(z.dtype)
        hidden = hidden | (added == float("-inf"))
        z += _in_base(added, FAST)
    return tl.where(hidden, float("-inf"), z), hidden


@triton.jit
def _shift(top):
    """What is subtracted of a row's logits: their maximum, or nothing where all are -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _inverse(total):
    """1 / total, and 0 for a row that sees no key at all."""
    return tl.where(total == 0.0, 0.0, quotient(tl.full(total.shape, 1.0, total.dtype), total))


@triton.jit
def _mask_row(mask_ptr, row, size_1, size_2, stride_0, stride_1, stride_2, MASK_UNIT: tl.constexpr):
    """Where the mask's row begins, for the row-th row of the scores."""
    stride_0, stride_1 = aligned(stride_0, MASK_UNIT), aligned(stride_1, MASK_UNIT)
    stride_2 = aligned(stride_2, MASK_UNIT)
    last = (row % size_2).to(tl.int64)
    rest = row // size_2
    return (
        mask_ptr + (rest // size_1).to(tl.int64) * stride_0 + (rest % size_1).to(tl.int64) * stride_1 + last * stride_2
    )


@triton.jit
def _sink(sink_ptr, row, in_rows, queries, heads, acc: tl.constexpr, FAST: tl.constexpr):
    """The sink of each row's head, in the base of ``_exponential``."""
    return _in_base(to_acc(tl.load(sink_ptr + row // queries % heads, mask=in_rows, other=0.0)).to(acc), FAST)


@triton.jit(do_not_specialize=["rows", "window"])
def _forward_kernel(
    scores_ptr, mask_ptr, sink_ptr, y_ptr, share_ptr, rows, cols, row_stride, scale: tl.float64,
    size_1, size_2, stride_0, stride_1, stride_2, mask_stride, queries, heads, window, UNIT: tl.constexpr,
    MASK_UNIT: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, FAST: tl.constexpr, ALIGN: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    cols, row_stride = aligned(cols, UNIT), aligned(row_stride, UNIT)
    first_row = tl.program_id(0).to(rows.dtype) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    in_rows = (row < rows) | (BLOCK_ROWS == 1)
    scores_ptr += row.to(tl.int64) * row_stride
    y_ptr += row.to(tl.int64) * cols
    first, end, any_first, any_end = 0, cols, 0, CHUNKS * BLOCK_COLS
    if CAUSAL:
        first, end = visible((row % queries).to(tl.int32), queries, cols, window)
        any_first, any_end = seen_by_any(first_row, queries, cols, window, BLOCK_ROWS)
        all_first, all_end = seen_by_all(first_row, queries, cols, window, BLOCK_ROWS)
    if MASK != "none":
        mask_ptr = _mask_row(mask_ptr, row, size_1, size_2, stride_0, stride_1, stride_2, MASK_UNIT)
    acc: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    factor = _in_base(tl.cast(scale, acc), FAST)

    xs = ()
    for chunk in tl.static_range(CHUNKS):
        col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
        loaded = in_rows & (col < cols)
        if CAUSAL:
            loaded = reach(col, first, end, loaded, ALIGN)
        xs += (tl.load(scores_ptr + col, mask=loaded, other=0.0),)

    tops = tl.full((BLOCK_ROWS, BLOCK_COLS), float("-inf"), acc)
    zs = ()
    for chunk in tl.static_range(CHUNKS):
        col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
        z = tl.full((BLOCK_ROWS, BLOCK_COLS), float("-inf"), acc)
        if (chunk * BLOCK_COLS < any_end) & ((chunk + 1) * BLOCK_COLS > any_first):
            inside = in_rows & (col < cols)
            if CAUSAL:
                start = chunk * BLOCK_COLS
                z = to_acc(xs[chunk]) * factor
                z = hide(z, first - start, end - start, all_first - start, all_end - start, float("-inf"))
            else:
                z, _ = _logits(xs[chunk], mask_ptr, mask_stride, col, scale, first, end, inside, MASK, CAUSAL, FAST)
            tops = z if chunk == 0 else tl.maximum(tops, z)
        # Beside a triangle logits are made again: what waits over a branch is moved there, hidden chunks too.
        zs += (xs[chunk] if WIDE or CAUSAL else z,)
    top = tl.max(tops, axis=1, keep_dims=True)
    if sink_ptr is not None:
        sink = _sink(sink_ptr, row, in_rows, queries, heads, acc, FAST)
        top = tl.maximum(top, sink)
    shift = _shift(top)

    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc)
    es = ()
    for chunk in tl.static_range(CHUNKS):
        col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
        e = tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc)
        if (chunk * BLOCK_COLS < any_end) & ((chunk + 1) * BLOCK_COLS > any_first):
            kept = zs[chunk]
            if CAUSAL:
                start = chunk * BLOCK_COLS
                e = _exponential(to_acc(reread(kept)) * factor - shift, FAST)
                e = hide(e, first - start, end - start, all_first - start, all_end - start, 0.0)
            elif WIDE:  # and no mask
                inside = in_rows & (col < cols)
                z, _ = _logits(reread(kept), mask_ptr, mask_stride, col, scale, first, end, inside, MASK, CAUSAL, FAST)
                e = _exponential(z - shift, FAST)
            else:
                e = _exponential(kept - shift, FAST)
            sums = e if chunk == 0 else sums + e
        es += (zs[chunk] if WIDE else e,)
    total = tl.sum(sums, axis=1, keep_dims=True)
    if sink_ptr is not None:
        # Told apart from the one above, which would wait in registers beside the longest rows.
        row = computed_here(tl.program_id(0)).to(rows.dtype) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        in_rows = row < rows
        share = _exponential(_sink(sink_ptr, row, in_rows, queries, heads, acc, FAST) - shift, FAST)
        total += share
    inverse = _inverse(total)
    if sink_ptr is not None:
        tl.store(share_ptr + row, share * inverse, mask=in_rows)

    for chunk in tl.static_range(CHUNKS):
        col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
        inside = in_rows & (col < cols)
        if (chunk * BLOCK_COLS < any_end) & ((chunk + 1) * BLOCK_COLS > any_first):
            x = es[chunk]
            if WIDE:
                z, hidden = _logits(
                    reread(x), mask_ptr, mask_stride, col, scale, first, end, inside, MASK, CAUSAL, FAST
                )
                y = tl.where(hidden, 0.0, _exponential(z - shift, FAST) * inverse).to(y_ptr.dtype.element_ty)
            else:
                y = (x * inverse).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + col, y, mask=inside)
        else:
            tl.store(y_ptr + col, tl.zeros((BLOCK_ROWS, BLOCK_COLS), y_ptr.dtype.element_ty), mask=inside)
    # What is hidden is zero in rows of NaN too, where 0 * inverse is not.
    if not WIDE and (CAUSAL or MASK != "none"):
        if tl.max((~(inverse >= 0.0)).to(tl.int32)) > 0:
            tl.debug_barrier()  # other threads of this program may have written what is put right here
            for chunk in tl.static_range(CHUNKS):
                col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
                inside = in_rows & (col < cols)
                zero = tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc)
                if CAUSAL:
                    within = tl.arange(0, BLOCK_COLS)[None, :]
                    hidden = (within < first - chunk * BLOCK_COLS) | (within >= end - chunk * BLOCK_COLS)
                else:
                    _, hidden = _logits(zero, mask_ptr, mask_stride, col, scale, first, end, inside, MASK, CAUSAL, FAST)
                tl.store(y_ptr + col, zero.to(y_ptr.dtype.element_ty), mask=inside & hidden)


@triton.jit(do_not_specialize=["rows", "window"])
def _forward_loop_kernel(
    scores_ptr, mask_ptr, sink_ptr, y_ptr, share_ptr, rows, cols, row_stride, scale: tl.float64,
    size_1, size_2, stride_0, stride_1, stride_2, mask_stride, queries, heads, window, UNIT: tl.constexpr,
    MASK_UNIT: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, FAST: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    cols, row_stride = aligned(cols, UNIT), aligned(row_stride, UNIT)
    row = tl.program_id(0)
    scores_ptr += row.to(tl.int64) * row_stride
    y_ptr += row.to(tl.int64) * cols
    first, end = 0, cols
    begin = 0
    if CAUSAL:
        first, end = visible((row % queries).to(tl.int32), queries, cols, window)
        begin = first // BLOCK_COLS * BLOCK_COLS
    if MASK != "none":
        mask_ptr = _mask_row(mask_ptr, row, size_1, size_2, stride_0, stride_1, stride_2, MASK_UNIT)

    acc: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    top = tl.full((1,), float("-inf"), acc)
    if sink_ptr is not None:
        sink = _sink(sink_ptr, row + tl.arange(0, 1), row < rows, queries, heads, acc, FAST)
        top = sink
    sums = tl.zeros((BLOCK_COLS,), acc)
    for start in range(begin, end, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        loaded = reach(col, first, end, col < cols, ALIGN) if CAUSAL else col < cols
        x = tl.load(scores_ptr + col, mask=loaded, other=0.0)
        z, _ = _logits(x, mask_ptr, mask_stride, col, scale, first, end, loaded, MASK, CAUSAL, FAST)
        new_top = tl.maximum(top, tl.max(z, axis=0, keep_dims=True))
        shift = _shift(new_top)
        sums = sums * _exponential(top - shift, FAST) + _exponential(z - shift, FAST)
        top = new_top
    shift = _shift(top)
    total = tl.sum(sums, axis=0, keep_dims=True)
    if sink_ptr is not None:
        total += _exponential(sink - shift, FAST)
    inverse = _inverse(total)
    if sink_ptr is not None:
        tl.store(share_ptr + row + tl.arange(0, 1), _exponential(sink - shift, FAST) * inverse)

    for start in range(0, begin, BLOCK_COLS):
        tl.store(y_ptr + start + tl.arange(0, BLOCK_COLS), tl.zeros((BLOCK_COLS,), y_ptr.dtype.element_ty))
    for start in range(begin, end, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        loaded = reach(col, first, end, col < cols, ALIGN) if CAUSAL else col < cols
        x = tl.load(scores_ptr + col, mask=loaded, other=0.0)
        z, hidden = _logits(x, mask_ptr, mask_stride, col, scale, first, end, loaded, MASK, CAUSAL, FAST)
        y = tl.where(hidden, 0.0, _exponential(z - shift, FAST) * inverse)
        tl.store(y_ptr + col, y.to(y_ptr.dtype.element_ty), mask=col < cols)
    for start in range(tl.cdiv(end, BLOCK_COLS) * BLOCK_COLS, cols, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        tl.store(y_ptr + col, tl.zeros((BLOCK_COLS,), y_ptr.dtype.element_ty), mask=col < cols)
