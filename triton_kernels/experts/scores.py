"""Rows of logits on chip: softmax, sigmoid, and the choice of experts by integers in the order of their scores.

Columns are padded to whole groups of a power of two; ``expert_of`` says which expert a column is.
"""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import to_acc
from parallel_ops.triton_kernels._math import exp_nonpositive, reciprocal, sigmoid

# Added to sums that are divided by, so that rows whose scores are all zero are defined (DeepSeek-V3).
TINY = tl.constexpr(1e-20)


@triton.jit
def expert_of(column, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr):
    """The expert of a column: groups of ``SIZE`` experts, each padded to ``PADDED_SIZE``."""
    if SIZE == PADDED_SIZE:
        return column
    else:
        return column // PADDED_SIZE * SIZE + column % PADDED_SIZE


@triton.jit
def is_expert(column, experts, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr):
    """Whether a column is an expert, not padding."""
    return (column % PADDED_SIZE < SIZE) & (expert_of(column, SIZE, PADDED_SIZE) < experts)


@triton.jit
def read_rows(x_ptr, row, there, col, present, stride, WHOLE: tl.constexpr):
    """Logits, -inf where there is no expert and 0 in rows that are not there."""
    mask = there[:, None] if WHOLE else there[:, None] & present[None, :]
    x = to_acc(tl.load(x_ptr + row.to(tl.int64)[:, None] * stride + col[None, :], mask=mask, other=0.0))
    return x if WHOLE else tl.where(present[None, :], x, float("-inf"))


@triton.jit
def softmax_parts(x, FAST: tl.constexpr):
    """(exponentials, the largest of x, sum of exponentials, logsumexp) of each row."""
    largest = tl.reduce(x, 1, _larger)
    e = exp_nonpositive(x - largest[:, None], FAST)
    total = tl.sum(e, axis=1)
    # As torch.logsumexp: infinity of rows that hold it, NaN of those that hold NaN.
    logsumexp = tl.where(tl.abs(largest) == float("inf"), largest, largest + tl.log(total))
    return e, largest, total, logsumexp


@triton.jit
def _larger(a, b):
    """NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def softmax_rows(x, FAST: tl.constexpr):
    """(softmax, logsumexp) of each row."""
    e, _, total, logsumexp = softmax_parts(x, FAST)
    return e * reciprocal(total, FAST)[:, None], logsumexp


@triton.jit
def scores_of(x, p, SIGMOID: tl.constexpr, FAST: tl.constexpr):
    """(score, derivative of the sigmoid); the softmax without one."""
    if SIGMOID:
        s, slope = sigmoid(x, FAST)
        return s, slope
    else:
        return p, p


@triton.jit
def key_of(score, POSITIVE: tl.constexpr):
    """Scores as integers in their order: NaN counts as infinity, -0 as 0. ``POSITIVE``: none is below 0."""
    ordered = tl.minimum(score, float("inf")) + 0.0
    if score.dtype == tl.float64:
        bits = ordered.to(tl.int64, bitcast=True)
        return bits if POSITIVE else bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        bits = ordered.to(tl.int32, bitcast=True)
        return bits if POSITIVE else bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    """The score of a key."""
    if key.dtype == tl.int64:
        return tl.where(key < 0, key ^ 0x7FFFFFFFFFFFFFFF, key).to(tl.float64, bitcast=True)
    else:
        return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def out_of(key):
    """A key below those of all scores, in the type of ``key``: of what is not to be chosen."""
    if key.dtype == tl.int64:
        return tl.full(key.shape, -0x8000000000000000, tl.int64)
    else:
        return tl.full(key.shape, -0x80000000, tl.int32)


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


@triton.jit
def add_choice(of_weights, chosen, experts_ptr, grad_weights_ptr, slot, there, col):
    """Adds a choice of each row: its expert's gradient, and that it was chosen."""
    expert = tl.load(experts_ptr + slot, mask=there, other=0).to(tl.int32)
    grad = tl.load(grad_weights_ptr + slot, mask=there, other=0.0)
    here = col[None, :] == expert[:, None]
    return tl.where(here, grad[:, None], of_weights), chosen | here
