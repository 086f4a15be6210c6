"""The kernels behind both softmaxes: whole rows on chip where they fit, else two walks over each row.

Rows of up to ``MAX_ROW`` bytes are loaded once, in chunks that stay in registers, several short rows to a program.
Longer ones are walked twice, first for maximum and sum (online: one exp per element, rescaling the sums when the
maximum grows; Milakov and Gimelshein, arXiv:1805.02867), then to write.

Masks come as broadcast strides, never expanded. With CAUSAL, chunks that no query of a program sees cost a store of
zeros. Within a chunk, what a query does not see is not loaded: the bounds of the loads are rounded outwards to
``ALIGN`` elements, because a bound inside a 16-byte vector would split every load of the row into single elements, and
the exact bounds are applied in registers.

A sink is one more logit of every row of a head, whose probability is in no output.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import (
    aligned,
    as_rows,
    cdiv,
    computed_here,
    next_power_of_2,
    quotient,
    reread,
    to_acc,
    unit_of,
)
from parallel_ops.triton_kernels._launch import launch
from parallel_ops.triton_kernels._math import exp_nonpositive

# The longest row kept on chip, in bytes: 64 registers a thread at 16 warps.
MAX_ROW = 128 * 1024
# The longest row that is kept in fp32 once it is loaded, in elements, and the longest beside a mask: longer ones wait
# as they came, and the mask, needed again for each use of them, has no place beside them.
MAX_WIDE = 16384
# Elements of a chunk that a warp takes: one 16-byte load of bf16 a thread; and chunks of a row of up to MAX_WIDE
# elements, by CAUSAL: more where they may be left out.
WARP_CHUNK = 256
MAX_CHUNKS = {False: 4, True: 8}
# Columns under which a row is one chunk, and elements that a program of wider rows takes at least.
MIN_CHUNKED = 512
MIN_TILE = 4096
# Elements in 32 bytes of bf16, the smallest piece that memory moves; of fp32, in two.
ALIGN = 16
# Columns per step beyond MAX_ROW, and warps: 16 elements a thread beside as many running sums.
LOOP_BLOCK = 4096
LOOP_WARPS = 8

# Sizes and strides of a mask that is not there.
NO_MASK = (1, 1, 0, 0, 0, 0)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _visible(query, queries, cols, window):
    """The keys [first, end) that a query sees, the newest query aligned with the newest key."""
    end = query + (cols - queries) + 1
    return tl.maximum(end - window, 0), end


@triton.jit
def _seen_by_any(first_row, queries, cols, window, BLOCK_ROWS: tl.constexpr):
    """The keys [first, end) that at least one of a program's rows sees."""
    query = (first_row % queries).to(tl.int32)
    first, end = _visible(query, queries, cols, window)
    if BLOCK_ROWS > 1:
        wraps = query + BLOCK_ROWS > queries
        first, end = tl.where(wraps, 0, first), tl.where(wraps, cols, end + BLOCK_ROWS - 1)
    return first, end


@triton.jit
def _seen_by_all(first_row, queries, cols, window, BLOCK_ROWS: tl.constexpr):
    """The keys [first, end) that each of a program's rows sees."""
    query = (first_row % queries).to(tl.int32)
    first, end = _visible(query, queries, cols, window)
    if BLOCK_ROWS > 1:
        first = tl.where(query + BLOCK_ROWS > queries, cols, _visible(query + BLOCK_ROWS - 1, queries, cols, window)[0])
    return first, end


