"""Activations with a bias, a gate and a weight a row: one pass forward, one backward, both for every such op.

    y     = w act(g + b)                  bias_gelu, whose x is g here
    y     = w act(g + b) (u + c)          bias_swiglu, silu_mul, gelu_mul
    dg    = dy w (u + c) act'(g + b),  du = dy w act(g + b),  dw = sum over columns of dy act(g + b) (u + c)

SiLU with options is g sigmoid(alpha g); g + b and u + c may be clamped first, and u + c have an offset then. They are
compile-time constants, since a model has one set of them; so fp64 has them in fp64. What is not there (options, u, the
biases, w) costs nothing. Without a bias a program has one tile, on a flat grid. With one it
walks over rows and sums dg and du on the way; see ``ROW_SPLITS``.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import (
    aligned,
    as_rows,
    bias_gradient_cols,
    cdiv,
    contiguous,
    partial_sums,
    row_splits,
    sum_within_threads,
    tile_of,
    to_acc,
    unit_of,
    vector_cols,
)
from parallel_ops.triton_kernels._finish import (
    arrive,
    counter,
    finish_block,
    finishers,
    sum_columns,
    wait_for_workers,
)
from parallel_ops.triton_kernels._launch import launch, remembered
from parallel_ops.triton_kernels.activations.tiles import activate, clamped, load_gate_and_up, pairs_of

NUM_WARPS = 4
# Rows of a tile with all threads side by side, which is how many 16-byte loads of each operand a thread has in flight.
# The forward's eight amortise what a program costs beside its elements, a tenth of the instructions at four. With two
# inputs, four rows backward would take 185 registers a thread for sm_90 in bf16, and two programs fit an SM.
FORWARD_ROWS, BACKWARD_ROWS = 8, 4
GATED_ROWS = 2
# Column blocks and rows that a program adds at a time for the gradient of the weights of rows.
WEIGHT_SPLITS, WEIGHT_COLS = tl.constexpr(32), tl.constexpr(128)


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, bias_ptr, weights_ptr, y_ptr, rows, cols, col_blocks, gate_stride, up_stride,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    cols = aligned(cols, UNIT)
    block, col_block = tile_of(tl.program_id(0), col_blocks)
    row = block.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = col_block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    in_cols = col < cols
    mask = (row < rows) & in_cols
    fast: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth == 16
    gate, up = load_gate_and_up(
        gate_ptr, up_ptr, row, col_block, rows, cols, aligned(gate_stride, UNIT), aligned(up_stride, UNIT),
        GATED, STEP, BLOCK_COLS,
    )  # fmt: skip
    if HAS_BIAS:
        gate += to_acc(tl.load(bias_ptr + col, mask=in_cols)).to(gate.dtype)
    if LIMIT is not None:
        gate, _ = clamped(gate, LIMIT, False)
    y, _ = activate(gate, ACTIVATION, ALPHA, fast)
    if GATED:
        if HAS_BIAS:
            up += to_acc(tl.load(bias_ptr + cols + col, mask=in_cols)).to(up.dtype)
        if LIMIT is not None:
            up, _ = clamped(up, LIMIT, True)
        y *= up if UP_OFFSET == 0.0 else up + UP_OFFSET
    if HAS_WEIGHTS:
        y *= to_acc(tl.load(weights_ptr + row, mask=row < rows)).to(y.dtype)
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_tile(
    grad_ptr, gate_ptr, up_ptr, weights_ptr, dgate_ptr, dup_ptr, dweights_ptr, row, col_block, rows, cols,
    grad_stride, gate_stride, up_stride, dx_stride, gate_bias, up_bias,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Writes the tile's gradients and returns those of gate and up, zero outside of the tensor."""
    col = col_block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    mask = (row < rows) & (col < cols)
    fast: tl.constexpr = dgate_ptr.dtype.element_ty.primitive_bitwidth == 16
    grad = to_acc(tl.load(grad_ptr + row * aligned(grad_stride, UNIT) + col, mask=mask))
    gate, up = load_gate_and_up(
        gate_ptr, up_ptr, row, col_block, rows, cols, aligned(gate_stride, UNIT), aligned(up_stride, UNIT),
        GATED, STEP, BLOCK_COLS,
    )  # fmt: skip
    if HAS_BIAS:
        gate += gate_bias
    if LIMIT is not None:
        gate, gate_inside = clamped(gate, LIMIT, False)
    value, slope = activate(gate, ACTIVATION, ALPHA, fast)
    if LIMIT is not None:
        slope = tl.where(gate_inside, slope, 0.0)
    if GATED:
        if HAS_BIAS:
            up += up_bias
        if LIMIT is not None:
            up, up_inside = clamped(up, LIMIT, True)
        if UP_OFFSET != 0.0:
            up += UP_OFFSET
        if HAS_WEIGHTS:
            dweights = tl.sum(tl.where(mask, grad * value * up, 0.0), axis=1, keep_dims=True)
            tl.store(dweights_ptr + row, dweights, mask=row < rows)
            grad *= to_acc(tl.load(weights_ptr + row, mask=row < rows)).to(grad.dtype)
        dup = grad * value
        if LIMIT is not None:
            dup = tl.where(up_inside, dup, 0.0)
        dgate = grad * up * slope
    else:
        dup = 0.0
        dgate = grad * slope
    if STEP == 2:
        pointers, pairs_mask = pairs_of(dgate_ptr, row, col_block, rows, cols, aligned(dx_stride, UNIT), BLOCK_COLS)
        both = tl.reshape(tl.join(dgate, dup), (row.shape[0], 2 * BLOCK_COLS))
        tl.store(pointers, both.to(dgate_ptr.dtype.element_ty), mask=pairs_mask)
    else:
        offsets = row * aligned(dx_stride, UNIT) + col
        tl.store(dgate_ptr + offsets, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
        if GATED:
            tl.store(dup_ptr + offsets, dup.to(dup_ptr.dtype.element_ty), mask=mask)
    if HAS_BIAS:
        dgate = tl.where(mask, dgate, 0.0)
        if GATED:
            dup = tl.where(mask, dup, 0.0)
    return dgate, dup


@triton.jit
def _backward_kernel(
    grad_ptr, gate_ptr, up_ptr, bias_ptr, weights_ptr, dgate_ptr, dup_ptr, partial_ptr, partial_dweights_ptr,
    dbias_ptr, dweights_ptr, counter_ptr,
    rows, cols, col_blocks, splits, workers, bias_blocks, grad_stride, gate_stride, up_stride, dx_stride,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUPS: tl.constexpr,
    FINISH_SPLITS: tl.constexpr, FINISH_COLS: tl.constexpr,
):  # fmt: skip
    cols = aligned(cols, UNIT)
    if HAS_BIAS or HAS_WEIGHTS:
        if tl.program_id(0) >= workers:
            _finish(
                partial_ptr, partial_dweights_ptr, dbias_ptr, dweights_ptr, counter_ptr, rows, cols, col_blocks, splits,
                workers, bias_blocks, GATED, HAS_BIAS, HAS_WEIGHTS, FINISH_SPLITS, FINISH_COLS,
            )  # fmt: skip
            return
    split, col_block = tile_of(tl.program_id(0), col_blocks)
    col = col_block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    in_cols = col < cols
    if HAS_WEIGHTS:
        partial_dweights_ptr += col_block.to(tl.int64) * rows
    if HAS_BIAS:
        dtype: tl.constexpr = partial_ptr.dtype.element_ty
        gate_bias = tl.load(bias_ptr + col, mask=in_cols).to(dtype)
        gate_total = tl.zeros((GROUPS, BLOCK_COLS), dtype=dtype)
        up_bias = gate_bias
        up_total = gate_total
        if GATED:
            up_bias = tl.load(bias_ptr + cols + col, mask=in_cols).to(dtype)
        for first in range(split * BLOCK_ROWS, rows, splits * BLOCK_ROWS):
            row = first + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
            dgate, dup = _backward_tile(
                grad_ptr, gate_ptr, up_ptr, weights_ptr, dgate_ptr, dup_ptr, partial_dweights_ptr, row, col_block,
                rows, cols, grad_stride, gate_stride, up_stride, dx_stride, gate_bias, up_bias,
                ACTIVATION, ALPHA, LIMIT, UP_OFFSET, GATED, HAS_BIAS, HAS_WEIGHTS, STEP, UNIT, BLOCK_COLS,
            )  # fmt: skip
            gate_total += sum_within_threads(dgate, GROUPS)
            if GATED:
                up_total += sum_within_threads(dup, GROUPS)
        partial_ptr += split.to(tl.int64) * (2 * cols if GATED else cols)
        tl.store(partial_ptr + col, tl.sum(gate_total, axis=0, keep_dims=True), mask=in_cols)
        if GATED:
            tl.store(partial_ptr + cols + col, tl.sum(up_total, axis=0, keep_dims=True), mask=in_cols)
    else:
        row = split.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        _backward_tile(
            grad_ptr, gate_ptr, up_ptr, weights_ptr, dgate_ptr, dup_ptr, partial_dweights_ptr, row, col_block,
            rows, cols, grad_stride, gate_stride, up_stride, dx_stride, 0.0, 0.0,
            ACTIVATION, ALPHA, LIMIT, UP_OFFSET, GATED, HAS_BIAS, HAS_WEIGHTS, STEP, UNIT, BLOCK_COLS,
        )  # fmt: skip
    if HAS_BIAS or HAS_WEIGHTS:
        arrive(counter_ptr)


@triton.jit
def _finish(
    partial_ptr, partial_dweights_ptr, dbias_ptr, dweights_ptr, counter_ptr, rows, cols, col_blocks, splits, workers,
    bias_blocks, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, FINISH_SPLITS: tl.constexpr,
    FINISH_COLS: tl.constexpr,
):  # fmt: skip
    """Some columns of the bias's gradient, or some rows of the weights': of those, the sum of all column blocks."""
    wait_for_workers(counter_ptr, workers)
    block = tl.program_id(0) - workers
    if HAS_BIAS:
        if block < bias_blocks:
            biases = 2 * cols if GATED else cols
            sum_columns(partial_ptr, dbias_ptr, block, splits, biases, FINISH_SPLITS, FINISH_COLS)
    if HAS_WEIGHTS:
        if block >= bias_blocks:
            # Column blocks are few and rows are many: a tile of the other shape.
            sum_columns(
                partial_dweights_ptr, dweights_ptr, block - bias_blocks, col_blocks, rows, WEIGHT_SPLITS, WEIGHT_COLS
            )  # fmt: skip


@remembered
def forward(
    gate: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, y: Tensor, *, activation: str,
    alpha: float = 1.0, limit: float | None = None, up_offset: float = 0.0, interleaved: bool = False,
) -> None:  # fmt: skip
    """``y``, contiguous.

    Args:
        gate, up: of the shape of ``y``; one tensor twice as wide with ``interleaved``.
        bias: of ``gate``, or of ``gate`` and ``up`` one after the other.
        weights: one for each row.
        activation: ``"silu"``, ``"gelu tanh"`` or ``"gelu"``.
        alpha, limit, up_offset: options of ``"silu"``.
    """
    if y.numel() == 0:
        return
    gate, rows, _, gate_stride = as_rows(gate)
    up, _, _, up_stride = (None, 0, 0, 0) if up is None else as_rows(up)
    cols = y.shape[-1]
    block_rows = FORWARD_ROWS if up is None else GATED_ROWS
    block_cols = vector_cols(y.dtype, NUM_WARPS)
    col_blocks = cdiv(cols, block_cols)
    launch(
        _forward_kernel, (cdiv(rows, block_rows) * col_blocks,),
        gate, up, contiguous(bias), contiguous(weights), y, rows, cols, col_blocks, gate_stride, up_stride,
        ACTIVATION=activation, ALPHA=alpha, LIMIT=limit, UP_OFFSET=up_offset,
        GATED=up is not None, HAS_BIAS=bias is not None, HAS_WEIGHTS=weights is not None, STEP=2 if interleaved else 1,
        UNIT=unit_of(cols, gate_stride, up_stride), BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=NUM_WARPS,
    )  # fmt: skip


@remembered
def backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None,
    dgate: Tensor, dup: Tensor | None, dbias: Tensor, dweights: Tensor, *, activation: str,
    alpha: float = 1.0, limit: float | None = None, up_offset: float = 0.0, interleaved: bool = False,
) -> None:  # fmt: skip
    """``dgate`` and ``dup``, with unit column stride and equal row strides in both, and the sums. With ``interleaved``
    both are one tensor, as gate and up are.

    ``dbias`` and ``dweights`` are written where ``bias`` and ``weights`` are given.
    """
    if grad.numel() == 0:
        dbias.zero_()
        dweights.zero_()
        return
    gate, _, _, gate_stride = as_rows(gate)
    grad, rows, cols, grad_stride = as_rows(grad)
    up, _, _, up_stride = (None, 0, 0, 0) if up is None else as_rows(up)
    dgate, _, _, dx_stride = as_rows(dgate)
    widest = vector_cols(dgate.dtype, NUM_WARPS)
    block_cols = widest if bias is None else bias_gradient_cols(cols, dgate.dtype, NUM_WARPS)
    groups = widest // block_cols
    block_rows = groups * (BACKWARD_ROWS if up is None else GATED_ROWS)
    col_blocks = cdiv(cols, block_cols)
    splits = cdiv(rows, block_rows) if bias is None else row_splits(rows, block_rows)
    partial = None if bias is None else partial_sums(dbias.shape[0], dgate, splits)
    partial_dweights = None if weights is None else partial_sums(rows, dgate, col_blocks)
    biases = 0 if bias is None else dbias.shape[0]
    workers, bias_blocks = col_blocks * splits, finishers(biases)
    weight_blocks = 0 if weights is None else cdiv(rows, WEIGHT_COLS.value)
    launch(
        _backward_kernel, (workers + bias_blocks + weight_blocks,),
        grad, gate, up, contiguous(bias), contiguous(weights), dgate, dup, partial, partial_dweights,
        None if bias is None else dbias, None if weights is None else dweights,
        counter(grad.device) if bias_blocks + weight_blocks else None,
        rows, cols, col_blocks, splits, workers, bias_blocks, grad_stride, gate_stride, up_stride, dx_stride,
        ACTIVATION=activation, ALPHA=alpha, LIMIT=limit, UP_OFFSET=up_offset,
        GATED=up is not None, HAS_BIAS=bias is not None, HAS_WEIGHTS=weights is not None, STEP=2 if interleaved else 1,
        UNIT=unit_of(cols, grad_stride, gate_stride, up_stride, dx_stride),
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, GROUPS=groups, **finish_block(biases, NUM_WARPS),
        num_warps=NUM_WARPS,
    )  # fmt: skip
