"""The ways in which a linear over a group communicates, and how long one takes given its products and messages.

A gather multiplies the own rows first, then those that arrive; a scatter the own rows last. Messages follow one after
the other, those of a gather without waiting for a product, those of a scatter each behind its product.
"""

import functools
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Literal

Phase = Literal["gather", "scatter"]

# Streams on which products take turns where they can.
LANES = 2

# Codes of the ways, as in the ops' schemas; positive numbers are pieces of a rank's shard.
OFF = 0
# A message for each shard, and products of one shard, two, four and so on.
TAPERED = -5
# Gathers over symmetric memory: a product that waits for flags, and torch's own op, which the model does not know.
GATED, FUSED = -3, -4


def cut(way: int) -> int:
    """Messages of a shard, of a way that ``is_cut``."""
    return max(1, way)


def is_cut(way: int) -> bool:
    """Whether shards are multiplied apart, as messages bring or take them."""
    return way > OFF or way == TAPERED


def order(phase: Phase, size: int, rank: int, way: int) -> tuple[int, ...]:
    """How many messages each product takes on ``rank``, own rows left out.

    ``TAPERED``: a product of a gather takes as many shards as were multiplied before it, the own one among them, but
    none behind the last rank's, since the first rank's does not lie beside it. A scatter is the mirror image.
    """
    if way != TAPERED:
        return (1,) * ((size - 1) * cut(way))
    found, done, runs = [], 1, (size - 1 - rank, rank)
    for run in runs if phase == "gather" else runs[::-1]:
        left = run
        while left:
            found.append(min(done, left))
            left, done = left - found[-1], done + found[-1]
    return tuple(found if phase == "gather" else found[::-1])


@functools.cache
def orders(phase: Phase, size: int, way: int) -> tuple[tuple[int, ...], ...]:
    """The orders of all ranks, each once."""
    ranks = range(size if way == TAPERED else 1)
    return tuple(sorted({order(phase, size, rank, way) for rank in ranks}))


def slowest(phase: Phase, size: int, pieces: int, product: float, message: float) -> float:
    """Seconds of a way on the slowest rank, one product after the other, without staging and sums.

    Args:
        product: of the product of one message's rows, n times as long for n of them. message: of a message.
    """
    found = []
    for order in orders(phase, size, pieces):
        one = Processors(1, [(0.0, 1)], 0.0, product, {n: n for n in (1, *order)})
        found.append(finished(phase, order, cut(pieces), one.run, message))
    return max(found)


class Processors:
    """Those of a device: products take turns on streams, and their tiles the first processors that are free.

    Args:
        free: since when how many are, in order. tile: seconds of a tile. tiles: of a product, by its number of
        messages.
    """

    def __init__(
        self, lanes: int, free: Sequence[tuple[float, int]], launch: float, tile: float, tiles: dict[int, int]
    ) -> None:
        self._launch, self._tile, self._tiles, self._free = launch, tile, tiles, list(free)
        self._ends = [0.0] * lanes  # of the last products, the next one's stream first

    def run(self, messages: int, ready: float) -> float:
        """The end of the next product, which may start at ``ready``."""
        start = max(ready, self._ends.pop(0)) + self._launch
        end = self._computed(start, self._tiles[messages])
        self._ends.append(end)
        return end

    def _computed(self, start: float, tiles: int) -> float:
        last = start
        while tiles:
            # Those that are free before the first has done one more tile all take one, again and again until another
            # is free, too.
            first = max(self._free[0][0], start)
            near = [(max(since, start), count) for since, count in self._free if since <= first + self._tile]
            later, many = self._free[len(near) :], sum(count for _, count in near)
            rounds = tiles // many
            if later:
                rounds = min(rounds, int((later[0][0] - near[-1][0]) / self._tile))
            if rounds:
                near = [(since + rounds * self._tile, count) for since, count in near]
                self._free, last, tiles = near + later, max(last, near[-1][0]), tiles - rounds * many
                continue
            since, count = self._free.pop(0)
            taken = min(count, tiles)
            if taken < count:
                self._free.insert(0, (since, count - taken))
            end = max(since, start) + self._tile
            insort(self._free, (end, taken))
            last, tiles = max(last, end), tiles - taken
        return last


def finished(phase: Phase, order: Sequence[int], own: int, run: Callable[[int, float], float], message: float) -> float:
    """Seconds until the last product and message are done.

    Args:
        order: messages of each product. own: products of own rows. run: the end of the next product, of so many
            messages' rows, that may start then.
    """
    end = link = 0.0
    if phase == "gather":
        end = max(run(1, 0.0) for _ in range(own))
        for n in order:
            link += n * message
            end = max(end, run(n, link))
        return end
    for n in order:
        link = max(run(n, 0.0), link) + n * message
    return max(link, *(run(1, 0.0) for _ in range(own)))
