"""cross_entropy: row statistics with each logit read once, their combination, and the gradient in a second pass."""

import torch
from torch import Tensor

from parallel_ops.triton_kernels._common import (
    as_rows,
    cdiv,
    contiguous,
    next_power_of_2,
    scratch,
    unit_of,
    vector_cols,
)
from parallel_ops.triton_kernels._launch import launch
from parallel_ops.triton_kernels.cross_entropy.gradient import _backward_kernel
from parallel_ops.triton_kernels.cross_entropy.statistics import _combine_kernel, _merge_kernel, _statistics_kernel

# A program's part of a row stays in registers between its maximum and its sum: 8 warps with 64 fp32 values a thread,
# so that what a program does beside its elements is a quarter of its instructions. Longer rows are cut into such parts,
# whose statistics a second, tiny kernel merges.
PART_COLS = 16384
PART_COLS_FP64 = 4096
PART_ELEMENTS = 64
# The gradient has nothing to keep: 8 warps with four 16-byte accesses in flight per thread.
GRADIENT_WARPS = 8
GRADIENT_LOADS = 4
MERGE_ROWS = 128


def statistics(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, out: Tensor, column: Tensor,
    *, start: int, vocab: int, ignore_index: int, ignore_out_of_range: bool, softcap: float,
) -> None:  # fmt: skip
    """Fills ``out`` ``[3, 5 or 7, rows]`` and ``column`` ``[rows]``; ``target`` is contiguous."""
    width, rows = out.shape
    if rows == 0:
        return
    x, _, cols, x_stride = as_rows(logits)
    limit = PART_COLS_FP64 if logits.dtype is torch.float64 else PART_COLS
    block_cols = min(limit, next_power_of_2(max(cols, 1)))
    parts = max(1, cdiv(cols, block_cols))
    part_out = out if parts == 1 else scratch(out, parts, width, rows)
    launch(
        _statistics_kernel, (rows * parts,),
        x, target, contiguous(class_weight), part_out, column, rows, cols, x_stride, start, vocab, ignore_index, parts,
        softcap, IGNORE_OUT_OF_RANGE=ignore_out_of_range, SOFTCAP=softcap > 0.0, WIDTH=width,
        EVEN=cols % block_cols == 0 and cols > 0, UNIT=unit_of(cols, x_stride), BLOCK_COLS=block_cols,
        num_warps=max(1, block_cols // (32 * PART_ELEMENTS)),
    )  # fmt: skip
    if parts > 1:
        launch(
            _merge_kernel, (cdiv(rows, MERGE_ROWS),),
            part_out, out, parts, rows, WIDTH=width, BLOCK_ROWS=MERGE_ROWS, num_warps=4,
        )  # fmt: skip


def combine(
    statistics: Tensor, column: Tensor, loss: Tensor, saved: Tensor, *, label_smoothing: float, z_loss: float
) -> None:
    """``statistics`` ``[shards, 3, 5 or 7, rows]`` to ``loss`` ``[rows]`` and ``saved`` ``[3, 4 or 6, rows]``."""
    shards, width, rows = statistics.shape
    if rows == 0:
        return
    launch(
        _combine_kernel, (cdiv(rows, MERGE_ROWS),),
        statistics.contiguous(), column, loss, saved, shards, rows, label_smoothing, z_loss,
        WIDTH=width, BLOCK_ROWS=MERGE_ROWS, num_warps=4,
    )  # fmt: skip


def backward(
    grad: Tensor, logits: Tensor, class_weight: Tensor | None, column: Tensor, saved: Tensor, out: Tensor,
    *, label_smoothing: float, z_loss: float, softcap: float,
) -> None:  # fmt: skip
    """The gradient of the logits; ``out`` is contiguous and may be ``logits`` itself."""
    if logits.numel() == 0:
        return
    x, rows, cols, x_stride = as_rows(logits)
    grad = grad.reshape(-1)
    vector = vector_cols(logits.dtype, GRADIENT_WARPS)
    block_cols = min(GRADIENT_LOADS * vector, max(vector, next_power_of_2(cols)))
    blocks = cdiv(cols, block_cols)
    launch(
        _backward_kernel, (rows * blocks,),
        grad, x, contiguous(class_weight), column, saved, out, rows, cols, blocks, grad.stride(0), x_stride,
        label_smoothing, z_loss, softcap,
        SOFTCAP=softcap > 0.0, SMOOTHING=label_smoothing != 0.0, WEIGHTED=class_weight is not None,
        EVEN=cols % block_cols == 0, UNIT=unit_of(cols, x_stride), BLOCK_COLS=block_cols, num_warps=GRADIENT_WARPS,
    )  # fmt: skip
