"""Which tokens of a sequence a rank has, and which of them the queries of another see. Integers alone: no torch.

    contiguous   rank r has one run of adjacent tokens
    zigzag       the sequence is cut in 2 P chunks; rank r has chunks r and 2 P - 1 - r, so that under a causal mask all
                 ranks have as much to do in every step
    striped      token i is on rank i mod P

Nothing needs to divide: chunks differ by one token at most, and where there are fewer tokens than ranks some ranks have
none. A rank keeps its tokens in the order of the sequence, run after run. Sources: Liu et al., arXiv:2310.01889 (ring);
Brandon et al., arXiv:2311.09431 (striped).

Where ``together`` neighbouring ranks share out the heads, they see the union of their tokens: a shard of the same
layout over ``ranks / together``. Neighbours have adjacent numbers, as the GPUs of a node have, but for striped tokens,
where every ``ranks / together``-th rank is one, since that makes the union striped too.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

LAYOUTS = ("zigzag", "striped", "contiguous")


class Run(NamedTuple):
    """Tokens ``start, start + step, ...`` of the sequence, ``length`` of them, at least one."""

    start: int
    length: int
    step: int = 1

    @property
    def last(self) -> int:
        return self.start + self.step * (self.length - 1)


@functools.lru_cache(maxsize=4096)
def runs(layout: str, length: int, ranks: int, rank: int, together: int = 1) -> tuple[Run, ...]:
    """What ``rank`` of the sequence's ``length`` tokens has, with its neighbours if ``together`` is more than one."""
    members = neighbours(layout, ranks, rank, together)
    if layout == "striped":
        step, first = ranks // together, members[0]
        found = [Run(first, -(-(length - first) // step), step)]
    else:
        chunks, low, high = (ranks, members[0], members[-1] + 1)
        spans = [(low, high)]
        if layout == "zigzag":
            chunks = 2 * ranks
            spans.append((chunks - high, chunks - low))
        edges = [(_edge(length, chunks, first), _edge(length, chunks, end)) for first, end in spans]
        if len(edges) == 2 and edges[0][1] == edges[1][0]:
            edges = [(edges[0][0], edges[1][1])]
        found = [Run(first, end - first) for first, end in edges]
    return tuple(run for run in found if run.length > 0)


def _edge(length: int, chunks: int, chunk: int) -> int:
    """Where a chunk starts; the first chunks get one more token where the length does not divide."""
    return chunk * (length // chunks) + min(chunk, length % chunks)


def neighbours(layout: str, ranks: int, rank: int, together: int) -> tuple[int, ...]:
    """The ranks that share out the heads with ``rank``, itself included."""
    apart = ranks // together
    if layout == "striped":
        return tuple(range(rank % apart, ranks, apart))
    first = rank // together * together
    return tuple(range(first, first + together))


def counterparts(layout: str, ranks: int, rank: int, together: int) -> tuple[int, ...]:
    """The ranks that have the heads of ``rank``, itself included, in the order of the ring."""
    apart = ranks // together
    if layout == "striped":
        first = rank // apart * apart
        return tuple(range(first, first + apart))
    return tuple(range(rank % together, ranks, together))


def lengths(layout: str, length: int, ranks: int) -> tuple[int, ...]:
    """How many tokens each rank has."""
    return tuple(tokens(runs(layout, length, ranks, rank)) for rank in range(ranks))


def tokens(of: Sequence[Run]) -> int:
    return sum(run.length for run in of)


def where(part: Run, whole: Sequence[Run]) -> slice:
    """The indices of ``part``, which lies in one run of ``whole``, among the tokens of ``whole``."""
    offset = 0
    for run in whole:
        if run.start <= part.start <= run.last and (part.start - run.start) % run.step == 0:
            first, step = offset + (part.start - run.start) // run.step, part.step // run.step
            return slice(first, first + step * (part.length - 1) + 1, step)
        offset += run.length
    raise ValueError(f"{part} is not in {whole}")


@functools.lru_cache(maxsize=4096)
def seen(keys: tuple[Run, ...], queries: tuple[Run, ...], causal: bool, window: int | None) -> tuple[Run, ...]:
    """The keys that have to be there for the queries: of each run a part without gaps, none where nobody sees one."""
    parts = []
    for run in keys:
        bounds = []
        for q in queries:
            low = 0 if window is None else max(0, -(-(q.start - window + 1 - run.start) // run.step))
            high = run.length - 1 if not causal else min(run.length - 1, (q.last - run.start) // run.step)
            if low <= high:
                bounds.append((low, high))
        if bounds:
            first, last = min(low for low, _ in bounds), max(high for _, high in bounds)
            parts.append(Run(run.start + first * run.step, last - first + 1, run.step))
    return tuple(parts)


def merged(parts: Sequence[Run]) -> tuple[Run, ...]:
    """Runs of adjacent tokens in the order of the sequence, as few as there can be; others as they are."""
    if any(part.step != 1 for part in parts):
        return tuple(parts)
    out: list[Run] = []
    for part in sorted(parts):
        if out and out[-1].last + 1 == part.start:
            out[-1] = Run(out[-1].start, out[-1].length + part.length)
        else:
            out.append(part)
    return tuple(out)
