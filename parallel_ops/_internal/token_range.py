"""Evenly spaced tokens of a sequence: shards and blocks of attention. Integers alone, no torch: the planner uses it."""

from typing import NamedTuple


class TokenRange(NamedTuple):
    """Tokens ``start, start + step, ...`` of the whole sequence, ``length`` of them."""

    start: int
    length: int
    step: int = 1

    @property
    def last(self) -> int:
        return self.start + self.step * (self.length - 1)
