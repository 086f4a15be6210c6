"""Philox4x32-10, the generator behind every dropout: the words that csrc/cpu/philox.h and ops/_philox.py give.

The key is the 64-bit seed and the counter an element's global index divided by 4; the element takes output word
(index & 3). Source: Salmon et al., SC 2011, doi:10.1145/2063384.2063405.
"""

import triton
import triton.language as tl


@triton.jit
def philox4x32(seed, first, step):
    """Four blocks of uint32 for the counters ``first + step``: int64, and less than 2^31."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    low = first.to(tl.uint32)
    c0 = low + step.to(tl.uint32)
    c1 = (first >> 32).to(tl.uint32) + (c0 < low).to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        # One wide multiplication gives both halves; a product and a separate umulhi would be two.
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _four_words(seed, first, step):
    """The words of a counter in order along two new dimensions of two."""
    w0, w1, w2, w3 = philox4x32(seed, first, step)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit
def keep_block(seed, first, last_dropped, BLOCK_COLS: tl.constexpr, BY_FOUR: tl.constexpr, VECTOR: tl.constexpr):
    """Which elements of a ``[rows, BLOCK_COLS]`` block are kept.

    ``first`` is the global index of each row's first element, int64 ``[rows, 1]``. Where it is a multiple of 4 in every
    row, ``BY_FOUR`` draws once for four elements; else every element draws for itself and keeps one word of four.
    ``VECTOR`` is how many adjacent elements a thread loads at a time.
    """
    if BY_FOUR:
        if VECTOR == 8:
            # Both draws of eight elements in the thread that loads them, so that no word crosses threads.
            step = tl.arange(0, BLOCK_COLS // 8)[None, :] * 2
            words = tl.join(_four_words(seed, first >> 2, step), _four_words(seed, first >> 2, step + 1))
            words = words.permute(0, 1, 4, 2, 3)
        else:
            words = _four_words(seed, first >> 2, tl.arange(0, BLOCK_COLS // 4)[None, :])
        words = words.reshape(first.shape[0], BLOCK_COLS)
    else:
        index = first + tl.arange(0, BLOCK_COLS)[None, :]
        w0, w1, w2, w3 = philox4x32(seed, index >> 2, tl.zeros_like(index))
        lane = index & 3
        words = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return words > last_dropped.to(tl.uint32)
