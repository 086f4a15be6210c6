"""Philox4x32-10 in plain PyTorch: the oracle of the compiled and Triton generators, and what references draw from.

    words     = Philox(key = seed, counter = i >> 2)         i: global index of an element, seed: 64 bits
    kept[i]   = words[i & 3] >= round(p 2^32)

A mask so drawn depends on the seed and on where an element stands in the whole tensor, on nothing else: the same on
every device and for every sharding. Source: Salmon et al., SC 2011, doi:10.1145/2063384.2063405.
"""

import torch
from torch import Tensor

# Below this, round(p 2^32) is zero: nothing is dropped, so nothing is drawn.
SMALLEST_P = 2.0**-33

_MASK = 0xFFFFFFFF
Words = tuple[Tensor, Tensor, Tensor, Tensor]


def threshold(p: float) -> int:
    """Elements whose word is below this are dropped: ``p`` as a fraction of 2^32, 2^32 itself for ``p = 1``."""
    return int(p * 2.0**32 + 0.5)


def kept_scale(p: float) -> float:
    """The factor of kept elements; with ``p = 1`` there are none, and 0 keeps infinity out of the arithmetic."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds on int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 products wrap; their 64 bits are right
        c0, c1 = (b >> 32) & _MASK ^ c1 ^ k0, b & _MASK
        c2, c3 = (a >> 32) & _MASK ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def keep_mask(
    shape: torch.Size, p: float, seed: Tensor, index_offset: int, row_positions: Tensor | None = None
) -> Tensor:
    """True where an element is kept; ``shape[...]`` counted in contiguous order from ``index_offset``, with
    ``row_positions`` as that many rows ``shape[1:]`` of a larger tensor."""
    index = torch.arange(shape.numel(), device=seed.device)
    if row_positions is not None:
        width = shape[1:].numel()
        index = (row_positions[:, None] * width + index[:width]).flatten()
    index = index + index_offset
    counter, zero = index >> 2, torch.zeros_like(index)
    seed = seed.reshape(())
    words = philox4x32((counter & _MASK, counter >> 32, zero, zero), (seed & _MASK, (seed >> 32) & _MASK))
    word = torch.stack(words).gather(0, (index & 3)[None])
    return (word >= threshold(p)).view(shape)
