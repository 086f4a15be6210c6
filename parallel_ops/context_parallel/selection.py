"""The fastest algorithm and layout of an attention that ranks share, by counted area, bytes and steps. No torch.

With measured rates those with the fewest seconds of ``cost.seconds``. Without: among those whose largest area is about
the least, the one that sends the fewest bytes. The result follows from the shape alone, so it is the same on all ranks.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from parallel_ops.context_parallel.cost import Algorithm, Link, algorithms, gathered_bytes, seconds, sent
from parallel_ops.context_parallel.counts import AttentionShape, counts
from parallel_ops.context_parallel.token_ranges import LAYOUTS

# Above this size of gathered keys and their gradients in fp32, the all-gather is not selected.
_MAX_GATHERED_BYTES = 512 << 20

# Largest areas over the mean of the balanced layouts that are compared where rates are known: uneven ones send less
# over a slow link. A ring of drawn documents, 128K tokens over 8 ranks, takes 14.3 ms with the first, 12.3 ms with the
# best of each sequence (``python -m benchmarks layouts``, calculated).
_EVEN = (1.01, 1.1, 1.2, 1.5)

# Without measured rates, areas up to so many times the least count as equal.
_ALIKE = 1.05


class Selection(NamedTuple):
    """An algorithm, the reason for it, and its layout."""

    algorithm: Algorithm
    reason: str
    cp_layout: str


class _Candidate(NamedTuple):
    """Seconds, if rates are known, largest area and most bytes of a rank, forward and backward."""

    cp_layout: str
    algorithm: Algorithm
    seconds: float
    area: float
    sent: float

    @property
    def figures(self) -> tuple[float, float, float]:
        return self.seconds, self.area, self.sent


@functools.lru_cache(maxsize=1024)
def select(shape: AttentionShape, link: Link | None) -> Selection:
    """The fastest algorithm, or without ``link`` the one that sends fewest bytes; ties go to ring, then all-gather."""
    return _described(_candidates(shape, link), shape.ranks, link, with_layout=False)


def select_layout(
    kinds: Sequence[tuple[int, AttentionShape]], layouts: Sequence[str] | None, link: Link | None
) -> Selection:
    """The layout under which layers of these kinds are fastest together, each with the algorithm that ``select`` takes.

    Args:
        kinds: number of layers and their attention; ``cp_layout`` is not read.
        layouts: names, ``balanced`` ones too; ties go to the first. ``None``: zigzag, contiguous, and with lengths of
            documents the one that balances them; with ``link`` those that do so less evenly, too.

    Returns:
        The layout, the algorithm of the first kind, and the reason.
    """
    if layouts is None:
        lengths, layouts = [kind.documents for _, kind in kinds], ["zigzag", "contiguous"]
        if all(isinstance(one, tuple) for one in lengths):
            from parallel_ops.context_parallel.placement import balanced, ranges_of  # needs NumPy

            masks, weights = [ranges_of(kind.documents, *kind.bounds) for _, kind in kinds], [n for n, _ in kinds]
            for even in _EVEN[:1] if link is None else _EVEN:
                layouts.append(balanced(masks, kinds[0][1].ranks, weights=weights, even=even))
    found = []
    for layout in layouts:
        best = [(n, _best(_candidates(replace(shape, cp_layout=layout), link), link)) for n, shape in kinds]
        time, area, most = (
            sum(parts) for parts in zip(*([n * x for x in one.figures] for n, one in best), strict=True)
        )
        found.append(_Candidate(layout, best[0][1].algorithm, time, area, most))
    return _described(found, kinds[0][1].ranks, link, with_layout=True)


@functools.lru_cache(maxsize=1024)
def _candidates(shape: AttentionShape, link: Link | None) -> list[_Candidate]:
    found = []
    for algorithm in algorithms(shape):
        if algorithm.all_gather and gathered_bytes(shape) > _MAX_GATHERED_BYTES:
            continue
        most = max(s.forward + s.backward for s in sent(shape, algorithm))
        areas, u = counts(shape, algorithm.ulysses_degree)[0], algorithm.ulysses_degree
        time = 0.0 if link is None else seconds(shape, algorithm, link)
        found.append(_Candidate(shape.cp_layout, algorithm, time, max(areas) / u, most))
    return found


def _best(candidates: Sequence[_Candidate], link: Link | None) -> _Candidate:
    if link is not None:
        return min(candidates, key=lambda candidate: candidate.seconds)
    least = min(candidate.area for candidate in candidates)
    return min((c for c in candidates if c.area <= _ALIKE * least), key=lambda candidate: candidate.sent)


def _described(candidates: Sequence[_Candidate], ranks: int, link: Link | None, *, with_layout: bool) -> Selection:
    best, texts = _best(candidates, link), []

    def name(one: _Candidate) -> str:
        layout = one.cp_layout if one.cp_layout in LAYOUTS else "balanced"
        return f"{layout} {one.algorithm.name(ranks)}" if with_layout else one.algorithm.name(ranks)

    for one in sorted(candidates, key=lambda c: c.sent if link is None else c.seconds):
        time = "" if link is None else f"{1e3 * one.seconds:.3g} ms, "
        uneven = f", {one.area / best.area:.2f} of its largest area" if one.area > _ALIKE * best.area else ""
        texts.append(f"{name(one)} {time}{one.sent / 2**20:.3g} MiB sent{uneven}")
    reason = "sends least" if link is None else "fastest"
    text = f"{name(best)}: {reason} (forward and backward: {'; '.join(texts)})"
    return Selection(best.algorithm, text, best.cp_layout)
