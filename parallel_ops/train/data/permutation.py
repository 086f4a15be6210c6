"""A pseudo-random order of n items that is computed item by item: no table, so n may be any corpus.

A Feistel network permutes the numbers of b bits, ``2^(b-1) < n <= 2^b``. With ``left`` the upper ``b // 2`` bits and
``right`` the others, each round is

    left, right = right, left xor hash(right + key[round])        the widths of the two change places too

which can be undone whatever the hash is. A result of n or more goes through the network again until it is below n
(cycle walking): every number below n is on a cycle of the network, and so comes to the next such number on it. On
average that takes less than two passes.

Sources: Luby and Rackoff, doi:10.1137/0217022; Black and Rogaway, doi:10.1007/3-540-45760-7_9. The hash is the
finalizer of SplitMix64: Steele et al., doi:10.1145/2714064.2660195.
"""

import numpy as np
from numpy.typing import NDArray

# Even, so that both halves have their widths back. Four suffice for wide halves (Luby and Rackoff); after 12 five items
# do not have all their orders equally often, after 24 they do.
_ROUNDS, _ROUNDS_OF_FEW_BITS, _FEW_BITS = 8, 24, 12
# Beside np.random.SeedSequence([seed, epoch]) itself, from which the order of documents is drawn.
_KEYS = 1


class Permutation:
    """A bijection of ``0 .. size - 1``: the same for the same size, seed and epoch, on any machine."""

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        self.size = size
        bits = (size - 1).bit_length()
        # Shift and mask of the right half, in the first round and in the second.
        self._widths = bits - bits // 2, bits // 2
        rounds = _ROUNDS_OF_FEW_BITS if bits <= _FEW_BITS else _ROUNDS
        self._keys = np.random.SeedSequence([seed, epoch], spawn_key=(_KEYS,)).generate_state(rounds, np.uint64)

    def __call__(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """The place of each item: int64, of the shape of ``items``, which are below ``size``."""
        found = self._network(items.astype(np.uint64))
        while (outside := found >= self.size).any():
            found[outside] = self._network(found[outside])
        return found.astype(np.int64)

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        width, other = self._widths
        left, right = values >> np.uint64(width), values & _mask(width)
        for key in self._keys:
            left, right = right, left ^ (_hash(right + key) & _mask(other))
            width, other = other, width
        return left << np.uint64(width) | right


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _hash(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
