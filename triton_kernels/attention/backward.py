"""The backward of block attention: dK and dV by blocks of keys along queries, dQ by blocks of queries along keys.

Two kernels that each compute the scores again, seven matmuls instead of five, so that no program adds to what another
one writes: no atomics, the same bits on every run. Limited by the tensor cores: whole tiles at 128 dims take an H100
1,024 and 1,536 cycles of matmuls beside 550 and 570 of issue, at 64 dims 1,024 and 768 beside 680 and 490 (counted in
the compiled code for sm_90, 4,096 operations of bf16 a cycle; nothing measured).
"""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import aligned, computed_here
from parallel_ops.triton_kernels._math import LOG2_E
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
def _row_values(pointer, query, queries, FACTOR: tl.constexpr):
    """``FACTOR`` times the shift, weight or delta of queries; zero for those that are not there."""
    x = tl.load(pointer + query, mask=query < queries, other=0.0)
    return x if FACTOR == 1.0 else x * FACTOR


@triton.jit
def _keys_tiles(
    dk, dv, k, v, q_ptr, grad_ptr, rows_ptr, rows_plane, from_query, to_query, queries, first, end, q_stride,
    grad_stride,
    factor, cap, kept_scale, seed, last_dropped, key_place, key_step, query_start, query_step, head, batch,
    DIMS: tl.constexpr, BLOCK_DIMS: tl.constexpr, DIMS_V: tl.constexpr, BLOCK_DIMS_V: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, AFTER_FIRST: tl.constexpr, BEFORE_END: tl.constexpr,
    CAPPED: tl.constexpr, DROPOUT: tl.constexpr, BY_FOUR: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes in the tiles of queries from ``from_query`` to ``to_query``; scores are ``[keys, queries]``.

    ``AFTER_FIRST``, ``BEFORE_END``: whether runs may begin or end within the tiles.
    """
    for start in tl.range(from_query, to_query, BLOCK_QUERIES):
        query = start + tl.arange(0, BLOCK_QUERIES)
        # Queries that are not there are zeros throughout, and so is what they add: only bounds of runs need a mask.
        q = load_tile(q_ptr, start, queries, q_stride, BLOCK_QUERIES, DIMS, BLOCK_DIMS, True)
        shift = _row_values(rows_ptr, query, queries, LOG2_E if FAST else 1.0)
        s, slope = scores(tl.dot(k, tl.trans(q), input_precision=PRECISION), factor, cap, CAPPED, FAST)
        p = exponential(s * (1.0 if CAPPED else factor) - shift[None, :], FAST)
        if not FAST:
            p *= _row_values(rows_ptr + rows_plane, query, queries, 1.0)[None, :]
        if AFTER_FIRST:
            p = tl.where(query[None, :] >= first[:, None], p, 0.0)
        if BEFORE_END:
            p = tl.where(query[None, :] < end[:, None], p, 0.0)
        grad = load_tile(grad_ptr, start, queries, grad_stride, BLOCK_QUERIES, DIMS_V, BLOCK_DIMS_V, True)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        if DROPOUT:
            drawn = (tl.cast(query_start, tl.int64) + query_step * query.to(tl.int64)).to(tl.uint32)
            keep = kept(seed, last_dropped, drawn, key_place, key_step, head, batch, BLOCK_KEYS, BY_FOUR, True)
            dv = tl.dot(tl.where(keep, p, 0.0).to(grad.dtype), grad, dv, input_precision=PRECISION)
            dp = tl.where(keep, dp * kept_scale, 0.0)
        else:
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        ds = p * (dp - _row_values(rows_ptr + 2 * rows_plane, query, queries, 1.0)[None, :])
        if CAPPED:
            ds *= slope
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _keys_place(program, blocks, pairs, section, kv_heads, splits):
    """(block, part of the group, kv head, batch) of a program. Early keys are seen by most queries under a causal mask:
    they go first."""
    block, pair = place(program, blocks, pairs, section)
    return block, pair % splits, pair // splits % kv_heads, pair // splits // kv_heads


_UNSPECIALISED = [
    "queries", "keys", "heads", "group", "blocks", "pairs", "section", "splits", "low", "high", "last_dropped",
    "query_start", "query_step", "key_start", "key_step", "first_head", "first_batch", "spans_stride",
    *(f"{name}_{axis}" for name in ("grad", "q", "k", "v", "dq", "dk", "dv") for axis in ("token", "batch", "head")),
    "rows_plane", "rows_batch", "rows_head",
]  # fmt: skip


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _keys_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, rows_ptr, dk_ptr, dv_ptr, spans_ptr, seed_ptr,
    queries, keys, heads, group, blocks, pairs, section, splits, low, high, factor, cap, scale, kept_scale,
    last_dropped, query_start, query_step, key_start, key_step, first_head, first_batch, spans_stride,
    grad_token, grad_batch, grad_head, q_token, q_batch, q_head, k_token, k_batch, k_head, v_token, v_batch, v_head,
    dk_token, dk_batch, dk_head, dv_token, dv_batch, dv_head, rows_plane, rows_batch, rows_head,
    DIMS: tl.constexpr, BLOCK_DIMS: tl.constexpr, DIMS_V: tl.constexpr, BLOCK_DIMS_V: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    CAPPED: tl.constexpr, DROPOUT: tl.constexpr, BY_FOUR: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys: of all queries that see it, of one of ``splits`` parts of the heads of its group,
    in their order. Part n writes to batch ``n batches + batch`` of dk and dv."""
    kv_heads = heads // group
    members = group // splits
    block, part, kv_head, batch = _keys_place(tl.program_id(0), blocks, pairs, section, kv_heads, splits)
    b, h = batch.to(tl.int64), kv_head.to(tl.int64)
    k_ptr += b * aligned(k_batch, UNIT) + h * aligned(k_head, UNIT)
    v_ptr += b * aligned(v_batch, UNIT) + h * aligned(v_head, UNIT)
    first_key = block * BLOCK_KEYS
    k = load_tile(k_ptr, first_key, keys, stride(k_token, UNIT, WIDE), BLOCK_KEYS, DIMS, BLOCK_DIMS, True)
    v = load_tile(v_ptr, first_key, keys, stride(v_token, UNIT, WIDE), BLOCK_KEYS, DIMS_V, BLOCK_DIMS_V, True)
    dk = tl.zeros((BLOCK_KEYS, BLOCK_DIMS), tl.float32)
    dv = tl.zeros((BLOCK_KEYS, BLOCK_DIMS_V), tl.float32)
    q_stride, grad_stride = stride(q_token, UNIT, WIDE), stride(grad_token, UNIT, WIDE)
    for member in range(0, members):
        # All of this is the same for every member, or nearly; there are no registers to keep it in meanwhile.
        here = computed_here(tl.program_id(0))
        block, part, kv_head, batch = _keys_place(here, blocks, pairs, section, kv_heads, splits)
        head = kv_head * group + part * members + member
        b, g = batch.to(tl.int64), head.to(tl.int64)
        from_query, whole, edge, to_query = walk(
            block, keys, queries, low, high, spans_ptr, spans_stride, BLOCK_KEYS, BLOCK_QUERIES, HAS_LOW
        )
        key = block * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        first, end = runs(key, keys, queries, low, high, spans_ptr, spans_stride)
        key_place = tl.cast(key_start, tl.int64) + key_step * (block * BLOCK_KEYS).to(tl.int64) if DROPOUT else 0
        seed = tl.load(seed_ptr) if DROPOUT else 0
        drawn_batch = batch + first_batch if DROPOUT else batch
        q_of_head = q_ptr + b * aligned(q_batch, UNIT) + g * aligned(q_head, UNIT)
        grad_of_head = grad_ptr + b * aligned(grad_batch, UNIT) + g * aligned(grad_head, UNIT)
        rows_of_head = rows_ptr + b * rows_batch + g * rows_head
        plane = tl.cast(rows_plane, tl.int64)
        drawn = head + first_head if DROPOUT else head
        if HAS_LOW:
            dk, dv = _keys_tiles(
                dk, dv, k, v, q_of_head, grad_of_head, rows_of_head, plane, from_query, whole, queries, first,
                end, q_stride, grad_stride, factor, cap, kept_scale, seed, last_dropped, key_place, key_step,
                query_start, query_step, drawn, drawn_batch, DIMS, BLOCK_DIMS, DIMS_V, BLOCK_DIMS_V,
                BLOCK_QUERIES, BLOCK_KEYS, True, HAS_HIGH, CAPPED, DROPOUT, BY_FOUR, FAST, PRECISION,
            )  # fmt: skip
        whole_end = edge if HAS_HIGH else to_query
        dk, dv = _keys_tiles(
            dk, dv, k, v, q_of_head, grad_of_head, rows_of_head, plane, whole, whole_end, queries, first,
            end, q_stride, grad_stride, factor, cap, kept_scale, seed, last_dropped, key_place, key_step,
            query_start, query_step, drawn, drawn_batch, DIMS, BLOCK_DIMS, DIMS_V, BLOCK_DIMS_V,
            BLOCK_QUERIES, BLOCK_KEYS, False, False, CAPPED, DROPOUT, BY_FOUR, FAST, PRECISION,
        )  # fmt: skip
        if HAS_HIGH:
            dk, dv = _keys_tiles(
                dk, dv, k, v, q_of_head, grad_of_head, rows_of_head, plane, edge, to_query, queries, first,
                end, q_stride, grad_stride, factor, cap, kept_scale, seed, last_dropped, key_place, key_step,
                query_start, query_step, drawn, drawn_batch, DIMS, BLOCK_DIMS, DIMS_V, BLOCK_DIMS_V,
                BLOCK_QUERIES, BLOCK_KEYS, HAS_LOW, True, CAPPED, DROPOUT, BY_FOUR, FAST, PRECISION,
            )  # fmt: skip
    here = computed_here(tl.program_id(0))
    block, part, kv_head, batch = _keys_place(here, blocks, pairs, section, kv_heads, splits)
    batch += part * (pairs // (kv_heads * splits))
    b, h, first_key = batch.to(tl.int64), kv_head.to(tl.int64), block * BLOCK_KEYS
    dk_ptr += b * aligned(dk_batch, UNIT) + h * aligned(dk_head, UNIT)
    dv_ptr += b * aligned(dv_batch, UNIT) + h * aligned(dv_head, UNIT)
    store_tile(dk_ptr, first_key, keys, stride(dk_token, UNIT, WIDE), dk * scale, DIMS)
    store_tile(dv_ptr, first_key, keys, stride(dv_token, UNIT, WIDE), dv * kept_scale if DROPOUT else dv, DIMS_V)


@triton.jit
def _queries_tiles(
    dq, q, grad, shift, weight, delta, k_ptr, v_ptr, from_key, to_key, keys, first, end, k_stride, v_stride,
    factor, cap, kept_scale, seed, last_dropped, query_place, key_start, key_step, head, batch,
    DIMS: tl.constexpr, BLOCK_DIMS: tl.constexpr, DIMS_V: tl.constexpr, BLOCK_DIMS_V: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr, HAS_LOW: tl.constexpr, CAPPED: tl.constexpr, DROPOUT: tl.constexpr,
    BY_FOUR: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes in the tiles of keys from ``from_key`` to ``to_key``."""
    for start in tl.range(from_key, to_key, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        k = load_tile(k_ptr, start, keys, k_stride, BLOCK_KEYS, DIMS, BLOCK_DIMS, MASKED)
        v = load_tile(v_ptr, start, keys, v_stride, BLOCK_KEYS, DIMS_V, BLOCK_DIMS_V, MASKED)
        s, slope = scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), factor, cap, CAPPED, FAST)
        p = exponential(s * (1.0 if CAPPED else factor) - shift[:, None], FAST)
        if not FAST:
            p *= weight[:, None]
        if MASKED:
            there = key[None, :] < end[:, None]
            if HAS_LOW:
                there &= key[None, :] >= first[:, None]
            p = tl.where(there, p, 0.0)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            keep = kept(
                seed, last_dropped, query_place, tl.cast(key_start, tl.int64) + key_step * start, key_step, head, batch,
                BLOCK_KEYS, BY_FOUR, False,
            )  # fmt: skip
            dp = tl.where(keep, dp * kept_scale, 0.0)
        ds = p * (dp - delta[:, None])
        if CAPPED:
            ds *= slope
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _queries_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, rows_ptr, dq_ptr, spans_ptr, seed_ptr,
    queries, keys, heads, group, blocks, pairs, section, low, high, factor, cap, scale, kept_scale, last_dropped,
    query_start, query_step, key_start, key_step, first_head, first_batch, spans_stride,
    grad_token, grad_batch, grad_head, q_token, q_batch, q_head, k_token, k_batch, k_head, v_token, v_batch, v_head,
    dq_token, dq_batch, dq_head, rows_plane, rows_batch, rows_head,
    DIMS: tl.constexpr, BLOCK_DIMS: tl.constexpr, DIMS_V: tl.constexpr, BLOCK_DIMS_V: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, ACCUMULATE: tl.constexpr, HAS_LOW: tl.constexpr,
    CAPPED: tl.constexpr, DROPOUT: tl.constexpr, BY_FOUR: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dQ of a block of queries, or what this block of keys adds to it."""
    number, pair = place(tl.program_id(0), blocks, pairs, section)
    block, head, batch = blocks - 1 - number, pair % heads, pair // heads
    b, h, kv_head = batch.to(tl.int64), head.to(tl.int64), (head // group).to(tl.int64)
    from_key, whole, edge, to_key = walk(
        block, queries, keys, low, high, spans_ptr, spans_stride, BLOCK_QUERIES, BLOCK_KEYS, HAS_LOW
    )
    if ACCUMULATE and from_key >= to_key:
        return
    k_ptr += b * aligned(k_batch, UNIT) + kv_head * aligned(k_head, UNIT)
    v_ptr += b * aligned(v_batch, UNIT) + kv_head * aligned(v_head, UNIT)
    q_ptr += b * aligned(q_batch, UNIT) + h * aligned(q_head, UNIT)
    grad_ptr += b * aligned(grad_batch, UNIT) + h * aligned(grad_head, UNIT)
    first_query = block * BLOCK_QUERIES
    query = first_query + tl.arange(0, BLOCK_QUERIES)
    first, end = runs(query, queries, keys, low, high, spans_ptr, spans_stride)
    seed = tl.load(seed_ptr) if DROPOUT else 0
    drawn = (tl.cast(query_start, tl.int64) + query_step * query.to(tl.int64)).to(tl.uint32) if DROPOUT else query
    head += first_head if DROPOUT else 0
    batch += first_batch if DROPOUT else 0
    q = load_tile(q_ptr, first_query, queries, stride(q_token, UNIT, WIDE), BLOCK_QUERIES, DIMS, BLOCK_DIMS, True)
    grad = load_tile(
        grad_ptr, first_query, queries, stride(grad_token, UNIT, WIDE), BLOCK_QUERIES, DIMS_V, BLOCK_DIMS_V, True
    )
    rows_ptr += b * rows_batch + h * rows_head
    plane = tl.cast(rows_plane, tl.int64)
    shift = _row_values(rows_ptr, query, queries, LOG2_E if FAST else 1.0)
    weight = shift if FAST else _row_values(rows_ptr + plane, query, queries, 1.0)
    delta = _row_values(rows_ptr + 2 * plane, query, queries, 1.0)
    dq = tl.zeros((BLOCK_QUERIES, BLOCK_DIMS), tl.float32)
    k_stride, v_stride = stride(k_token, UNIT, WIDE), stride(v_token, UNIT, WIDE)
    if HAS_LOW:
        dq = _queries_tiles(
            dq, q, grad, shift, weight, delta, k_ptr, v_ptr, from_key, whole, keys, first, end, k_stride, v_stride,
            factor, cap, kept_scale, seed, last_dropped, drawn, key_start, key_step, head, batch,
            DIMS, BLOCK_DIMS, DIMS_V, BLOCK_DIMS_V, BLOCK_KEYS, True, HAS_LOW, CAPPED, DROPOUT, BY_FOUR, FAST,
            PRECISION,
        )  # fmt: skip
    dq = _queries_tiles(
        dq, q, grad, shift, weight, delta, k_ptr, v_ptr, whole, edge, keys, first, end, k_stride, v_stride,
        factor, cap, kept_scale, seed, last_dropped, drawn, key_start, key_step, head, batch,
        DIMS, BLOCK_DIMS, DIMS_V, BLOCK_DIMS_V, BLOCK_KEYS, False, HAS_LOW, CAPPED, DROPOUT, BY_FOUR, FAST, PRECISION,
    )  # fmt: skip
    dq = _queries_tiles(
        dq, q, grad, shift, weight, delta, k_ptr, v_ptr, edge, to_key, keys, first, end, k_stride, v_stride,
        factor, cap, kept_scale, seed, last_dropped, drawn, key_start, key_step, head, batch,
        DIMS, BLOCK_DIMS, DIMS_V, BLOCK_DIMS_V, BLOCK_KEYS, True, HAS_LOW, CAPPED, DROPOUT, BY_FOUR, FAST, PRECISION,
    )  # fmt: skip
    dq *= scale
    dq_ptr += b * aligned(dq_batch, UNIT) + h * aligned(dq_head, UNIT)
    if ACCUMULATE:
        dq += load_tile(
            dq_ptr, first_query, queries, stride(dq_token, UNIT, WIDE), BLOCK_QUERIES, DIMS, BLOCK_DIMS, True
        )
    store_tile(dq_ptr, first_query, queries, stride(dq_token, UNIT, WIDE), dq, DIMS)
