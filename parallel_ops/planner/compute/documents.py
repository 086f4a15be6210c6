"""Packed documents: their lengths, and how evenly the ranks of a sequence share its attention.

Attention of a token takes as long as its document. Over context-parallel ranks the rank with the largest area is waited
for, and keys are sent only to ranks that see them. Both are counted on drawn sequences, by the functions with which the
runtime places tokens (``context_parallel/selection.py``).
"""

import math
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from parallel_ops.context_parallel.counts import AttentionShape, counts
from parallel_ops.context_parallel.group_size import KEY, Grouping, group_documents
from parallel_ops.context_parallel.selection import select_layout
from parallel_ops.planner.model import Model

# Lengths that stand for a distribution; sequences, and tokens of all of them, on which shares are counted.
_LENGTHS, _SEQUENCES, _TOKENS = 4096, 8, 1 << 21
_FORMS = "lengths in tokens, 1024 or 512x10:2048:8192, lognormal:MEDIAN:SIGMA, or a file with one length a line"


class Shares(NamedTuple):
    """How ranks share the attention of packed sequences, on average over drawn ones.

    Attributes:
        layout: kind of layout most often taken. uneven: area of the rank with most, of the mean.
        sent: keys that the rank with most sends and receives, on average, of ``ranks - 1`` times its own.
        zigzag: ``uneven`` and ``sent`` of the zigzag layout.
    """

    layout: str
    uneven: float
    sent: float
    zigzag: tuple[float, float]


