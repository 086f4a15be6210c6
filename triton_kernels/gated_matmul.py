"""A matmul whose rows arrive while it runs: each tile waits for the flag of its rows.

    out = rows W^T + bias        rows [P s, K], shard r of s rows complete when flags[r] has reached ``ready``

One program an SM takes tile after tile: first those of the own shard, then those of the next rank's, in the
order in which shards are pulled (``comm/pulls.py``). So a wave of tiles is never cut at the end of a shard, as it is
where each shard is a product of its own, and the host enqueues one kernel.

A program that waits holds its SM. What it waits for must therefore need none: copy engines and flags that
streams write, enqueued before the matmul. A flag is read with acquire semantics at the scope of the system, since what
wrote the rows is not this GPU; the barrier behind it makes all threads of the program see the rows.

Tiles are loaded through registers' addresses (cp.async), not by descriptors: such copies are of the same proxy as the
acquire. The tensor memory accelerator is of another, and would need a fence between flag and copy.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import COMPILED, aligned, cdiv, multiprocessors, unit_of
from parallel_ops.triton_kernels._launch import launch

# Rows, columns and depth of a tile, warps and stages: 128 x 256 is the tile with the fewest bytes of shared memory for
# an operation whose fp32 sums fit the registers of two warpgroups.
TILE = (128, 256, 64, 8, 3)
# For less, and for sizes that 16 does not divide, columns among them, whose addresses and masks take more registers.
SMALL_TILE = (128, 128, 64, 8, 3)
# Row blocks that take turns over the columns, so that what tiles of a wave read stays in L2.
GROUP_ROWS = 8


@triton.jit
def _wait(flag_ptr, ready):
    """Until the flag has reached ``ready``, counting modulo 2**32."""
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") - ready < 0:
        if COMPILED:
            tl.inline_asm_elementwise(
                "nanosleep.u32 100; mov.b32 $0, $1;", "=r,r", [ready], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def _gated_kernel(
    rows_ptr, weight_ptr, bias_ptr, out_ptr, flags_ptr, ready, own, shards, shard_rows, columns, depth,
    row_stride, weight_stride, HAS_BIAS: tl.constexpr, UNIT: tl.constexpr, GATED: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    depth, row_stride, weight_stride = aligned(depth, UNIT), aligned(row_stride, UNIT), aligned(weight_stride, UNIT)
    row_blocks, col_blocks = tl.cdiv(shard_rows, BLOCK_ROWS), tl.cdiv(columns, BLOCK_COLS)
    of_shard = row_blocks * col_blocks
    for tile in tl.range(tl.program_id(0), of_shard * shards, tl.num_programs(0)):
        step = tile // of_shard
        shard = (own + step) % shards
        within = tile - step * of_shard
        first_block = within // (GROUP * col_blocks) * GROUP
        group = tl.minimum(row_blocks - first_block, GROUP)
        left = within - first_block * col_blocks
        row_block, col_block = first_block + left % group, left // group
        if GATED:
            _wait(flags_ptr + shard, ready)
        # Rows beyond the shard's last, and columns, are read as the first ones, and not stored.
        row = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        col = col_block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        first_row = shard.to(tl.int64) * shard_rows
        inner = tl.arange(0, BLOCK_DEPTH)
        x_ptr = rows_ptr + (first_row + tl.where(row < shard_rows, row, 0))[:, None] * row_stride + inner[None, :]
        inside = tl.where(col < columns, col, 0).to(tl.int64)[None, :]
        if BY_COLUMNS:
            w_ptr = weight_ptr + inside + inner[:, None].to(tl.int64) * weight_stride
        else:
            w_ptr = weight_ptr + inside * weight_stride + inner[:, None]
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32)
        for start in tl.range(0, depth, BLOCK_DEPTH):
            there = inner < depth - start
            x = tl.load(x_ptr, mask=there[None, :], other=0.0)
            w = tl.load(w_ptr, mask=there[:, None], other=0.0)
            total = tl.dot(x, w, total)
            x_ptr += BLOCK_DEPTH
            w_ptr += BLOCK_DEPTH * weight_stride if BY_COLUMNS else BLOCK_DEPTH
        if HAS_BIAS:
            total += tl.load(bias_ptr + col, mask=col < columns).to(tl.float32)[None, :]
        at = (first_row + row)[:, None] * columns + col[None, :]
        mask = (row < shard_rows)[:, None] & (col < columns)[None, :]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def gated_matmul(
    rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, flags: Tensor | None, ready: int, own: int,
    shards: int,
) -> None:  # fmt: skip
    """``out = rows weight^T + bias``.

    Args:
        rows: ``[shards * s, K]``, 16-bit, each row contiguous. weight: ``[N, K]``, rows or columns contiguous.
        out: ``[shards * s, N]``, contiguous.
        flags: int32 ``[shards]``; ``None`` if all rows are there. ready: what they reach.
        own: the shard to begin with.
    """
    if out.numel() == 0:
        return
    by_columns = weight.stride(1) != 1 and weight.stride(0) == 1
    weight = weight if by_columns or weight.stride(1) == 1 else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    weight_stride = weight.stride(1 if by_columns else 0)
    shard_rows, (columns, depth) = rows.shape[0] // shards, weight.shape
    unit = unit_of(depth, rows.stride(0), weight_stride)
    block_rows, block_cols, block_depth, warps, stages = tile_of(shard_rows, columns, unit)
    tiles = cdiv(shard_rows, block_rows) * cdiv(columns, block_cols) * shards
    launch(
        _gated_kernel, (min(tiles, multiprocessors(out.device)),),
        rows, weight, bias, out, flags, ready, own, shards, shard_rows, columns, depth,
        rows.stride(0), weight_stride,
        HAS_BIAS=bias is not None, UNIT=unit, GATED=flags is not None,
        BY_COLUMNS=by_columns,
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, BLOCK_DEPTH=block_depth, GROUP=GROUP_ROWS,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def tile_of(shard_rows: int, columns: int, unit: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth of a tile, warps and stages."""
    large = columns >= 2 * TILE[1] and shard_rows >= TILE[0]
    return TILE if large and unit == 16 and columns % 16 == 0 else SMALL_TILE
