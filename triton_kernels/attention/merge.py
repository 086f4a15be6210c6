"""Results that several kernels or programs computed in parts, joined: one pass over memory each.

Limited by memory: a merge reads and writes the running result and reads a block's, 10 bytes an element of 16 bits; a
sum of n partial gradients reads 4 n bytes an element and writes 2 or 4.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import aligned, cdiv, next_power_of_2, to_acc
from parallel_ops.triton_kernels._launch import launch, remembered
from parallel_ops.triton_kernels._math import exp_nonpositive, reciprocal
from parallel_ops.triton_kernels.attention.common import load_tile, store_tile, stride
from parallel_ops.triton_kernels.attention.grids import MOST_TOKENS, dims_of, hints_of, strides_of

_MERGE_UNSPECIALISED = [
    "queries", "heads", "blocks", "lse_batch", "lse_head", "statistics_plane", "statistics_batch", "statistics_head",
    *(f"{name}_{axis}" for name in ("block", "out") for axis in ("token", "batch", "head")),
]  # fmt: skip


@triton.jit(do_not_specialize=_MERGE_UNSPECIALISED)
def _merge_kernel(
    block_ptr, lse_ptr, out_ptr, statistics_ptr, queries, heads, blocks,
    block_token, block_batch, block_head, out_token, out_batch, out_head, lse_batch, lse_head,
    statistics_plane, statistics_batch, statistics_head,
    DIMS: tl.constexpr, BLOCK_DIMS: tl.constexpr, BLOCK_QUERIES: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Merges a block of queries' normalised result with the logsumexp into O, M and Z."""
    program = tl.program_id(0)
    b, h = (program // blocks // heads).to(tl.int64), (program // blocks % heads).to(tl.int64)
    first_query = program % blocks * BLOCK_QUERIES
    query = first_query + tl.arange(0, BLOCK_QUERIES)
    mask = query < queries
    block_ptr += b * aligned(block_batch, UNIT) + h * aligned(block_head, UNIT)
    out_ptr += b * aligned(out_batch, UNIT) + h * aligned(out_head, UNIT)
    statistics_ptr += b * statistics_batch + h * statistics_head + query
    sums_ptr = statistics_ptr + tl.cast(statistics_plane, tl.int64)
    block = load_tile(
        block_ptr, first_query, queries, stride(block_token, UNIT, WIDE), BLOCK_QUERIES, DIMS, BLOCK_DIMS, True
    )
    out_stride = stride(out_token, UNIT, WIDE)
    out = load_tile(out_ptr, first_query, queries, out_stride, BLOCK_QUERIES, DIMS, BLOCK_DIMS, True)
    before = tl.load(statistics_ptr, mask=mask, other=float("-inf"))
    largest = tl.load(lse_ptr + b * lse_batch + h * lse_head + query, mask=mask, other=0.0)
    most = tl.maximum(before, largest)
    shift = tl.where(most == float("-inf"), 0.0, most)
    old = exp_nonpositive(before - shift, False) * tl.load(sums_ptr, mask=mask, other=0.0)
    ours = exp_nonpositive(largest - shift, False)
    total = old + ours
    share = tl.where(total == 0.0, 0.0, reciprocal(tl.where(total == 0.0, 1.0, total), False))
    merged = out * (old * share)[:, None] + to_acc(block) * (ours * share)[:, None]
    store_tile(out_ptr, first_query, queries, out_stride, merged, DIMS)
    tl.debug_barrier()  # a layout may have several warps load the same statistics, and again for O
    tl.store(statistics_ptr, most, mask=mask)
    tl.store(sums_ptr, total, mask=mask)


_SUM_UNSPECIALISED = [
    "parts", "keys", "heads", "blocks", "rows",
    *(f"{name}_{axis}" for name in ("dk", "dv") for axis in ("token", "batch", "head")),
]  # fmt: skip


@triton.jit
def _sum_tile(
    partial_ptr, out_ptr, first_key, parts, keys, row, rows, out_stride,
    DIMS: tl.constexpr, BLOCK_DIMS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    partial_ptr += row * keys * DIMS
    total = load_tile(partial_ptr, first_key, keys, DIMS, BLOCK_KEYS, DIMS, BLOCK_DIMS, True)
    for _ in range(1, parts):
        partial_ptr += rows * keys * DIMS
        total += load_tile(partial_ptr, first_key, keys, DIMS, BLOCK_KEYS, DIMS, BLOCK_DIMS, True)
    store_tile(out_ptr, first_key, keys, out_stride, total, DIMS)


@triton.jit(do_not_specialize=_SUM_UNSPECIALISED)
def _sum_kernel(
    partial_dk_ptr, partial_dv_ptr, dk_ptr, dv_ptr, parts, keys, heads, blocks, rows,
    dk_token, dk_batch, dk_head, dv_token, dv_batch, dv_head,
    DIMS: tl.constexpr, BLOCK_DIMS: tl.constexpr, DIMS_V: tl.constexpr, BLOCK_DIMS_V: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys: partial sums ``[parts, batch, kv_heads, keys, dims]`` added in order."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    b, h = row // heads, row % heads
    first_key = program % blocks * BLOCK_KEYS
    dk_ptr += b * aligned(dk_batch, UNIT) + h * aligned(dk_head, UNIT)
    dv_ptr += b * aligned(dv_batch, UNIT) + h * aligned(dv_head, UNIT)
    n, of_all = tl.cast(keys, tl.int64), tl.cast(rows, tl.int64)
    _sum_tile(
        partial_dk_ptr, dk_ptr, first_key, parts, n, row, of_all, stride(dk_token, UNIT, WIDE),
        DIMS, BLOCK_DIMS, BLOCK_KEYS,
    )  # fmt: skip
    _sum_tile(
        partial_dv_ptr, dv_ptr, first_key, parts, n, row, of_all, stride(dv_token, UNIT, WIDE),
        DIMS_V, BLOCK_DIMS_V, BLOCK_KEYS,
    )  # fmt: skip


@remembered
def merge(block: Tensor, logsumexp: Tensor, out: Tensor, statistics: Tensor) -> None:
    """Merges ``block`` ``[s, b, heads, d]`` and its ``logsumexp`` ``[b, heads, s]`` into ``out`` and ``statistics``."""
    if block.numel() == 0:
        return
    queries, batch, heads, dims = block.shape
    if block.stride(3) != 1 and dims > 1:
        block = block.contiguous()
    block_dims = next_power_of_2(dims)
    block_queries = min(MOST_TOKENS, max(16, 4096 // block_dims))  # 16 elements of each a thread
    blocks = cdiv(queries, block_queries)
    strides = strides_of(block, out)
    launch(
        _merge_kernel, (blocks * heads * batch,),
        block, logsumexp, out, statistics, queries, heads, blocks, *strides, *logsumexp.stride()[:2],
        *statistics.stride()[:3], DIMS=dims, BLOCK_DIMS=block_dims, BLOCK_QUERIES=block_queries, **hints_of(strides),
        num_warps=8,
    )  # fmt: skip


def sum_parts(parts: list[Tensor], dk: Tensor, dv: Tensor, splits: int) -> None:
    """dk and dv from the sums of each part of the groups."""
    keys, batch, kv_heads = dk.shape[:3]
    dims = dims_of(dk, dv)
    block_keys = max(16, 2048 // dims["BLOCK_DIMS"])  # 16 elements a thread
    blocks = cdiv(keys, block_keys)
    strides = strides_of(dk, dv)
    launch(
        _sum_kernel, (blocks * kv_heads * batch,),
        *parts, dk, dv, splits, keys, kv_heads, blocks, kv_heads * batch, *strides, **dims, BLOCK_KEYS=block_keys,
        **hints_of(strides), num_warps=4,
    )  # fmt: skip
