"""Samples of several sources, by weight.

Of each ``_CYCLE`` samples in a row, a source has a share of its weight, at even distances, so a batch has about that
share too. Each source goes through its
own epochs, in its own order. Which sample of which source a sample is, is computed from its number alone.
"""

from collections.abc import Sequence as Several

import numpy as np
from numpy.typing import NDArray

from parallel_ops.train.data.batches import Batch, Sequence, batch_of
from parallel_ops.train.data.packing import Samples
from parallel_ops.train.data.tokens import Documents, TokenStream

# Weights of four decimals are exact.
_CYCLE = 10_000


class Mixture:
    """Samples of several sources. Has the interface of ``Samples``.

    Args:
        sources: Samples of one sequence length, document mask and order. weights: Positive numbers of any sum.

    Attributes:
        stream: The documents of all sources, one source behind the other.
        in_epoch: Sequences in all sources.
    """

    def __init__(self, sources: Several[Samples], weights: Several[float]) -> None:
        self.sources, self.weights = list(sources), [weight / sum(weights) for weight in weights]
        first = self.sources[0]
        self.seq_length, self.seed = first.seq_length, first.seed
        self.document_mask, self.shuffle = first.document_mask, first.shuffle
        self.stream = TokenStream.of([file for source in self.sources for file in source.stream.files])
        self.stream.skipped = [path for source in self.sources for path in source.stream.skipped]
        self.in_epoch = sum(source.in_epoch for source in self.sources)
        self.masked = any(source.masked for source in self.sources)
        self.ignores = any(source.ignores for source in self.sources)
        self._source, self._rank = _cycle(self.weights)
        self._quota = np.bincount(self._source, minlength=len(self.sources))

    def place(self, number: int) -> tuple[int, int]:
        """The source of a sample, and the sample's number there."""
        cycle, own = divmod(number, _CYCLE)
        source = int(self._source[own])
        return source, cycle * int(self._quota[source]) + int(self._rank[own])

    def samples(self, numbers: range) -> list[Sequence]:
        """The sequences of these samples."""
        found = []
        for number in numbers:
            source, own = self.place(number)
            found += self.sources[source].samples(range(own, own + 1))
        return found

    def batch(self, numbers: range) -> Batch:
        """The samples ``numbers`` as one micro-batch."""
        return batch_of(self.samples(numbers), document_mask=self.document_mask)

    def file_of(self, number: int, token: int) -> tuple[Documents, int]:
        """The file from which a sample has a token, and the document's number there."""
        source, own = self.place(number)
        return self.sources[source].file_of(own, token)


def _cycle(weights: Several[float]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The source of each sample of a cycle, and its number among those of the source; each has one at least."""
    exact = np.array(weights) * _CYCLE
    quota = np.maximum(1, np.floor(exact)).astype(np.int64)
    for source in np.argsort(quota - exact, kind="stable")[: max(0, _CYCLE - int(quota.sum()))]:
        quota[source] += 1
    while quota.sum() > _CYCLE:  # of sources with less than one sample
        quota[np.argmax(quota)] -= 1
    # The k-th of n samples of a source lies at (k + 1/2) / n of the cycle.
    own = [(np.arange(n) + 0.5) / n for n in quota]
    order = np.argsort(np.concatenate(own), kind="stable")
    source = np.repeat(np.arange(len(quota)), quota)[order]
    rank = np.concatenate([np.arange(n) for n in quota])[order]
    return source, rank
