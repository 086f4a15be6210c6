"""Evenly spaced tokens of a sequence, and bounds of its documents. Integers alone, no torch: the planner uses it."""

from collections.abc import Sequence
from typing import NamedTuple


class TokenRange(NamedTuple):
    """Tokens ``start, start + step, ...`` of the whole sequence, ``length`` of them."""

    start: int
    length: int
    step: int = 1

    @property
    def last(self) -> int:
        return self.start + self.step * (self.length - 1)


def rises(cu_seqlens: Sequence[int], length: int) -> bool:
    """Whether the bounds of documents never decrease from 0 to ``length``."""
    return cu_seqlens[0] == 0 and cu_seqlens[-1] == length and sorted(cu_seqlens) == list(cu_seqlens)
