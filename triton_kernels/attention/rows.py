"""What the backward reads of each query: the shift and weight of its probabilities, and delta, one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import aligned, cdiv, next_power_of_2, to_acc
from parallel_ops.triton_kernels._launch import launch, remembered
from parallel_ops.triton_kernels._math import reciprocal
from parallel_ops.triton_kernels.attention.common import load_tile, stride
from parallel_ops.triton_kernels.attention.grids import MOST_TOKENS, hints_of, strides_of

_ROWS_UNSPECIALISED = [
    "queries", "heads", "blocks", "statistics_plane", "statistics_batch", "statistics_head",
    "rows_plane", "rows_batch", "rows_head",
    *(f"{name}_{axis}" for name in ("grad", "out") for axis in ("token", "batch", "head")),
]  # fmt: skip


@triton.jit(do_not_specialize=_ROWS_UNSPECIALISED)
def _rows_kernel(
    grad_ptr, out_ptr, statistics_ptr, rows_ptr, queries, heads, blocks, grad_token, grad_batch, grad_head,
    out_token, out_batch, out_head, statistics_plane, statistics_batch, statistics_head,
    rows_plane, rows_batch, rows_head,
    DIMS: tl.constexpr, BLOCK_DIMS: tl.constexpr, BLOCK_QUERIES: tl.constexpr, FAST: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Shift, weight and delta of a block of queries. ``FAST``: shifts by the logsumexp, with weights of 1."""
    program = tl.program_id(0)
    b, h = (program // blocks // heads).to(tl.int64), (program // blocks % heads).to(tl.int64)
    first_query = program % blocks * BLOCK_QUERIES
    query = first_query + tl.arange(0, BLOCK_QUERIES)
    grad_ptr += b * aligned(grad_batch, UNIT) + h * aligned(grad_head, UNIT)
    out_ptr += b * aligned(out_batch, UNIT) + h * aligned(out_head, UNIT)
    grad = load_tile(
        grad_ptr, first_query, queries, stride(grad_token, UNIT, WIDE), BLOCK_QUERIES, DIMS, BLOCK_DIMS, True
    )
    out = load_tile(out_ptr, first_query, queries, stride(out_token, UNIT, WIDE), BLOCK_QUERIES, DIMS, BLOCK_DIMS, True)
    delta = tl.sum(to_acc(grad) * to_acc(out), axis=1)
    mask = query < queries
    statistics_ptr += b * statistics_batch + h * statistics_head + query
    largest = tl.load(statistics_ptr, mask=mask, other=0.0)
    total = tl.load(statistics_ptr + tl.cast(statistics_plane, tl.int64), mask=mask, other=1.0)
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    rows_ptr += b * rows_batch + h * rows_head + query
    plane = tl.cast(rows_plane, tl.int64)
    shift = tl.where(none, 0.0, largest + tl.log(total) if FAST else largest)
    tl.store(rows_ptr, shift, mask=mask)
    tl.store(rows_ptr + plane, tl.where(none, 0.0, 1.0 if FAST else reciprocal(total, False)), mask=mask)
    tl.store(rows_ptr + 2 * plane, delta, mask=mask)


@remembered
def gradient_rows(grad_out: Tensor, out: Tensor, statistics: Tensor, rows: Tensor) -> None:
    """Writes shift, weight and ``delta[b, h, i] = grad_out[i, b, h] . out[i, b, h]`` to ``rows``."""
    if grad_out.numel() == 0:
        return
    queries, batch, heads, dims = grad_out.shape
    block_dims = next_power_of_2(dims)
    block = min(MOST_TOKENS, max(16, 8192 // block_dims))  # 32 elements of each a thread
    blocks = cdiv(queries, block)
    strides = strides_of(grad_out, out)
    # Not fused: where a thread has one element of a row, a product fused into the sum with another lane's is rounded in
    # that lane alone. The two sums differ then, and with Triton 3.9 all lanes of a warp store theirs to one place.
    launch(
        _rows_kernel, (blocks * heads * batch,),
        grad_out, out, statistics, rows, queries, heads, blocks, *strides, *statistics.stride()[:3], *rows.stride()[:3],
        DIMS=dims, BLOCK_DIMS=block_dims, BLOCK_QUERIES=block, FAST=grad_out.dtype is not torch.float32,
        **hints_of(strides), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
