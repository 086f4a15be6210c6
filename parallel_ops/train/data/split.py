"""Splits a stream of documents in two: what is trained on, and what is held out for evaluation."""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parallel_ops.train.data.datasets import Block
from parallel_ops.train.data.tokens import Documents, TokenStream


class Slice:
    """The tokens ``first`` to ``last`` of a file, without reading it; documents are cut at both ends.

    Args:
        file: ``first < last``, at most its number of tokens.

    Attributes:
        first, last: As given. before: Documents of the file that end before the slice.
    """

    def __init__(self, file: Documents, first: int, last: int) -> None:
        self._file, self.first, self.last = file, first, last
        self.path, self.dtype, self.masks = file.path, file.dtype, file.masks
        ends = np.cumsum(file.lengths)
        self.before = int(np.searchsorted(ends, first, side="right"))
        inside = ends[self.before : int(np.searchsorted(ends, last, side="left")) + 1]
        self._skipped = first - int(ends[self.before - 1] if self.before else 0)
        self.lengths: NDArray[np.int64] = np.diff(np.minimum(inside, last), prepend=first)

    def document(self, number: int, start: int, length: int | None) -> NDArray[np.integer]:
        """At most ``length`` tokens of a document, from ``start`` on."""
        return self._file.document(*self._place(number, start, length))

    def counted(self, number: int, start: int, length: int) -> NDArray[np.bool_] | None:
        """Whether ``length`` tokens of a document count in the loss; ``None`` if all of the file do."""
        return self._file.counted(*self._place(number, start, length))

    def _place(self, number: int, start: int, length: int | None) -> tuple[int, int, int]:
        """The same in the file."""
        left = max(0, int(self.lengths[number]) - start)
        first = start + (self._skipped if number == 0 else 0)
        return self.before + number, first, left if length is None else min(length, left)

    def blocks(self) -> Iterator[Block]:
        """All tokens, in arrays of some megabytes, read lazily."""
        start = 0
        for block, counts in self._file.blocks():
            own = slice(max(0, self.first - start), max(0, self.last - start))
            if len(part := block[own]):
                yield part, None if counts is None else functools.partial(_part_of, counts, own)
            start += len(block)
            if start >= self.last:
                return


def _part_of(counts: Callable[[], NDArray[np.bool_]], own: slice) -> NDArray[np.bool_]:
    return counts()[own]


def split(stream: TokenStream, share: float) -> tuple[TokenStream, TokenStream]:
    """Two streams, the second of them with the last ``share`` of all tokens, in the order of the files.

    Raises:
        ValueError: One of them would have no tokens.
    """
    first = len(stream) - round(len(stream) * share)
    if not 0 < first < len(stream):
        raise ValueError(f"a share of {share:g} of {len(stream)} tokens leaves nothing to train on or to evaluate")
    streams = _part(stream, 0, first), _part(stream, first, len(stream))
    streams[0].skipped = list(stream.skipped)
    return streams


def in_both(stream: TokenStream, other: TokenStream) -> list[Path]:
    """The files of ``other`` of which some tokens are in ``stream`` too, by whatever name."""
    extents: dict[str, list[tuple[int, int]]] = {}
    for file in stream.files:
        extents.setdefault(os.path.realpath(file.path), []).append(_extent(file))
    found = []
    for file in other.files:
        first, last = _extent(file)
        if any(first < end and begin < last for begin, end in extents.get(os.path.realpath(file.path), ())):
            found.append(file.path)
    return found


def _extent(file: Documents) -> tuple[int, int]:
    return (file.first, file.last) if isinstance(file, Slice) else (0, int(file.lengths.sum()))


def _part(stream: TokenStream, first: int, last: int) -> TokenStream:
    files: list[Documents] = []
    start = 0
    for file, size in zip(stream.files, stream.sizes, strict=True):
        begin, end = max(first - start, 0), min(last - start, size)
        if begin < end:
            files.append(file if (begin, end) == (0, size) else Slice(file, begin, end))
        start += size
    return TokenStream.of(files)
