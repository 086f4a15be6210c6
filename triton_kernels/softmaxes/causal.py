"""What a row of a causal softmax sees, the newest query aligned with the newest key.

A query sees a run of adjacent keys. What it does not see of a chunk is not loaded, but the bounds of the loads are
rounded outwards to ``ALIGN`` elements: a bound inside a 16-byte vector would split every load of the row into single
elements. The exact bounds are applied in registers.
"""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import computed_here


@triton.jit
def visible(query, queries, cols, window):
    """The keys [first, end) that a query sees, the newest query aligned with the newest key."""
    end = query + (cols - queries) + 1
    if window is None:
        return 0, end
    else:
        return tl.maximum(end - window, 0), end


@triton.jit
def seen_by_any(first_row, queries, cols, window, BLOCK_ROWS: tl.constexpr):
    """The keys [first, end) that at least one of a program's rows sees."""
    query = (first_row % queries).to(tl.int32)
    first, end = visible(query, queries, cols, window)
    if BLOCK_ROWS > 1:
        wraps = query + BLOCK_ROWS > queries
        first, end = tl.where(wraps, 0, first), tl.where(wraps, cols, end + BLOCK_ROWS - 1)
    return first, end


@triton.jit
def seen_by_all(first_row, queries, cols, window, BLOCK_ROWS: tl.constexpr):
    """The keys [first, end) that each of a program's rows sees."""
    query = (first_row % queries).to(tl.int32)
    first, end = visible(query, queries, cols, window)
    if BLOCK_ROWS > 1:
        first = tl.where(query + BLOCK_ROWS > queries, cols, visible(query + BLOCK_ROWS - 1, queries, cols, window)[0])
    return first, end


@triton.jit
def reach(col, first, end, inside, ALIGN: tl.constexpr):
    """What is loaded of what is inside: the visible keys, rounded outwards."""
    return inside & (col >= first // ALIGN * ALIGN) & (col < tl.cdiv(end, ALIGN) * ALIGN)


@triton.jit
def hide(values, first, end, all_first, all_end, HIDDEN: tl.constexpr):
    """The values of a chunk, ``HIDDEN`` where a row does not see them; bounds from the chunk's begin."""
    if (all_first > 0) | (all_end < values.shape[1]):
        col = tl.arange(0, values.shape[1])[None, :]
        # Compared here: else once for all uses, ahead of the branch, and kept.
        values = tl.where((col >= first) & (col < computed_here(end)), values, HIDDEN)
    return values
