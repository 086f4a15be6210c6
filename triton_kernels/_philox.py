"""Philox4x32-10, the generator behind every dropout: the words that csrc/cpu/philox.h and ops/_philox.py give.

The key is the 64-bit seed and the counter an element's global index divided by 4; the element takes output word
(index & 3). Source: Salmon et al., SC 2011, doi:10.1145/2063384.2063405.
"""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import COMPILED


@triton.jit
def _product(x, FACTOR: tl.constexpr):
    """The upper and the lower word of ``x * FACTOR``.

    By one wide multiplication: the compiler takes two for some products that are written as one.
    """
    if COMPILED and len(x.shape) > 0:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 product; mul.wide.u32 product, $2, $3; mov.b64 {$1, $0}, product; }", "=r,=r,r,r",
            [x, tl.full((), FACTOR, tl.uint32)], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        product = x.to(tl.uint64) * FACTOR
        return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox_rounds(seed, c0, c1, c2, c3):
    """Four blocks of uint32 for counters of uint32, which need not have one shape yet."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        a_high, a_low = _product(c0, 0xD2511F53)
        b_high, b_low = _product(c2, 0xCD9E8D57)
        c0, c1 = b_high ^ c1 ^ k0, b_low
        c2, c3 = a_high ^ c3 ^ k1, a_low
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def philox4x32(seed, low, high):
    """Four blocks of uint32 for the counters whose words are ``low`` and ``high``.

    A ``high`` that is one number costs the first two rounds half of their products.
    """
    return philox_rounds(seed, low, high, tl.zeros((), tl.uint32), tl.zeros((), tl.uint32))


@triton.jit
def _four_words(seed, first, step, high, CARRY: tl.constexpr):
    """The words of the counters ``first + step`` in order along two new dimensions of two."""
    low = first.to(tl.uint32) + step.to(tl.uint32)
    if CARRY:
        high = ((first + step) >> 32).to(tl.uint32)
    w0, w1, w2, w3 = philox4x32(seed, low, high)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit
def keep_block(
    seed, index_offset, first, last_dropped, BLOCK_COLS: tl.constexpr, BY_FOUR: tl.constexpr, CARRY: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Which elements of a ``[rows, BLOCK_COLS]`` block are kept.

    ``first`` is the global index of each row's first element, int64 ``[rows, 1]``. Where it is a multiple of 4 in every
    row, ``BY_FOUR`` draws once for four elements; else every element draws for itself and keeps one word of four.
    Without ``CARRY`` all counters of the tensor, which starts at ``index_offset``, have the same upper word.
    ``VECTOR`` is how many adjacent elements a thread loads at a time.
    """
    high = (index_offset >> 34).to(tl.uint32)
    if BY_FOUR:
        if VECTOR == 8:
            # Both draws of eight elements in the thread that loads them, so that no word crosses threads.
            step = tl.arange(0, BLOCK_COLS // 8)[None, :] * 2
            words = tl.join(
                _four_words(seed, first >> 2, step, high, CARRY), _four_words(seed, first >> 2, step + 1, high, CARRY)
            )
            words = words.permute(0, 1, 4, 2, 3)
        else:
            words = _four_words(seed, first >> 2, tl.arange(0, BLOCK_COLS // 4)[None, :], high, CARRY)
        words = words.reshape(first.shape[0], BLOCK_COLS)
    else:
        index = first + tl.arange(0, BLOCK_COLS)[None, :]
        if CARRY:
            high = (index >> 34).to(tl.uint32)
        w0, w1, w2, w3 = philox4x32(seed, (index >> 2).to(tl.uint32), high)
        lane = index & 3
        words = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return words > last_dropped.to(tl.uint32)
