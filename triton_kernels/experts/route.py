"""The router: a tile of rows in registers, from logits to choice and weights; its sums; and the gradient."""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import (
    ROW_SPLITS,
    aligned,
    as_rows,
    cdiv,
    next_power_of_2,
    partial_sums,
    quotient,
    scratch,
    unit_of,
)
from parallel_ops.triton_kernels._launch import launch
from parallel_ops.triton_kernels.experts.scores import (
    TINY,
    column,
    first_largest,
    is_expert,
    key_of,
    limit_groups,
    out_of,
    read_rows,
    scores_of,
    softmax_rows,
    weights_of_chosen,
)

# Logits of a thread; the forward has seven numbers for each of them in registers. Its programs are few, since each
# leaves a sum over its rows for every expert, and therefore have many warps.
ELEMENTS = 8
FORWARD_WARPS = 16
# Choices whose numbers the backward loads all at once; more take turns.
UNROLLED = 16
BACKWARD_WARPS = 4


def forward(
    logits: Tensor, bias: Tensor | None, weights: Tensor, score_sums: Tensor, z_sum: Tensor, experts: Tensor,
    load: Tensor, *, sigmoid: bool, groups: int, top_groups: int, top_k_first: bool, normalize: bool, scale: float,
) -> None:  # fmt: skip
    """Fills all outputs, which are contiguous."""
    x, rows, cols, stride = as_rows(logits)
    groups, top_groups = (groups, top_groups) if top_groups < groups else (1, 1)
    size = cols // groups
    padded = next_power_of_2(size)
    block_cols = padded * next_power_of_2(groups)
    block_rows, warps = _tile(block_cols, FORWARD_WARPS, rows)
    splits = max(1, min(ROW_SPLITS, cdiv(rows, block_rows)))
    blocks = cdiv(rows, splits * block_rows)
    # Sums of probabilities and of z, and counts, of each program's rows.
    sums, counts, z = partial_sums(cols, weights, splits), scratch(load, splits, cols), scratch(weights, splits)
    launch(
        _forward_kernel, (splits,),
        x, None if bias is None else bias.contiguous(), weights, experts, sums, counts, z, rows, cols, blocks, stride,
        weights.shape[1], scale,
        SIGMOID=sigmoid, TOP_K_FIRST=top_k_first, NORMALIZE=normalize,
        GROUPS=next_power_of_2(groups), TOP_GROUPS=top_groups, SIZE=size, PADDED_SIZE=padded,
        UNIT=unit_of(cols, stride), BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=warps,
    )  # fmt: skip
    block = 32
    launch(
        _sums_kernel, (cdiv(cols, block),),
        sums, counts, z, score_sums, load, z_sum, splits, cols,
        BLOCK_SPLITS=ROW_SPLITS, BLOCK_COLS=block, num_warps=4,
    )  # fmt: skip


