"""The order of slots by expert: a counting sort in three launches, without atomics.

Blocks of slots: each slot's rank among those of its expert in its block, by comparing all pairs, and each block's
counts; one program that makes of the counts where each expert's slots of each block begin; and the rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import cdiv, next_power_of_2, scratch
from parallel_ops.triton_kernels._launch import launch

# Slots of a block: pairs of slots within it are compared, so work for each slot is proportional to it, and the counts
# that one program adds up to its inverse. 65,536 slots are 128 blocks, one for each SM of an H200.
BLOCK = 512
_OTHERS = 32
_WARPS = 8
# Counts that the one program has on chip: 32 a thread.
_COUNTS = 8192


def sort(experts: Tensor, rows: Tensor, places: Tensor, offs: Tensor, *, capacity: int | None, multiple: int) -> None:
    """Fills ``rows``, ``places`` and ``offs``, which are contiguous."""
    slots, choices = experts.numel(), experts.shape[1]
    num_experts = offs.shape[0]
    blocks, block_cols = max(1, cdiv(slots, BLOCK)), next_power_of_2(num_experts)
    counts = scratch(offs, blocks, num_experts)
    launch(
        _rank_kernel, (blocks,),
        experts, places, counts, rows, slots, choices, num_experts, rows.shape[0], cdiv(rows.shape[0], blocks),
        *experts.stride(),
        BLOCK=BLOCK, OTHERS=_OTHERS, num_warps=_WARPS,
    )  # fmt: skip
    launch(
        _starts_kernel, (1,),
        counts, offs, blocks, num_experts, multiple, 0 if capacity is None else capacity,
        LIMITED=capacity is not None, BLOCK_ROWS=max(1, _COUNTS // block_cols), BLOCK_COLS=block_cols,
        num_warps=max(_WARPS, min(16, block_cols // 512)),
    )  # fmt: skip
    launch(
        _place_kernel, (blocks,),
        experts, counts, offs, places, rows, slots, choices, num_experts, *experts.stride(),
        LIMITED=capacity is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _expert_of(experts_ptr, slot, slots, choices, num_experts, token_stride, choice_stride):
    """The expert of each slot, or -1."""
    token, choice = slot // choices, slot % choices
    offset = token.to(tl.int64) * token_stride + choice.to(tl.int64) * choice_stride
    expert = tl.load(experts_ptr + offset, mask=slot < slots, other=-1)
    return tl.where((expert >= 0) & (expert < num_experts), expert, -1).to(tl.int32)


@triton.jit
def _rank_kernel(
    experts_ptr, places_ptr, counts_ptr, rows_ptr, slots, choices, num_experts, rows, rows_each, token_stride,
    choice_stride,
    BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    for first in range(block * rows_each, min(rows, (block + 1) * rows_each), BLOCK):
        row = first + tl.arange(0, BLOCK)
        tl.store(rows_ptr + row, -1, mask=row < min(rows, (block + 1) * rows_each))
    counts_ptr += block.to(tl.int64) * num_experts
    for first in range(0, num_experts, BLOCK):
        col = first + tl.arange(0, BLOCK)
        tl.store(counts_ptr + col, 0, mask=col < num_experts)

    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = _expert_of(experts_ptr, slot, slots, choices, num_experts, token_stride, choice_stride)
    rank = tl.zeros((BLOCK,), tl.int32)
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, BLOCK, OTHERS):
        other = block * BLOCK + first + tl.arange(0, OTHERS)
        others = _expert_of(experts_ptr, other, slots, choices, num_experts, token_stride, choice_stride)
        same = expert[:, None] == others[None, :]
        rank += tl.sum((same & (other[None, :] < slot[:, None])).to(tl.int32), axis=1)
        count += tl.sum(same.to(tl.int32), axis=1)
    tl.store(places_ptr + slot, rank, mask=slot < slots)
    tl.debug_barrier()  # the zeros are written
    tl.store(counts_ptr + expert, count, mask=(expert >= 0) & (rank == count - 1))


@triton.jit
def _starts_kernel(
    counts_ptr, ends_ptr, blocks, num_experts, multiple, capacity,
    LIMITED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Overwrites each block's counts by where its slots of each expert begin."""
    col = tl.arange(0, BLOCK_COLS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.int32)
    for first in range(0, blocks, BLOCK_ROWS):
        block = first + tl.arange(0, BLOCK_ROWS)
        mask = (block < blocks)[:, None] & (col < num_experts)[None, :]
        total += tl.load(counts_ptr + block.to(tl.int64)[:, None] * num_experts + col[None, :], mask=mask, other=0)
    if LIMITED:
        padded = tl.where(col < num_experts, capacity, 0)
    else:
        padded = (tl.sum(total, axis=0) + (multiple - 1)) // multiple * multiple
    end = tl.cumsum(padded, axis=0)
    tl.store(ends_ptr + col, end, mask=col < num_experts)
    start = end - padded
    for first in range(0, blocks, BLOCK_ROWS):
        block = first + tl.arange(0, BLOCK_ROWS)
        mask = (block < blocks)[:, None] & (col < num_experts)[None, :]
        pointers = counts_ptr + block.to(tl.int64)[:, None] * num_experts + col[None, :]
        count = tl.load(pointers, mask=mask, other=0)
        before = tl.cumsum(count, axis=0) - count
        tl.store(pointers, start[None, :] + before, mask=mask)
        start += tl.sum(count, axis=0)


@triton.jit
def _place_kernel(
    experts_ptr, starts_ptr, ends_ptr, places_ptr, rows_ptr, slots, choices, num_experts, token_stride, choice_stride,
    LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = _expert_of(experts_ptr, slot, slots, choices, num_experts, token_stride, choice_stride)
    kept = expert >= 0
    place = tl.load(places_ptr + slot, mask=kept, other=0)
    place += tl.load(starts_ptr + block.to(tl.int64) * num_experts + expert, mask=kept, other=0)
    if LIMITED:
        kept = kept & (place < tl.load(ends_ptr + expert, mask=kept, other=0))
    tl.store(places_ptr + slot, tl.where(kept, place, -1), mask=slot < slots)
    tl.store(rows_ptr + place, slot, mask=kept)
