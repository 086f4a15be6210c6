"""Samples of several sources, by weight.

Of each ``_CYCLE`` samples in a row, a source has a share of its weight, rounded to whole samples and one at least, at
even distances, so a batch has about that share too. Each source goes through its own epochs, in its own order. Which
sample of which source a sample is, is computed from its number alone.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel_ops.train.data.any_samples import Composite
from parallel_ops.train.data.packing import Samples
from parallel_ops.train.data.tokens import TokenStream

# Weights of four decimals are exact.
_CYCLE = 10_000


class Mixture(Composite):
    """Samples of several sources.

    Args:
        sources: Samples of one sequence length, document mask and order. weights: Positive numbers of any sum.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float]) -> None:
        # By a power of two, which changes no quotient: the sum would be infinite for weights near the largest float.
        scaled = [math.ldexp(weight, -math.frexp(max(weights))[1]) for weight in weights]
        self.sources, self.weights = list(sources), [weight / sum(scaled) for weight in scaled]
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

    def place(self, number: int) -> tuple[Samples, int]:
        cycle, own = divmod(number, _CYCLE)
        source = int(self._source[own])
        return self.sources[source], cycle * int(self._quota[source]) + int(self._rank[own])

    def described(self) -> dict[str, Any]:
        sizes = [[len(source.stream), source.stream.documents] for source in self.sources]
        shares = [[weight, *size] for weight, size in zip(self.weights, sizes, strict=True)]
        return super().described() | {"sources": shares}

    def details(self, taken: int) -> list[str]:
        lines = []
        for number, (source, share) in enumerate(zip(self.sources, self._quota / _CYCLE, strict=True)):
            tokens, epochs = len(source.stream), taken * share / source.in_epoch
            lines += [f"source {number}: {share:.2%}, {tokens:,} tokens, {epochs:.3g} epochs{source.fill}"]
        return lines


def _cycle(weights: Sequence[float]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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