def backward(
    logits: Tensor, experts: Tensor, grad_weights: Tensor | None, grad_score_sums: Tensor | None,
    grad_z_sum: Tensor | None, out: Tensor, *, sigmoid: bool, top_k_first: bool, normalize: bool, scale: float,
) -> None:  # fmt: skip
    """The gradient of the logits, in ``out``, which is contiguous."""
    x, rows, cols, stride = as_rows(logits)
    if rows == 0:
        return
    block_cols = next_power_of_2(cols)
    block_rows, warps = _tile(block_cols, BACKWARD_WARPS, rows)
    launch(
        _backward_kernel, (cdiv(rows, block_rows),),
        x, experts, _contiguous(grad_weights), _contiguous(grad_score_sums), grad_z_sum, out, rows, cols, stride,
        scale,
        TOP_K=experts.shape[1], UNROLLED=experts.shape[1] <= UNROLLED,
        SIGMOID=sigmoid, TOP_K_FIRST=top_k_first, NORMALIZE=normalize,
        UNIT=unit_of(cols, stride), BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=warps,
    )  # fmt: skip


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _tile(block_cols: int, most_warps: int, rows: int) -> tuple[int, int]:
    """(rows, warps) of a tile; fewer warps where there are few rows or few columns."""
    warps = most_warps
    while warps > 1 and 32 * (warps // 2) * ELEMENTS >= next_power_of_2(max(rows, 1)) * block_cols:
        warps //= 2
    return max(1, 32 * warps * ELEMENTS // block_cols), warps


@triton.jit(do_not_specialize=["top_k", "scale"])
def _forward_kernel(
    x_ptr, bias_ptr, weights_ptr, experts_ptr, sums_ptr, counts_ptr, z_ptr, rows, cols, blocks, stride,
    top_k, scale: tl.float64,
    SIGMOID: tl.constexpr, TOP_K_FIRST: tl.constexpr, NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    fast: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    program = tl.program_id(0)
    cols = aligned(cols, UNIT)
    stride = aligned(stride, UNIT)
    col = column(SIZE, PADDED_SIZE, BLOCK_COLS)
    present = is_expert(cols, SIZE, PADDED_SIZE, BLOCK_COLS)
    acc: tl.constexpr = sums_ptr.dtype.element_ty
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc)
    counts = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.int32)
    zs = tl.zeros((BLOCK_ROWS,), acc)
    for block in range(program * blocks, (program + 1) * blocks):
        row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        there = row < rows
        x = read_rows(x_ptr, row, there, col, present, stride)
        p, logsumexp = softmax_rows(x, fast)
        scores = scores_of(x, p, SIGMOID, fast)[0]
        probability = p
        if SIGMOID:
            probability = scores * (1.0 / (tl.sum(scores, axis=1) + TINY))[:, None]
        sums += tl.where(there[:, None], probability, 0.0)
        zs += tl.where(there, logsumexp * logsumexp, 0.0)

        choice = x if TOP_K_FIRST else scores
        if bias_ptr is not None:
            choice += tl.load(bias_ptr + col, mask=present, other=0.0).to(acc)[None, :]
        key = key_of(choice)
        key = tl.where(present[None, :], key, out_of(key))
        if TOP_GROUPS < GROUPS:
            key = limit_groups(key, TOP_GROUPS, GROUPS, PADDED_SIZE, SIZE)
        rank = tl.full((BLOCK_ROWS, BLOCK_COLS), -1, tl.int32)
        for j in range(top_k):
            best = first_largest(key, 1)
            rank = tl.where(best, j, rank)
            key = tl.where(best, out_of(key), key)
        chosen = rank >= 0
        u, divisor = weights_of_chosen(x, scores, chosen, SIGMOID, TOP_K_FIRST, NORMALIZE, fast)
        weights = u * quotient(tl.cast(scale, acc), divisor)[:, None]
        place = row.to(tl.int64)[:, None] * top_k + rank
        mask = chosen & there[:, None]
        tl.store(weights_ptr + place, weights, mask=mask)
        tl.store(experts_ptr + place, tl.broadcast_to(col.to(tl.int64)[None, :], place.shape), mask=mask)
        counts += mask.to(tl.int32)
    out = program * cols + col
    tl.store(sums_ptr + out, tl.sum(sums, axis=0), mask=present)
    tl.store(counts_ptr + out, tl.sum(counts, axis=0), mask=present)
    tl.store(z_ptr + program, tl.sum(zs, axis=0))


@triton.jit
def _sums_kernel(
    sums_ptr, counts_ptr, z_ptr, score_sums_ptr, load_ptr, z_sum_ptr, splits, cols,
    BLOCK_SPLITS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Adds what the programs left, in a fixed order."""
    split = tl.arange(0, BLOCK_SPLITS)
    col = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (split < splits)[:, None] & (col < cols)[None, :]
    place = split[:, None] * cols + col[None, :]
    tl.store(score_sums_ptr + col, tl.sum(tl.load(sums_ptr + place, mask=mask, other=0.0), axis=0), mask=col < cols)
    tl.store(load_ptr + col, tl.sum(tl.load(counts_ptr + place, mask=mask, other=0), axis=0), mask=col < cols)
    if tl.program_id(0) == 0:
        tl.store(z_sum_ptr, tl.sum(tl.load(z_ptr + split, mask=split < splits, other=0.0), axis=0))


@triton.jit
def _choose(of_weights, chosen, experts_ptr, grad_weights_ptr, slot, there, col):
    """Adds a choice of each row: its expert's gradient, and that it was chosen."""
    expert = tl.load(experts_ptr + slot, mask=there, other=0).to(tl.int32)
    grad = tl.load(grad_weights_ptr + slot, mask=there, other=0.0)
    here = col[None, :] == expert[:, None]
    return tl.where(here, grad[:, None], of_weights), chosen | here


@triton.jit(do_not_specialize=["scale"])
def _backward_kernel(
    x_ptr, experts_ptr, grad_weights_ptr, grad_sums_ptr, grad_z_ptr, dx_ptr, rows, cols, stride,
    scale: tl.float64,
    TOP_K: tl.constexpr, UNROLLED: tl.constexpr,
    SIGMOID: tl.constexpr, TOP_K_FIRST: tl.constexpr, NORMALIZE: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    fast: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    cols = aligned(cols, UNIT)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_COLS)
    there, present = row < rows, col < cols
    x = read_rows(x_ptr, row, there, col, present, aligned(stride, UNIT))
    p, logsumexp = softmax_rows(x, fast)
    scores, slope = scores_of(x, p, SIGMOID, fast)
    gradient = tl.zeros_like(x)  # of the probabilities or scores
    dx = tl.zeros_like(x)
    if grad_sums_ptr is not None:
        of_sums = tl.load(grad_sums_ptr + col, mask=present, other=0.0)[None, :]
        if SIGMOID:
            inverse = 1.0 / (tl.sum(scores, axis=1) + TINY)
            common = tl.sum(scores * of_sums, axis=1) * inverse
            gradient = (of_sums - common[:, None]) * inverse[:, None]
        else:
            gradient = of_sums - tl.sum(p * of_sums, axis=1)[:, None]
    if grad_weights_ptr is not None:
        of_weights = tl.zeros_like(x)
        chosen = tl.zeros(x.shape, tl.int32) > 0
        slot = row.to(tl.int64) * TOP_K
        if UNROLLED:
            for j in tl.static_range(TOP_K):
                of_weights, chosen = _choose(of_weights, chosen, experts_ptr, grad_weights_ptr, slot + j, there, col)
        else:
            for j in range(TOP_K):
                of_weights, chosen = _choose(of_weights, chosen, experts_ptr, grad_weights_ptr, slot + j, there, col)
        u, divisor = weights_of_chosen(x, scores, chosen, SIGMOID, TOP_K_FIRST, NORMALIZE, fast)
        factor = quotient(tl.cast(scale, x.dtype), divisor)
        if NORMALIZE or (TOP_K_FIRST and not SIGMOID):
            of_weights -= (tl.sum(of_weights * u, axis=1) / divisor)[:, None]
        du = tl.where(chosen, of_weights * factor[:, None], 0.0)
        if SIGMOID:
            gradient += du
        elif TOP_K_FIRST:
            dx = u * du
        else:
            gradient += du - tl.sum(p * du, axis=1)[:, None]
    if SIGMOID:
        dx += slope * gradient
    else:
        dx += p * gradient
    if grad_z_ptr is not None:
        dx += p * (2.0 * logsumexp * tl.load(grad_z_ptr))[:, None]
    place = row.to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=there[:, None] & present[None, :])
