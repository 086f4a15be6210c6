"""Rows of tokens to the rows of their experts (scatter) and their weighted sums back (gather).

Both walk over tokens, not over rows of experts: so a token's row is read or written once, while rows of experts are
moved once in any case. Rows of padding, which no token has, are zeroed by further programs of the same launch.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import (
    aligned,
    as_rows,
    cdiv,
    next_power_of_2,
    tile_of,
    to_acc,
    unit_of,
    vector_cols,
)
from parallel_ops.triton_kernels._launch import launch

_WARPS = 4
# With the gradient of weights a program has a whole row, in steps of so many columns: 8 warps of two 16-byte loads.
_DOT_WARPS = 8
# Choices whose loads are all issued at once; more take turns.
_UNROLLED = 16
# Rows of an order that a program looks through for padding.
_PADDING = 32


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
        block_cols, warps = min(2 * vector_cols(x.dtype, _DOT_WARPS), next_power_of_2(max(cols, 1))), _DOT_WARPS
        col_blocks = 1
    else:
        y, dweights, y_stride = None, None, stride
        block_cols, warps = min(vector_cols(x.dtype, _WARPS), next_power_of_2(max(cols, 1))), _WARPS
        col_blocks = cdiv(cols, block_cols)
    programs = places.shape[0] * col_blocks
    padding = 0 if out is None or cols == 0 else cdiv(total, _PADDING)
    if programs + padding == 0:
        return
    launch(
        _scatter_kernel if dweights is None else _scatter_dot_kernel, (programs + padding,),
        x, y, rows, places, weights, out, dweights, programs, total, cols, col_blocks, stride, y_stride,
        CHOICES=choices, PADDING=_PADDING, UNIT=unit_of(cols, stride, y_stride), BLOCK_COLS=block_cols, num_warps=warps,
    )  # fmt: skip


def gather(y: Tensor, places: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """``out[t] = sum over j of weights[t, j] * y[places[t, j]]``, in order."""
    y, _, cols, stride = as_rows(y)
    tokens, choices = places.shape
    if tokens * cols == 0:
        return
    block_cols = min(vector_cols(y.dtype, _WARPS), next_power_of_2(cols))
    col_blocks = cdiv(cols, block_cols)
    launch(
        _gather_kernel, (tokens * col_blocks,),
        y, places, None if weights is None else weights.contiguous(), out, cols, col_blocks, stride,
        CHOICES=choices, UNROLLED=choices <= _UNROLLED, UNIT=unit_of(cols, stride), BLOCK_COLS=block_cols,
        num_warps=_WARPS,
    )  # fmt: skip


@triton.jit
def _zero_padding(rows_ptr, out_ptr, first, total, cols, PADDING: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Zeros to those of ``PADDING`` rows that are padding."""
    row = first + tl.arange(0, PADDING)
    slots = tl.load(rows_ptr + row, mask=row < total, other=0)
    if tl.min(slots, axis=0) < 0:
        for i in range(first, min(total, first + PADDING)):
            if tl.load(rows_ptr + i) < 0:
                for start in range(0, cols, BLOCK_COLS):
                    col = start + tl.arange(0, BLOCK_COLS)
                    zeros = tl.zeros((BLOCK_COLS,), out_ptr.dtype.element_ty)
                    tl.store(out_ptr + tl.cast(i, tl.int64) * cols + col, zeros, mask=col < cols)


@triton.jit
def _scatter_kernel(
    x_ptr, y_ptr, rows_ptr, places_ptr, weights_ptr, out_ptr, dweights_ptr, programs, total, cols, col_blocks, stride,
    y_stride,
    CHOICES: tl.constexpr, PADDING: tl.constexpr, UNIT: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = aligned(cols, UNIT)
    if program >= programs:
        _zero_padding(rows_ptr, out_ptr, (program - programs) * PADDING, total, cols, PADDING, BLOCK_COLS)
        return
    token, block = tile_of(program, col_blocks)
    col = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = col < cols
    x = tl.load(x_ptr + token.to(tl.int64) * aligned(stride, UNIT) + col, mask=mask)
    for j in range(CHOICES):
        slot = token.to(tl.int64) * CHOICES + j
        place = tl.load(places_ptr + slot)
        if place >= 0:
            value = x
            if weights_ptr is not None:
                wide = to_acc(x)
                value = (wide * tl.load(weights_ptr + slot).to(wide.dtype)).to(x.dtype)
            tl.store(out_ptr + place.to(tl.int64) * cols + col, value, mask=mask)


@triton.jit
def _scatter_dot_kernel(
    x_ptr, y_ptr, rows_ptr, places_ptr, weights_ptr, out_ptr, dweights_ptr, programs, total, cols, col_blocks, stride,
    y_stride,
    CHOICES: tl.constexpr, PADDING: tl.constexpr, UNIT: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = aligned(cols, UNIT)
    if program >= programs:
        _zero_padding(rows_ptr, out_ptr, (program - programs) * PADDING, total, cols, PADDING, BLOCK_COLS)
        return
    acc: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    token = program.to(tl.int64)
    x_ptr += token * aligned(stride, UNIT)
    for j in range(CHOICES):
        slot = token * CHOICES + j
        place = tl.load(places_ptr + slot).to(tl.int64)
        weight = tl.load(weights_ptr + slot).to(acc)
        dot = tl.zeros((BLOCK_COLS,), acc)
        if place >= 0:
            for start in range(0, cols, BLOCK_COLS):
                col = start + tl.arange(0, BLOCK_COLS)
                mask = col < cols
                x = to_acc(tl.load(x_ptr + col, mask=mask, other=0.0))
                dot += x * to_acc(tl.load(y_ptr + place * aligned(y_stride, UNIT) + col, mask=mask, other=0.0))
                if out_ptr is not None:
                    tl.store(out_ptr + place * cols + col, (x * weight).to(out_ptr.dtype.element_ty), mask=mask)
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
