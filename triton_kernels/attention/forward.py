"""The forward of block attention: a block of queries against the keys that it sees, merged into a running result.

Limited by the tensor cores: a whole tile of 128 x 128 scores at 128 dims takes an H100 2,048 cycles of matmuls; its
exponentials take the special function units 1,024 and its 520 instructions of each of eight warps the schedulers 1,040,
so that what counts is how much of them runs beside matmuls. At 64 dims the three are even (1,024, 1,024 and 900). So
scores stay q.k until they are exponents: the scale is folded into the multiply-add that subtracts the maximum, in
units of log(2). (Counted in the compiled code for sm_90; 4,096 operations of bf16 a cycle; nothing measured.)
"""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import aligned, computed_here
from parallel_ops.triton_kernels._math import LOG_2, exp_nonpositive, reciprocal
from parallel_ops.triton_kernels.attention.common import (
    exponential,
    kept,
    load_tile,
    place,
    runs,
    scores,
    store_tile,
    stride,
    walk,
)


@triton.jit
def _tiles(
    acc, total, largest, q, k_ptr, v_ptr, from_key, to_key, keys, first, end, k_stride, v_stride, factor, cap,
    seed, last_dropped, query_place, key_start, key_step, head, batch,
    DIMS: tl.constexpr, BLOCK_DIMS: tl.constexpr, DIMS_V: tl.constexpr, BLOCK_DIMS_V: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr, HAS_LOW: tl.constexpr, CAPPED: tl.constexpr, SIGNED: tl.constexpr,
    DROPOUT: tl.constexpr, BY_FOUR: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes in the tiles of keys from ``from_key`` to ``to_key``."""
    for start in tl.range(from_key, to_key, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        k = load_tile(k_ptr, start, keys, k_stride, BLOCK_KEYS, DIMS, BLOCK_DIMS, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s, _ = scores(s, factor, cap, CAPPED, FAST)
        if SIGNED:
            s *= factor
        if MASKED:
            there = key[None, :] < end[:, None]
            if HAS_LOW:
                there &= key[None, :] >= first[:, None]
            s = tl.where(there, s, float("-inf"))
        # Only q.k with a positive factor are still to be multiplied.
        unit = 1.0 if CAPPED or SIGNED else factor
        new = tl.maximum(largest, tl.max(s, axis=1))
        shift = new * unit
        if MASKED:
            shift = tl.where(new == float("-inf"), 0.0, shift)
        p = exponential(s * unit - shift[:, None], FAST)
        rescale = exponential(largest * unit - shift, FAST)
        total = total * rescale + tl.sum(p, axis=1)
        largest = new
        if DROPOUT:
            keep = kept(
                seed, last_dropped, query_place, tl.cast(key_start, tl.int64) + key_step * start, key_step, head, batch,
                BLOCK_KEYS, BY_FOUR, False,
            )  # fmt: skip
            p = tl.where(keep, p, 0.0)
        v = load_tile(v_ptr, start, keys, v_stride, BLOCK_KEYS, DIMS_V, BLOCK_DIMS_V, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, total, largest


_UNSPECIALISED = [
    "queries", "keys", "heads", "group", "blocks", "pairs", "section", "low", "high", "last_dropped",
    "query_start", "query_step", "key_start", "key_step", "first_head", "first_batch", "spans_stride",
    *(f"{name}_{axis}" for name in ("q", "k", "v", "out") for axis in ("token", "batch", "head")),
    "statistics_plane", "statistics_batch", "statistics_head",
]  # fmt: skip


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, statistics_ptr, spans_ptr, seed_ptr,
    queries, keys, heads, group, blocks, pairs, section, low, high, factor, cap, kept_scale, last_dropped,
    query_start, query_step, key_start, key_step, first_head, first_batch, spans_stride,
    q_token, q_batch, q_head, k_token, k_batch, k_head, v_token, v_batch, v_head, out_token, out_batch, out_head,
    statistics_plane, statistics_batch, statistics_head,
    DIMS: tl.constexpr, BLOCK_DIMS: tl.constexpr, DIMS_V: tl.constexpr, BLOCK_DIMS_V: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, MERGE: tl.constexpr, HAS_LOW: tl.constexpr,
    CAPPED: tl.constexpr, SIGNED: tl.constexpr, DROPOUT: tl.constexpr, BY_FOUR: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # The last block sees most keys under a causal mask: it goes first.
    number, pair = place(tl.program_id(0), blocks, pairs, section)
    block, head, batch = blocks - 1 - number, pair % heads, pair // heads
    b, h, kv_head = batch.to(tl.int64), head.to(tl.int64), (head // group).to(tl.int64)
    q_ptr += b * aligned(q_batch, UNIT) + h * aligned(q_head, UNIT)
    k_ptr += b * aligned(k_batch, UNIT) + kv_head * aligned(k_head, UNIT)
    v_ptr += b * aligned(v_batch, UNIT) + kv_head * aligned(v_head, UNIT)

    from_key, whole, edge, to_key = walk(
        block, queries, keys, low, high, spans_ptr, spans_stride, BLOCK_QUERIES, BLOCK_KEYS, HAS_LOW
    )
    if MERGE and from_key >= to_key:
        return
    first_query = block * BLOCK_QUERIES
    query = first_query + tl.arange(0, BLOCK_QUERIES)
    first, end = runs(query, queries, keys, low, high, spans_ptr, spans_stride)
    seed = tl.load(seed_ptr) if DROPOUT else 0
    drawn = (query_start + query_step * query.to(tl.int64)).to(tl.uint32) if DROPOUT else query
    head += first_head if DROPOUT else 0
    batch += first_batch if DROPOUT else 0
    q = load_tile(q_ptr, first_query, queries, stride(q_token, UNIT, WIDE), BLOCK_QUERIES, DIMS, BLOCK_DIMS, True)
    acc = tl.zeros((BLOCK_QUERIES, BLOCK_DIMS_V), tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    largest = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    k_stride, v_stride = stride(k_token, UNIT, WIDE), stride(v_token, UNIT, WIDE)
    if HAS_LOW:
        acc, total, largest = _tiles(
            acc, total, largest, q, k_ptr, v_ptr, from_key, whole, keys, first, end, k_stride, v_stride, factor, cap,
            seed, last_dropped, drawn, key_start, key_step, head, batch, DIMS, BLOCK_DIMS, DIMS_V, BLOCK_DIMS_V,
            BLOCK_KEYS, True, HAS_LOW, CAPPED, SIGNED, DROPOUT, BY_FOUR, FAST, PRECISION,
        )  # fmt: skip
    acc, total, largest = _tiles(
        acc, total, largest, q, k_ptr, v_ptr, whole, edge, keys, first, end, k_stride, v_stride, factor, cap,
        seed, last_dropped, drawn, key_start, key_step, head, batch, DIMS, BLOCK_DIMS, DIMS_V, BLOCK_DIMS_V,
        BLOCK_KEYS, False, HAS_LOW, CAPPED, SIGNED, DROPOUT, BY_FOUR, FAST, PRECISION,
    )  # fmt: skip
    acc, total, largest = _tiles(
        acc, total, largest, q, k_ptr, v_ptr, edge, to_key, keys, first, end, k_stride, v_stride, factor, cap,
        seed, last_dropped, drawn, key_start, key_step, head, batch, DIMS, BLOCK_DIMS, DIMS_V, BLOCK_DIMS_V,
        BLOCK_KEYS, True, HAS_LOW, CAPPED, SIGNED, DROPOUT, BY_FOUR, FAST, PRECISION,
    )  # fmt: skip

    # Found again: registers for it are what the loops lack.
    here = computed_here(tl.program_id(0))
    number, pair = place(here, blocks, pairs, section)
    first_query = (blocks - 1 - number) * BLOCK_QUERIES
    query = first_query + tl.arange(0, BLOCK_QUERIES)
    b, h = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    out_ptr += b * aligned(out_batch, UNIT) + h * aligned(out_head, UNIT)
    statistics_ptr += b * statistics_batch + h * statistics_head
    # A maximum of -inf, of queries that see no key, has the sum 0.
    none = largest == float("-inf")
    weight = tl.where(none, 0.0, reciprocal(tl.where(none, 1.0, total), FAST))
    largest = tl.where(none, float("-inf"), largest * (1.0 if CAPPED or SIGNED else factor))
    if FAST:
        largest *= LOG_2
    mask = query < queries
    sums_ptr = statistics_ptr + tl.cast(statistics_plane, tl.int64)
    if MERGE:
        before = tl.load(statistics_ptr + query, mask=mask, other=float("-inf"))
        most = tl.maximum(before, largest)
        shift = tl.where(most == float("-inf"), 0.0, most)
        old = exp_nonpositive(before - shift, False) * tl.load(sums_ptr + query, mask=mask, other=0.0)
        ours = exp_nonpositive(largest - shift, False)
        # Both sums are 1 or more, or 0, and the larger maximum has a factor of 1.
        total = old + total * ours
        share = tl.where(total == 0.0, 0.0, reciprocal(tl.where(total == 0.0, 1.0, total), False))
        out = load_tile(
            out_ptr, first_query, queries, stride(out_token, UNIT, WIDE), BLOCK_QUERIES, DIMS_V, BLOCK_DIMS_V, True
        )
        ours *= share
        if DROPOUT:
            ours *= kept_scale
        acc = out * (old * share)[:, None] + acc * ours[:, None]
        largest = most
    else:
        if DROPOUT:
            weight *= kept_scale
        acc *= weight[:, None]
    store_tile(out_ptr, first_query, queries, stride(out_token, UNIT, WIDE), acc, DIMS_V)
    tl.store(statistics_ptr + query, largest, mask=mask)
    tl.store(sums_ptr + query, total, mask=mask)
