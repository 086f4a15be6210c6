"""Rows of logits on chip: softmax, sigmoid, and the choice of experts by integers in the order of their scores.

Columns are padded to whole groups of a power of two; ``column`` says which expert a column is.
"""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import to_acc
from parallel_ops.triton_kernels._math import exp_nonpositive, sigmoid

# Added to sums that are divided by, so that rows whose scores are all zero are defined (DeepSeek-V3).
TINY = tl.constexpr(1e-20)


@triton.jit
def column(SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """The expert of each column: groups of ``SIZE`` experts, each padded to ``PADDED_SIZE``."""
    col = tl.arange(0, BLOCK_COLS)
    if SIZE == PADDED_SIZE:
        return col
    else:
        return col // PADDED_SIZE * SIZE + col % PADDED_SIZE


@triton.jit
def is_expert(experts, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Whether a column is an expert, not padding."""
    col = tl.arange(0, BLOCK_COLS)
    return (col % PADDED_SIZE < SIZE) & (column(SIZE, PADDED_SIZE, BLOCK_COLS) < experts)


@triton.jit
def read_rows(x_ptr, row, there, col, present, stride):
    """Logits, -inf where there is no expert and 0 in rows that are not there."""
    x = to_acc(
        tl.load(
            x_ptr + row.to(tl.int64)[:, None] * stride + col[None, :], mask=there[:, None] & present[None, :], other=0.0
        )
    )
    return tl.where(present[None, :], x, float("-inf"))


@triton.jit
def softmax_rows(x, FAST: tl.constexpr):
    """(softmax, logsumexp) of each row."""
    largest = tl.max(x, axis=1)
    e = exp_nonpositive(x - largest[:, None], FAST)
    total = tl.sum(e, axis=1)
    # As torch.logsumexp: infinity of rows that hold it, NaN of those that hold NaN.
    nan = tl.max((x != x).to(tl.int32), axis=1) > 0  # noqa: PLR0124
    infinite = tl.abs(largest) == float("inf")
    logsumexp = tl.where(infinite & ~nan, largest, largest + tl.log(total))
    return e * (1.0 / total)[:, None], logsumexp


@triton.jit
def scores_of(x, p, SIGMOID: tl.constexpr, FAST: tl.constexpr):
    """(score, derivative of the sigmoid); the softmax without one."""
    if SIGMOID:
        s, slope = sigmoid(x, FAST)
        return s, slope
    else:
        return p, p


@triton.jit
def key_of(score):
    """Scores as integers in their order: NaN counts as infinity, -0 as 0."""
    ordered = tl.where(score != score, float("inf"), score) + 0.0  # noqa: PLR0124
    if score.dtype == tl.float64:
        bits = ordered.to(tl.int64, bitcast=True)
        return tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
    else:
        bits = ordered.to(tl.int32, bitcast=True)
        return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def score_of(key):
    """The score of a key."""
    if key.dtype == tl.int64:
        return tl.where(key < 0, key ^ 0x7FFFFFFFFFFFFFFF, key).to(tl.float64, bitcast=True)
    else:
        return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def out_of(key):
    """A key below all others, in the type of ``key``."""
    if key.dtype == tl.int64:
        return tl.full(key.shape, -0x8000000000000000, tl.int64)
    else:
        return tl.full(key.shape, -0x80000000, tl.int32)


@triton.jit
def first_largest(key, AXIS: tl.constexpr):
    """Where the largest key along the last axis is, as a mask; the first of equal ones."""
    largest = tl.expand_dims(tl.max(key, axis=AXIS), AXIS)
    index = tl.arange(0, key.shape[AXIS])
    for _axis in tl.static_range(AXIS):
        index = tl.expand_dims(index, 0)
    place = tl.where(key == largest, index, key.shape[AXIS])
    return index == tl.expand_dims(tl.min(place, axis=AXIS), AXIS)


@triton.jit
def limit_groups(key, GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Takes out all keys but those of the best groups; a group's score is the sum of its two best."""
    ROWS: tl.constexpr = key.shape[0]
    grouped = tl.reshape(key, (ROWS, GROUPS, PADDED_SIZE))
    first = tl.expand_dims(tl.max(grouped, axis=2), 2)
    rest = tl.where(first_largest(grouped, 2), out_of(grouped), grouped)
    second = tl.expand_dims(tl.max(rest, axis=2), 2)
    of_group = first
    if SIZE > 1:
        # A group that is padding has no two keys, and stays below all.
        of_group = tl.where(second == out_of(second), second, key_of(score_of(first) + score_of(second)))
    of_group = tl.reshape(of_group, (ROWS, GROUPS))
    kept = tl.zeros((ROWS, GROUPS), tl.int32)
    for _ in range(TOP_GROUPS):
        best = first_largest(of_group, 1)
        kept = tl.where(best, 1, kept)
        of_group = tl.where(best, out_of(of_group), of_group)
    return tl.reshape(tl.where(tl.expand_dims(kept, 2) > 0, grouped, out_of(grouped)), key.shape)


@triton.jit
def weights_of_chosen(
    x, scores, chosen, SIGMOID: tl.constexpr, TOP_K_FIRST: tl.constexpr, NORMALIZE: tl.constexpr, FAST: tl.constexpr
):
    """(u, divisor): the weights of the chosen experts are u / divisor; u is 0 elsewhere."""
    if TOP_K_FIRST and not SIGMOID:
        logits = tl.where(chosen, x, float("-inf"))
        u = tl.where(chosen, exp_nonpositive(logits - tl.max(logits, axis=1)[:, None], FAST), 0.0)
        return u, tl.sum(u, axis=1)
    else:
        u = tl.where(chosen, scores, 0.0)
        total = tl.sum(u, axis=1)
        return u, total + TINY if NORMALIZE else tl.full(total.shape, 1.0, total.dtype)
