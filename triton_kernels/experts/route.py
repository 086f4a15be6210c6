"""The router: a tile of rows in registers, from logits to choice and weights; its sums; and the gradient."""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import (
    ROW_SPLITS,
    aligned,
    as_rows,
    cdiv,
    contiguous,
    next_power_of_2,
    partial_sums,
    quotient,
    scratch,
    to_acc,
    unit_of,
)
from parallel_ops.triton_kernels._finish import arrive, counter, wait_for_workers
from parallel_ops.triton_kernels._launch import launch, remembered
from parallel_ops.triton_kernels._math import exp_nonpositive, reciprocal, sigmoid
from parallel_ops.triton_kernels.experts.choice import (
    best_groups,
    by_part,
    columns_of,
    first_of,
    parts_of,
    sorted_parts,
    without_first,
)
from parallel_ops.triton_kernels.experts.scores import (
    TINY,
    add_choice,
    expert_of,
    is_expert,
    key_of,
    out_of,
    read_rows,
    scores_of,
    softmax_parts,
    softmax_rows,
    weights_of_chosen,
)

# Logits of a thread; the forward has seven numbers for each of them in registers. Its programs are few, since each
# leaves a sum over its rows for every expert, and therefore have many warps.
ELEMENTS = 8
FORWARD_WARPS = 16
# Adjacent keys that a thread sorts.
DEPTH = 8
# Experts of which a program adds what all programs left.
FINISH_COLS = 32
# Choices that are made one by one without a loop, and whose numbers the backward loads all at once.
UNROLLED = 16
BACKWARD_WARPS = 4


@remembered
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
    top_k = weights.shape[1]
    splits = max(1, min(ROW_SPLITS, cdiv(rows, block_rows)))
    blocks = cdiv(rows, splits * block_rows)
    # Sums of probabilities and of z, and counts, of each program's rows.
    sums, counts, z = partial_sums(cols, weights, splits), scratch(load, splits, cols), scratch(weights, splits)
    launch(
        _forward_kernel, (splits + cdiv(cols, FINISH_COLS),),
        x, None if bias is None else bias.contiguous(), weights, experts, sums, counts, z, score_sums, load, z_sum,
        counter(logits.device), splits, rows, cols, blocks, stride, scale,
        TOP_K=top_k, BLOCK_TOP_K=next_power_of_2(top_k), UNROLLED=top_k <= UNROLLED, DEPTH=min(DEPTH, padded),
        SIGMOID=sigmoid, TOP_K_FIRST=top_k_first, NORMALIZE=normalize,
        GROUPS=next_power_of_2(groups), TOP_GROUPS=top_groups, SIZE=size, PADDED_SIZE=padded,
        UNIT=unit_of(cols, stride), BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
        WHOLE=block_cols == cols, SPLITS=ROW_SPLITS, FINISH_COLS=FINISH_COLS, num_warps=warps,
    )  # fmt: skip


@remembered
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
        x, experts, contiguous(grad_weights), contiguous(grad_score_sums), grad_z_sum, out, rows, cols, stride,
        scale,
        TOP_K=experts.shape[1], UNROLLED=experts.shape[1] <= UNROLLED,
        SIGMOID=sigmoid, TOP_K_FIRST=top_k_first, NORMALIZE=normalize,
        UNIT=unit_of(cols, stride), BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=warps,
    )  # fmt: skip