def lengths_of(text: str, longest: int) -> tuple[tuple[int, int], ...]:
    """Lengths and their numbers, cut at ``longest``.

    Raises:
        ValueError: not ``--documents`` as its help says, or a line of the file is no length.
    """
    name, *figures = text.split(":")
    if name == "lognormal":
        try:
            median, sigma = map(float, figures)
        except ValueError:
            median = sigma = math.nan
        if not (0 < median < math.inf and 0 <= sigma <= 10):
            raise ValueError(f"--documents takes lognormal:MEDIAN:SIGMA, as lognormal:512:2.0, got {text!r}")
        places = ((i + 0.5) / _LENGTHS for i in range(_LENGTHS))
        drawn = (median * math.exp(sigma * NormalDist().inv_cdf(place)) for place in places)
        return tuple((max(1, min(longest, round(length))), 1) for length in drawn)
    if Path(text).is_file():
        found = []
        for number, line in enumerate(Path(text).read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if not re.fullmatch(r"\s*0*[1-9]\d*\s*", line):
                raise ValueError(f"--documents: line {number} of {text} must be a length in tokens, got {line[:40]!r}")
            found.append(min(int(line), longest))
        if not found:
            raise ValueError(f"--documents: {text} has no lengths")
        return representative(found)
    lengths = []
    for part in text.split(":"):
        counted = re.fullmatch(r"(\d+)(?:x(\d+))?", part.strip().lower())
        if not counted or not int(counted[1]) or counted[2] == "0":
            raise ValueError(f"--documents takes {_FORMS}, got {text!r}")
        lengths.append((min(int(counted[1]), longest), int(counted[2] or 1)))
    return tuple(lengths)


def representative(lengths: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """These lengths and their numbers, or as many quantiles as are kept."""
    found = sorted(lengths)
    if len(found) > _LENGTHS:
        found = [found[(2 * i + 1) * len(found) // (2 * _LENGTHS)] for i in range(_LENGTHS)]
    return tuple((length, 1) for length in found)


def with_lengths(model: Model, lengths: tuple[tuple[int, int], ...]) -> Model:
    """The model with packed documents of these lengths and numbers."""
    squares, tokens = (sum(count * length**power for length, count in lengths) for power in (2, 1))
    return replace(model, documents=squares / tokens, lengths=lengths)


@lru_cache(maxsize=64)
def packed(lengths: tuple[tuple[int, int], ...], length: int, count: int = _SEQUENCES) -> tuple[tuple[int, ...], ...]:
    """Documents of ``count`` or fewer sequences of ``length`` tokens: drawn, concatenated and cut, always the same."""
    generator = random.Random(0)
    sizes, numbers = zip(*lengths, strict=True)
    out = []
    for _ in range(max(2, min(count, _TOKENS // length))):
        own: list[int] = []
        left = length
        while left:
            for size in generator.choices(sizes, numbers, k=64):
                own.append(min(size, left))
                left -= own[-1]
                if not left:
                    break
        generator.shuffle(own)
        out.append(tuple(own))
    return tuple(out)


@lru_cache(maxsize=1024)
def shares(model: Model, ranks: int) -> Shares | None:
    """The shares of a ring over ``ranks``; ``None`` where lengths of documents are not known or nothing is shared."""
    if not model.lengths or ranks == 1:
        return None
    taken, figures = [], []
    for documents in packed(model.lengths, model.seq_length):
        shape, layout = _placed(model, documents, ranks)
        taken.append(layout if layout in ("zigzag", "contiguous") else "balanced")
        figures.append([*_figures(shape, layout), *_figures(shape, "zigzag")])
    uneven, sent, *zigzag = (sum(column) / len(column) for column in zip(*figures, strict=True))
    return Shares(max(set(taken), key=taken.count), uneven, sent, (zigzag[0], zigzag[1]))


@lru_cache(maxsize=256)
def _placed(model: Model, documents: tuple[int, ...], ranks: int) -> tuple[AttentionShape, str]:
    """The attention of a sequence, and the layout that the runtime takes for it."""
    window = (model.window - 1, 0) if model.window and set(model.layers) == {"window"} else (-1, -1)
    shape = AttentionShape(
        length=model.seq_length, ranks=ranks, batch=1, heads=1, kv_heads=1, head_dim=model.head_dim, itemsize=2,
        window_size=window, documents=documents,
    )  # fmt: skip
    return shape, select_layout([(1, shape)], None, None).cp_layout


def pair_work(model: Model) -> float:
    """Work of a visible pair, in that of a token outside of attention: FLOPs forward and backward."""
    attention = model.all_attention_flops
    return 3.5 * attention / model.seq_length / (3 * (model.forward_flops - attention))


def grouped(model: Model, ranks: int, rows: int) -> tuple[float, Grouping] | None:
    """Load of the most loaded rank, of the mean, with ``rows`` sequences over ``ranks`` each, and with groups by length
    over as many ranks, of drawn sequences; ``None`` without lengths of documents, or for one rank."""
    if not model.lengths or rows * ranks == 1:
        return None
    drawn = packed(model.lengths, model.seq_length, rows)[:rows]
    pair, loads, whole = pair_work(model), [], 0.0
    for documents in drawn:
        whole += sum(n + pair * n * (n + 1) / 2 for n in documents)
        shape, layout = _placed(model, documents, ranks)
        areas, rows_sent = counts(replace(shape, cp_layout=layout), 1)
        loads.append(model.seq_length / ranks + pair * max(areas) + KEY * max(map(sum, rows_sent)))
    found = group_documents([n for documents in drawn for n in documents], len(drawn) * ranks, pair=pair)
    return max(loads) * len(drawn) * ranks / whole, found


def _figures(shape: AttentionShape, layout: str) -> tuple[float, float]:
    areas, rows = counts(replace(shape, cp_layout=layout), 1)
    # A rank that sends keys receives their gradients, so both ways count.
    exchanged = [(sum(out) + sum(back)) / 2 for out, back in zip(rows, zip(*rows, strict=True), strict=True)]
    whole = shape.length / shape.ranks * (shape.ranks - 1)
    return max(areas) * shape.ranks / sum(areas), max(exchanged) / whole


def describe(model: Model, ranks: int, rows: int = 1) -> str:
    """What packing costs, with ``ranks`` a sequence and ``rows`` sequences at once; empty without lengths."""
    if not model.lengths:
        return ""
    each = sum(map(len, packed(model.lengths, model.seq_length))) / len(packed(model.lengths, model.seq_length))
    text = (
        f"Documents: {each:,.0f} a sequence, the average token in one of {model.documents:,.0f}, so attention takes "
        f"{model.documents / model.seq_length:.1%} of that over whole sequences."
    )
    if found := shares(model, ranks):
        text += (
            f" Over {ranks} ranks of a sequence the most loaded has {found.uneven:.2f} of the mean area and sends "
            f"{found.sent:.0%} of a full ring ({found.layout} tokens); zigzag {found.zigzag[0]:.2f} and "
            f"{found.zigzag[1]:.0%}."
        )
    if both := grouped(model, ranks, rows):
        fixed, groups = both
        sizes = Counter(group.size for group in groups.groups)
        kinds = ", ".join(f"{sizes[size]} of {size}" for size in sorted(sizes))
        text += (
            f" Groups by length over {sum(group.size for group in groups.groups)} ranks ({kinds}): the most loaded has "
            f"{groups.load:.2f} of the mean work instead of {fixed:.2f}, so it takes {groups.load / fixed:.0%} "
            f"of the time."
        )
    return text