@triton.jit
def _reach(col, first, end, inside, ALIGN: tl.constexpr):
    """What is loaded of what is inside: the visible keys, rounded outwards."""
    return inside & (col >= first // ALIGN * ALIGN) & (col < tl.cdiv(end, ALIGN) * ALIGN)


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
def _triangle(x, scale, first, end, all_first, all_end, FAST: tl.constexpr):
    """The logits of a chunk by what each row sees of it, and by what all see; hidden ones are -inf."""
    z = to_acc(x)
    z = z * _in_base(tl.cast(scale, z.dtype), FAST)
    if (all_first > 0) | (all_end < x.shape[1]):
        col = tl.arange(0, x.shape[1])[None, :]
        z = tl.where((col >= first) & (col < end), z, float("-inf"))
    return z


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


@triton.jit(do_not_specialize=["window"])
def _forward_kernel(
    scores_ptr, mask_ptr, sink_ptr, y_ptr, share_ptr, rows, cols, row_stride, scale: tl.float64,
    size_1, size_2, stride_0, stride_1, stride_2, mask_stride, queries, heads, window, UNIT: tl.constexpr,
    MASK_UNIT: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, FAST: tl.constexpr, ALIGN: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    cols, row_stride = aligned(cols, UNIT), aligned(row_stride, UNIT)
    first_row = tl.program_id(0).to(rows.dtype) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    in_rows = row < rows
    scores_ptr += row.to(tl.int64) * row_stride
    y_ptr += row.to(tl.int64) * cols
    first, end, any_first, any_end = 0, cols, 0, CHUNKS * BLOCK_COLS
    if CAUSAL:
        first, end = _visible((row % queries).to(tl.int32), queries, cols, window)
        any_first, any_end = _seen_by_any(first_row, queries, cols, window, BLOCK_ROWS)
        all_first, all_end = _seen_by_all(first_row, queries, cols, window, BLOCK_ROWS)
    if MASK != "none":
        mask_ptr = _mask_row(mask_ptr, row, size_1, size_2, stride_0, stride_1, stride_2, MASK_UNIT)
    acc: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32

    xs = ()
    for chunk in tl.static_range(CHUNKS):
        col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
        loaded = in_rows & (col < cols)
        if CAUSAL:
            loaded = _reach(col, first, end, loaded, ALIGN)
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
                z = _triangle(xs[chunk], scale, first - start, end - start, all_first - start, all_end - start, FAST)
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
            z = zs[chunk]
            if CAUSAL:
                start = chunk * BLOCK_COLS
                z = _triangle(reread(z), scale, first - start, end - start, all_first - start, all_end - start, FAST)
            elif WIDE:  # and no mask
                inside = in_rows & (col < cols)
                z, _ = _logits(reread(z), mask_ptr, mask_stride, col, scale, first, end, inside, MASK, CAUSAL, FAST)
            e = _exponential(z - shift, FAST)
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
    if not WIDE and (CAUSAL or MASK != "none"):  # noqa: SIM102  (the first is decided when this is compiled)
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


@triton.jit(do_not_specialize=["window"])
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
        first, end = _visible((row % queries).to(tl.int32), queries, cols, window)
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
        loaded = _reach(col, first, end, col < cols, ALIGN) if CAUSAL else col < cols
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
        loaded = _reach(col, first, end, col < cols, ALIGN) if CAUSAL else col < cols
        x = tl.load(scores_ptr + col, mask=loaded, other=0.0)
        z, hidden = _logits(x, mask_ptr, mask_stride, col, scale, first, end, loaded, MASK, CAUSAL, FAST)
        y = tl.where(hidden, 0.0, _exponential(z - shift, FAST) * inverse)
        tl.store(y_ptr + col, y.to(y_ptr.dtype.element_ty), mask=col < cols)
    for start in range(tl.cdiv(end, BLOCK_COLS) * BLOCK_COLS, cols, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        tl.store(y_ptr + col, tl.zeros((BLOCK_COLS,), y_ptr.dtype.element_ty), mask=col < cols)


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


@triton.jit(do_not_specialize=["window"])
def _backward_kernel(
    grad_ptr, y_ptr, share_ptr, dx_ptr, sink_grad_ptr, rows, cols, grad_stride, y_stride, scale: tl.float64,
    queries, window, UNIT: tl.constexpr, CAUSAL: tl.constexpr, ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    cols, grad_stride, y_stride = aligned(cols, UNIT), aligned(grad_stride, UNIT), aligned(y_stride, UNIT)
    first_row = tl.program_id(0).to(rows.dtype) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    in_rows = row < rows
    grad_ptr += row.to(tl.int64) * grad_stride
    y_ptr += row.to(tl.int64) * y_stride
    dx_ptr += row.to(tl.int64) * cols
    first, end, any_first, any_end = 0, cols, 0, cols
    if CAUSAL:
        first, end = _visible((row % queries).to(tl.int32), queries, cols, window)
        any_first, any_end = _seen_by_any(first_row, queries, cols, window, BLOCK_ROWS)
    acc: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32

    grads = ()
    ys = ()
    for chunk in tl.static_range(CHUNKS):
        col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
        loaded = in_rows & (col < cols)
        if CAUSAL:
            loaded = _reach(col, first, end, loaded, ALIGN)
        grads += (tl.load(grad_ptr + col, mask=loaded, other=0.0),)
        ys += (tl.load(y_ptr + col, mask=loaded, other=0.0),)
    weighted = tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc)
    totals = tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc)
    for chunk in tl.static_range(CHUNKS):
        if (chunk * BLOCK_COLS < any_end) & ((chunk + 1) * BLOCK_COLS > any_first):
            col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
            grad, y = to_acc(grads[chunk]), to_acc(ys[chunk])
            if CAUSAL:
                grad = tl.where((col >= first) & (col < end), grad, 0.0)
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


@triton.jit(do_not_specialize=["window"])
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
        first, end = _visible((row % queries).to(tl.int32), queries, cols, window)
        begin = first // BLOCK_COLS * BLOCK_COLS

    acc: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    weighted = tl.zeros((BLOCK_COLS,), acc)
    totals = tl.zeros((BLOCK_COLS,), acc)
    for start in range(begin, end, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        loaded = _reach(col, first, end, col < cols, ALIGN) if CAUSAL else col < cols
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
        loaded = _reach(col, first, end, col < cols, ALIGN) if CAUSAL else col < cols
        grad = to_acc(tl.load(grad_ptr + col, mask=loaded, other=0.0))
        y = to_acc(tl.load(y_ptr + col, mask=loaded, other=0.0))
        dx = _gradient(grad, y, mean, scale)
        tl.store(dx_ptr + col, dx.to(dx_ptr.dtype.element_ty), mask=col < cols)
    for start in range(tl.cdiv(end, BLOCK_COLS) * BLOCK_COLS, cols, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        tl.store(dx_ptr + col, tl.zeros((BLOCK_COLS,), dx_ptr.dtype.element_ty), mask=col < cols)


def tile(cols: int, causal: bool) -> dict[str, int]:
    """Rows and columns of a chunk, chunks of a row, and warps, for rows that fit on chip."""
    padded = max(8, next_power_of_2(cols))
    if padded < MIN_CHUNKED:
        return {"BLOCK_ROWS": 4 * WARP_CHUNK // padded, "BLOCK_COLS": padded, "CHUNKS": 1, "num_warps": 4}
    chunks = MAX_CHUNKS[causal]
    num_warps = min(16, max(MIN_TILE // (chunks * WARP_CHUNK), padded // (chunks * WARP_CHUNK)))
    block_cols = min(padded // chunks, num_warps * WARP_CHUNK)
    if padded > MAX_WIDE:
        block_cols = num_warps * WARP_CHUNK
    return {
        "BLOCK_ROWS": num_warps * WARP_CHUNK // block_cols,
        "BLOCK_COLS": block_cols,
        "CHUNKS": cdiv(cols, block_cols),
        "num_warps": num_warps,
    }


def launch_forward(
    scores: Tensor, mask: Tensor | None, mask_layout: tuple[int, ...], sink: Tensor | None, y: Tensor, share: Tensor,
    scale: float, *, kind: str, causal: bool, window: int | None = None,
) -> None:  # fmt: skip
    """Scores as rows, the mask as sizes and strides over them; ``y`` is contiguous.

    ``sink`` has one element or one for each head, the last dimension but two; ``share`` gets each row's probability of
    it.
    """
    scores, rows, cols, stride = as_rows(scores)
    queries, heads, window = _sizes(y, sink, causal, window)
    args = (scores, mask, sink, y, share, rows, cols, stride, scale, *mask_layout, queries, heads, window)
    units = {"UNIT": unit_of(cols, stride), "MASK_UNIT": unit_of(*mask_layout[2:5])}
    flags = {**units, "MASK": kind, "CAUSAL": causal, "FAST": y.dtype.itemsize == 2}
    if cols * y.dtype.itemsize > MAX_ROW or (kind != "none" and cols > MAX_WIDE):
        launch(_forward_loop_kernel, (rows,), *args, **flags, ALIGN=ALIGN, BLOCK_COLS=LOOP_BLOCK, num_warps=LOOP_WARPS)
        return
    config = tile(cols, causal)
    grid = (cdiv(rows, config["BLOCK_ROWS"]),)
    launch(_forward_kernel, grid, *args, **flags, ALIGN=ALIGN, WIDE=cols > MAX_WIDE, **config)


def launch_backward(
    grad: Tensor, y: Tensor, share: Tensor | None, dx: Tensor, sink_grad: Tensor | None, scale: float, *,
    causal: bool, window: int | None = None,
) -> None:  # fmt: skip
    """``dx = scale * y * (grad - mean)``, and each row's gradient of its sink; ``dx`` is contiguous."""
    if y.numel() == 0:
        return
    grad, rows, cols, grad_stride = as_rows(grad)
    y, _, _, y_stride = as_rows(y)
    queries, _, window = _sizes(dx, None, causal, window)
    args = (grad, y, share, dx, sink_grad, rows, cols, grad_stride, y_stride, scale, queries, window)
    flags = {"UNIT": unit_of(cols, grad_stride, y_stride), "CAUSAL": causal, "ALIGN": ALIGN}
    if 2 * cols * y.dtype.itemsize > MAX_ROW:
        launch(_backward_loop_kernel, (rows,), *args, **flags, BLOCK_COLS=LOOP_BLOCK, num_warps=LOOP_WARPS)
        return
    config = tile(cols, causal)
    launch(_backward_kernel, (cdiv(rows, config["BLOCK_ROWS"]),), *args, **flags, **config)


def _sizes(t: Tensor, sink: Tensor | None, causal: bool, window: int | None) -> tuple[int, int, int]:
    """Queries per matrix, heads, and the window, which is the whole row where there is none."""
    if not causal and sink is None:
        return 1, 1, 1
    heads = 1 if sink is None else sink.numel()
    return t.shape[-2], heads, t.shape[-1] if window is None else min(window, t.shape[-1])