def _tile(block_cols: int, most_warps: int, rows: int) -> tuple[int, int]:
    """(rows, warps) of a tile; fewer warps where there are few rows or few columns."""
    warps = most_warps
    while warps > 1 and 32 * (warps // 2) * ELEMENTS >= next_power_of_2(max(rows, 1)) * block_cols:
        warps //= 2
    return max(1, 32 * warps * ELEMENTS // block_cols), warps


@triton.jit(do_not_specialize=["scale"])
def _forward_kernel(
    x_ptr, bias_ptr, weights_ptr, experts_ptr, sums_ptr, counts_ptr, z_ptr, score_sums_ptr, load_ptr, z_sum_ptr,
    counter_ptr, workers, rows, cols, blocks, stride, scale: tl.float64,
    TOP_K: tl.constexpr, BLOCK_TOP_K: tl.constexpr, UNROLLED: tl.constexpr, DEPTH: tl.constexpr,
    SIGMOID: tl.constexpr, TOP_K_FIRST: tl.constexpr, NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, WHOLE: tl.constexpr,
    SPLITS: tl.constexpr, FINISH_COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program >= workers:
        _finish(
            sums_ptr, counts_ptr, z_ptr, score_sums_ptr, load_ptr, z_sum_ptr, counter_ptr, workers, cols,
            SPLITS, FINISH_COLS,
        )  # fmt: skip
        return
    fast: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    cols = aligned(cols, UNIT)
    stride = aligned(stride, UNIT)
    column = tl.arange(0, BLOCK_COLS)
    present, col = is_expert(column, cols, SIZE, PADDED_SIZE), expert_of(column, SIZE, PADDED_SIZE)
    acc: tl.constexpr = sums_ptr.dtype.element_ty
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc)
    counts = ()
    for _part in tl.static_range(DEPTH):
        counts += (tl.zeros((BLOCK_ROWS, BLOCK_COLS // DEPTH), tl.int32),)
    zs = tl.zeros((BLOCK_ROWS,), acc)
    for block in tl.range(program * blocks, (program + 1) * blocks, num_stages=2):
        row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        there = row < rows
        x = read_rows(x_ptr, row, there, col, present, stride, WHOLE)
        e, largest, total, logsumexp = softmax_parts(x, fast)
        if SIGMOID:
            scores = sigmoid(x, fast)[0]
            # Rounded correctly: it is an error of the whole row, and so of every sum.
            factor = tl.where(there, quotient(tl.cast(1.0, acc), tl.sum(scores, axis=1) + TINY), 0.0)
            sums = tl.fma(scores, tl.broadcast_to(factor[:, None], scores.shape), sums)
        else:
            factor = tl.where(there, reciprocal(total, fast), 0.0)
            scores = e * factor[:, None]
            sums += scores
        zs += tl.where(there, logsumexp * logsumexp, 0.0)

        choice = x if TOP_K_FIRST else scores
        if bias_ptr is not None:
            choice += tl.load(bias_ptr + col, mask=present, other=0.0).to(acc)[None, :]
        key = key_of(choice, bias_ptr is None and not TOP_K_FIRST)
        if not WHOLE:
            key = tl.where(present[None, :], key, out_of(key))
        parts = parts_of(key, DEPTH)
        columns = columns_of(parts, DEPTH)
        # The two best of each part make the score of a group.
        keys, places = sorted_parts(parts, columns, DEPTH, max(TOP_K, 2) if TOP_GROUPS < GROUPS else TOP_K)
        allowed = there[:, None]
        if TOP_GROUPS < GROUPS:
            kept = by_part(best_groups(keys, places, TOP_GROUPS, GROUPS), PADDED_SIZE // DEPTH) > 0
            keys = (tl.where(kept, keys[0], out_of(keys[0])),) + keys[1:]
            allowed = allowed & kept

        slot = tl.arange(0, BLOCK_TOP_K)
        mask = there[:, None] & (slot < TOP_K)[None, :]
        out = row.to(tl.int64) * TOP_K
        if UNROLLED:
            # Four places in a number, so that few numbers go to the threads that weigh them.
            expert = tl.zeros((BLOCK_ROWS, BLOCK_TOP_K), tl.int32)
            for first in tl.static_range(0, TOP_K, 4):
                four = tl.zeros((BLOCK_ROWS,), tl.int64)
                for j in tl.static_range(first, min(first + 4, TOP_K)):
                    best, place = first_of(keys, places)
                    four |= place.to(tl.int64) << (16 * (j - first))
                    keys, places = without_first(keys, places, place, DEPTH, TOP_K - j)
                unpacked = four[:, None] >> ((slot % 4) * 16)[None, :]
                expert = tl.where((slot // 4 == first // 4)[None, :], (unpacked & 0xFFFF).to(tl.int32), expert)
            expert = expert_of(expert, SIZE, PADDED_SIZE)
            tl.store(experts_ptr + out[:, None] + slot[None, :], expert.to(tl.int64), mask=mask)
        else:
            best, place = first_of(keys, places)
            for j in range(TOP_K):
                best, place = first_of(keys, places)
                tl.store(experts_ptr + out + j, expert_of(place, SIZE, PADDED_SIZE).to(tl.int64), mask=there)
                keys, places = without_first(keys, places, place, DEPTH, DEPTH + 1)
            tl.debug_barrier()  # other threads read them
            expert = tl.load(experts_ptr + out[:, None] + slot[None, :], mask=mask, other=0).to(tl.int32)
        # The chosen ones are those down to the last choice.
        new_counts = ()
        for part in tl.static_range(DEPTH):
            chosen = (parts[part] > best[:, None]) | (
                (parts[part] == best[:, None]) & (columns[part] <= place[:, None])
            )
            new_counts += (counts[part] + (chosen & allowed).to(tl.int32),)
        counts = new_counts

        x = to_acc(tl.load(x_ptr + row.to(tl.int64)[:, None] * stride + expert, mask=mask, other=0.0))
        scores = sigmoid(x, fast)[0] if SIGMOID else exp_nonpositive(x - largest[:, None], fast) * factor[:, None]
        u, divisor = weights_of_chosen(x, scores, mask, SIGMOID, TOP_K_FIRST, NORMALIZE, fast)
        weights = u * quotient(tl.cast(scale, acc), divisor)[:, None]
        tl.store(weights_ptr + out[:, None] + slot[None, :], weights, mask=mask)
    tl.store(sums_ptr + program * cols + col, tl.sum(sums, axis=0), mask=present)
    for part in tl.static_range(DEPTH):
        of_part = tl.arange(0, BLOCK_COLS // DEPTH) * DEPTH + part
        mask = is_expert(of_part, cols, SIZE, PADDED_SIZE)
        place = counts_ptr + program * cols + expert_of(of_part, SIZE, PADDED_SIZE)
        tl.store(place, tl.sum(counts[part], axis=0), mask=mask)
    tl.store(z_ptr + program, tl.sum(zs, axis=0))
    arrive(counter_ptr)


@triton.jit
def _finish(
    sums_ptr, counts_ptr, z_ptr, score_sums_ptr, load_ptr, z_sum_ptr, counter_ptr, workers, cols,
    SPLITS: tl.constexpr, FINISH_COLS: tl.constexpr,
):  # fmt: skip
    """Adds what the programs left, of some experts."""
    wait_for_workers(counter_ptr, workers)
    split, block = tl.arange(0, SPLITS), tl.program_id(0) - workers
    col = block * FINISH_COLS + tl.arange(0, FINISH_COLS)
    mask = (split < workers)[:, None] & (col < cols)[None, :]
    place = split[:, None] * cols + col[None, :]
    tl.store(score_sums_ptr + col, tl.sum(tl.load(sums_ptr + place, mask=mask, other=0.0), axis=0), mask=col < cols)
    tl.store(load_ptr + col, tl.sum(tl.load(counts_ptr + place, mask=mask, other=0), axis=0), mask=col < cols)
    if block == 0:
        tl.store(z_sum_ptr, tl.sum(tl.load(z_ptr + split, mask=split < workers, other=0.0), axis=0))


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
    x = read_rows(x_ptr, row, there, col, present, aligned(stride, UNIT), False)
    p, logsumexp = softmax_rows(x, fast)
    scores, slope = scores_of(x, p, SIGMOID, fast)
    gradient = tl.zeros_like(x)  # of the probabilities or scores
    dx = tl.zeros_like(x)
    if grad_sums_ptr is not None:
        of_sums = tl.load(grad_sums_ptr + col, mask=present, other=0.0)[None, :]
        if SIGMOID:
            inverse = quotient(tl.cast(1.0, x.dtype), tl.sum(scores, axis=1) + TINY)
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
                of_weights, chosen = add_choice(of_weights, chosen, experts_ptr, grad_weights_ptr, slot + j, there, col)
        else:
            for j in range(TOP_K):
                of_weights, chosen = add_choice(of_weights, chosen, experts_ptr, grad_weights_ptr, slot + j, there, col)
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
