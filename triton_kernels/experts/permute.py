"""Rows of tokens to the rows of their experts (scatter) and their weighted sums back (gather).

Both walk over tokens, not over rows of experts: so a token's row is read or written once, while rows of experts are
moved once in any case. Rows of padding belong to no token: each program looks through as many rows of the order as a
token has, and zeroes those.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import (
    aligned,
    as_rows,
    cdiv,
    next_power_of_2,
    reread,
    tile_of,
    to_acc,
    unit_of,
    vector_cols,
)
from parallel_ops.triton_kernels._launch import launch, remembered

# Columns of a program: 4 warps of one 16-byte access a thread. Rows are many, so fewer warps where a row is shorter.
_WARPS = 4
# With the gradient of weights a program has a whole row: up to 16 KiB in registers, 8 warps of four such accesses; a
# longer one in steps of as much, again for each choice.
_DOT_WARPS = 8
_DOT_ACCESSES = 4
# Choices whose loads are all issued at once; more take turns.
_UNROLLED = 16
# Rows that a program looks through for padding at a time, and columns of them that it zeroes at a time.
_PADDING = 16
_ZEROS = 256


@remembered
def scatter(
    x: Tensor, y: Tensor | None, rows: Tensor, places: Tensor, weights: Tensor | None, out: Tensor | None,
    dweights: Tensor | None,
) -> None:  # fmt: skip
    """``out[places[t, j]] = weights[t, j] * x[t]``, zero for padding; ``dweights[t, j] = <x[t], y[places[t, j]]>``.

    ``out``, or ``y`` and ``dweights``, may be ``None``.
    """
    x, _, cols, stride = as_rows(x)
    choices, total = places.shape[1], rows.shape[0]
    if weights is not None:
        weights = weights.contiguous()
    if y is not None and dweights is not None:
        y, _, _, y_stride = as_rows(y)
        block_cols, warps = _tile(cols, x.dtype, _DOT_WARPS, _DOT_ACCESSES)
        col_blocks = 1
    else:
        y, dweights, y_stride = None, None, stride
        block_cols, warps = _tile(cols, x.dtype, _WARPS, 1)
        col_blocks = cdiv(cols, block_cols)
    tokens = places.shape[0]
    parts = max(1, tokens) if out is not None and cols else tokens  # without tokens, all rows are padding
    if parts == 0:
        return
    launch(
        _scatter_kernel if dweights is None else _scatter_dot_kernel, (parts * max(1, col_blocks),),
        x, y, rows, places, weights, out, dweights, tokens, total, cdiv(total, parts), cols, max(1, col_blocks), stride,
        y_stride, choices,
        PADDING=_PADDING, ZEROS=min(_ZEROS, block_cols), UNIT=unit_of(cols, stride, y_stride),
        WHOLE=block_cols >= cols, BLOCK_COLS=block_cols, num_warps=warps,
    )  # fmt: skip


@remembered
def gather(y: Tensor, places: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """``out[t] = sum over j of weights[t, j] * y[places[t, j]]``, in order."""
    y, _, cols, stride = as_rows(y)
    tokens, choices = places.shape
    if tokens * cols == 0:
        return
    block_cols, warps = _tile(cols, y.dtype, _WARPS, 1)
    col_blocks = cdiv(cols, block_cols)
    launch(
        _gather_kernel, (tokens * col_blocks,),
        y, places, None if weights is None else weights.contiguous(), out, cols, col_blocks, stride,
        CHOICES=choices, UNROLLED=choices <= _UNROLLED, UNIT=unit_of(cols, stride), BLOCK_COLS=block_cols,
        num_warps=warps,
    )  # fmt: skip


def _tile(cols: int, dtype: torch.dtype, most_warps: int, accesses: int) -> tuple[int, int]:
    """(columns, warps) of a step: ``accesses`` of 16 bytes a thread."""
    block_cols = min(accesses * vector_cols(dtype, most_warps), next_power_of_2(max(cols, 1)))
    return block_cols, max(1, min(most_warps, block_cols // vector_cols(dtype, 1)))


@triton.jit
def _zero_padding(
    rows_ptr, out_ptr, part, each, total, first_col, end_col, cols,
    PADDING: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Zeros to columns of those of a part of the rows that are padding."""
    end = min(total, (part + 1) * each)
    for first in range(part * each, end, PADDING):
        row = first + tl.arange(0, PADDING)
        slots = tl.load(rows_ptr + row, mask=row < end, other=0)
        if tl.min(slots, axis=0) < 0:
            begin = out_ptr + row.to(tl.int64)[:, None] * cols
            for start in range(first_col, end_col, ZEROS):
                col = start + tl.arange(0, ZEROS)[None, :]
                zeros = tl.zeros((PADDING, ZEROS), out_ptr.dtype.element_ty)
                tl.store(begin + col, zeros, mask=(slots < 0)[:, None] & (col < end_col))


