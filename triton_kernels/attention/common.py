"""Shared by the attention kernels: tiles of tokens, bounds of masks, scores, dropout.

A kernel walks from a block of *own* tokens along the *others*: a query block along keys forward and for dQ, a key block
along queries for dK and dV. What an own token sees is a run of adjacent others, between two bounds. The walk goes from
the lowest first to the highest end of all runs that are not empty; between the highest first and the lowest end of all
runs nothing is masked. Bounds that are lines are so at the first and the last token of the block; spans are in any
order, with empty ones among them.
"""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import aligned
from parallel_ops.triton_kernels._math import capped, exp_nonpositive, reciprocal
from parallel_ops.triton_kernels._philox import philox_rounds


@triton.jit
def stride(n, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """The distance of tokens: a multiple of ``UNIT``, in 64 bits where 32 do not hold a tile's offsets."""
    n = aligned(n, UNIT)
    return n.to(tl.int64) if WIDE else n


@triton.jit
def place(program, blocks, pairs, section):
    """(number of the block, pair) of a program: sections of ``section`` adjacent pairs of a head and a batch one after
    the other, and in each the first blocks of all its pairs, then the second ones.

    So the programs that run last are the last blocks, which callers make the shortest, and what the programs of a
    section read stays in the L2 cache.
    """
    number = program // (blocks * section)
    first = number * section
    within = program - first * blocks
    size = tl.minimum(section, pairs - first)
    return within // size, first + within % size


@triton.jit
def load_tile(
    base, start, count, stride, TOKENS: tl.constexpr, DIMS: tl.constexpr, BLOCK_DIMS: tl.constexpr, MASKED: tl.constexpr
):
    """``[TOKENS, BLOCK_DIMS]`` from the token ``start`` on, zero outside."""
    token = tl.arange(0, TOKENS)[:, None]
    dim = tl.arange(0, BLOCK_DIMS)[None, :]
    # Tiles differ by one scalar of 64 bits; 32 bits a thread hold the rest, or 64 for wide strides.
    pointers = base + tl.cast(start, tl.int64) * stride + (token * stride + dim)
    if MASKED:
        if DIMS < BLOCK_DIMS:
            return tl.load(pointers, mask=(token < count - start) & (dim < DIMS), other=0.0)
        else:
            return tl.load(pointers, mask=token < count - start, other=0.0)
    elif DIMS < BLOCK_DIMS:
        return tl.load(pointers, mask=dim < DIMS, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(base, start, count, stride, tile, DIMS: tl.constexpr):
    token = tl.arange(0, tile.shape[0])[:, None]
    dim = tl.arange(0, tile.shape[1])[None, :]
    pointers = base + tl.cast(start, tl.int64) * stride + (token * stride + dim)
    mask = token < count - start
    if tile.shape[1] > DIMS:
        mask &= dim < DIMS
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def runs(own, own_count, other_count, low, high, spans_ptr, spans_stride):
    """First and end of what each of the tokens ``own`` sees of the others; nothing for tokens that are not there."""
    there = own < own_count
    if spans_ptr is None:
        first = tl.maximum(own + low, 0)
        end = tl.minimum(own + high + 1, other_count)
    else:
        first = tl.load(spans_ptr + own, mask=there, other=0)
        end = tl.load(spans_ptr + spans_stride + own, mask=there, other=0)
    return first, tl.where(there, end, 0)


@triton.jit
def walk(
    block, own_count, other_count, low, high, spans_ptr, spans_stride,
    OWN: tl.constexpr, OTHERS: tl.constexpr, HAS_LOW: tl.constexpr,
):  # fmt: skip
    """Start of a block's walk, start and end of its wholly visible tiles, end of the walk."""
    first_own = block * OWN
    if spans_ptr is None:
        last_own = tl.minimum(first_own + OWN, own_count) - 1
        first, whole_end = runs(first_own, own_count, other_count, low, high, spans_ptr, spans_stride)
        whole_first, end = runs(last_own, own_count, other_count, low, high, spans_ptr, spans_stride)
    else:
        own = first_own + tl.arange(0, OWN)
        firsts, ends = runs(own, own_count, other_count, low, high, spans_ptr, spans_stride)
        whole_first, end = tl.max(firsts, axis=0), tl.max(tl.where(firsts < ends, ends, 0), axis=0)
        first = tl.min(tl.where(firsts < ends, firsts, other_count), axis=0)
        whole_end = tl.minimum(tl.min(tl.where(own < own_count, ends, other_count), axis=0), end)
    whole_end = tl.maximum(whole_end, 0) // OTHERS * OTHERS
    if HAS_LOW:
        first = tl.minimum(first, end) // OTHERS * OTHERS
        whole_first = tl.minimum((whole_first + OTHERS - 1) // OTHERS * OTHERS, tl.maximum(end, first))
        return first, whole_first, tl.maximum(whole_first, whole_end), end
    else:
        return 0, 0, whole_end, end


@triton.jit
def scores(products, factor, cap, CAPPED: tl.constexpr, FAST: tl.constexpr):
    """Scores in what ``exponential`` takes, up to the factor of uncapped ones, and the slope of the cap."""
    if not CAPPED:
        return products, products
    elif FAST:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): `factor` turns q.k into exponents of two, of exp(2 x).
        r = reciprocal(1.0 + tl.exp2(products * factor), True)
        return cap - 2.0 * cap * r, 4.0 * (r - r * r)
    else:
        return capped(products * factor, cap)


@triton.jit
def exponential(x, FAST: tl.constexpr):
    """2^x for 16-bit data, whose scores are in units of log(2); exp(x) for fp32, as exact as fp32 is."""
    if FAST:
        return tl.exp2(x)
    else:
        return exp_nonpositive(x, False)


@triton.jit
def kept(
    seed, last_dropped, query, key, step, head, batch,
    KEYS: tl.constexpr, BY_FOUR: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """The keep mask of dropout for a tile of ``KEYS`` keys, the first at place ``key``, and queries at ``query``.

    ``[queries, keys]``, or the other way round if ``KEYS_FIRST``. ``BY_FOUR``: the keys are adjacent and ``key`` is a
    multiple of four, so four keys share a draw.
    """
    head, batch = tl.cast(head, tl.uint32), tl.cast(batch, tl.uint32)
    last_dropped = last_dropped.to(tl.uint32)
    query = query[None, :] if KEYS_FIRST else query[:, None]
    if BY_FOUR:
        number = tl.arange(0, KEYS // 4)
        counter = (key >> 2).to(tl.uint32) + (number[:, None] if KEYS_FIRST else number[None, :]).to(tl.uint32)
        w0, w1, w2, w3 = philox_rounds(seed, counter, query, head, batch)
        keep = tl.join(tl.join(w0 > last_dropped, w2 > last_dropped), tl.join(w1 > last_dropped, w3 > last_dropped))
        if KEYS_FIRST:
            return keep.permute(0, 2, 3, 1).reshape(KEYS, query.shape[1])
        else:
            return keep.reshape(query.shape[0], KEYS)
    else:
        number = tl.arange(0, KEYS)
        place = key + step * (number[:, None] if KEYS_FIRST else number[None, :]).to(tl.int64)
        w0, w1, w2, w3 = philox_rounds(seed, (place >> 2).to(tl.uint32), query, head, batch)
        lane = place & 3
        return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)) > last_dropped