@triton.jit(do_not_specialize=["choices", "each"])
def _scatter_kernel(
    x_ptr, y_ptr, rows_ptr, places_ptr, weights_ptr, out_ptr, dweights_ptr, tokens, total, each, cols, col_blocks,
    stride, y_stride, choices,
    PADDING: tl.constexpr, ZEROS: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    token, block = tile_of(tl.program_id(0), col_blocks)
    cols = aligned(cols, UNIT)
    first_col = block * BLOCK_COLS
    end_col = min(cols, first_col + BLOCK_COLS)
    _zero_padding(rows_ptr, out_ptr, token, each, total, first_col, end_col, cols, PADDING, ZEROS)
    if token < tokens:
        col = first_col + tl.arange(0, BLOCK_COLS)
        mask = col < cols
        x = tl.load(x_ptr + token.to(tl.int64) * aligned(stride, UNIT) + col, mask=mask)
        for j in range(choices):
            slot = token.to(tl.int64) * choices + j
            place = tl.load(places_ptr + slot)
            value = x
            if weights_ptr is not None:
                wide = to_acc(x)
                value = (wide * tl.load(weights_ptr + slot).to(wide.dtype)).to(x.dtype)
            tl.store(out_ptr + place.to(tl.int64) * cols + col, value, mask=mask & (place >= 0))


@triton.jit
def _dot_step(x, y_ptr, out_ptr, weight, col, mask):
    """Products of x and y, and the weighted x to ``out`` if that is wanted."""
    wide = to_acc(x)
    if out_ptr is not None:
        tl.store(out_ptr + col, (wide * weight).to(out_ptr.dtype.element_ty), mask=mask)
    return wide * to_acc(tl.load(y_ptr + col, mask=mask, other=0.0))


@triton.jit(do_not_specialize=["choices", "each"])
def _scatter_dot_kernel(
    x_ptr, y_ptr, rows_ptr, places_ptr, weights_ptr, out_ptr, dweights_ptr, tokens, total, each, cols, col_blocks,
    stride, y_stride, choices,
    PADDING: tl.constexpr, ZEROS: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    cols = aligned(cols, UNIT)
    if out_ptr is not None:
        _zero_padding(rows_ptr, out_ptr, token, each, total, 0, cols, cols, PADDING, ZEROS)
    if token < tokens:
        acc: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
        row = x_ptr + token.to(tl.int64) * aligned(stride, UNIT)
        col = tl.arange(0, BLOCK_COLS)
        kept = tl.load(row + col, mask=col < cols, other=0.0)
        for j in range(choices):
            slot = token.to(tl.int64) * choices + j
            place = tl.load(places_ptr + slot).to(tl.int64)
            weight = tl.load(weights_ptr + slot).to(acc)
            y_row, out_row = y_ptr + place * aligned(y_stride, UNIT), out_ptr
            if out_ptr is not None:
                out_row += place * cols
            if WHOLE:
                dot = _dot_step(reread(kept), y_row, out_row, weight, col, (col < cols) & (place >= 0))
            else:
                dot = tl.zeros((BLOCK_COLS,), acc)
                for start in range(0, cols, BLOCK_COLS):
                    mask = (start + col < cols) & (place >= 0)
                    x = tl.load(row + start + col, mask=mask, other=0.0)
                    dot += _dot_step(x, y_row, out_row, weight, start + col, mask)
            tl.store(dweights_ptr + slot, tl.sum(dot, axis=0).to(dweights_ptr.dtype.element_ty))


@triton.jit
def _add_row(total, y_ptr, places_ptr, weights_ptr, slot, col, mask, stride):
    place = tl.load(places_ptr + slot)
    y = to_acc(tl.load(y_ptr + place.to(tl.int64) * stride + col, mask=mask & (place >= 0), other=0.0))
    if weights_ptr is not None:
        # A dropped slot adds nothing, whatever its weight is.
        y *= tl.load(weights_ptr + slot, mask=place >= 0, other=0.0).to(y.dtype)
    return total + y


@triton.jit
def _gather_kernel(
    y_ptr, places_ptr, weights_ptr, out_ptr, cols, col_blocks, stride,
    CHOICES: tl.constexpr, UNROLLED: tl.constexpr, UNIT: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    token, block = tile_of(tl.program_id(0), col_blocks)
    cols = aligned(cols, UNIT)
    stride = aligned(stride, UNIT)
    col = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = col < cols
    slot = token.to(tl.int64) * CHOICES
    total = tl.zeros((BLOCK_COLS,), tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32)
    if UNROLLED:
        for j in tl.static_range(CHOICES):
            total = _add_row(total, y_ptr, places_ptr, weights_ptr, slot + j, col, mask, stride)
    else:
        for j in range(CHOICES):
            total = _add_row(total, y_ptr, places_ptr, weights_ptr, slot + j, col, mask, stride)
    tl.store(out_ptr + token.to(tl.int64) * cols + col, total.to(out_ptr.dtype.element_ty), mask=mask)
