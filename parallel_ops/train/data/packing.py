"""Samples of a step: shuffled sequences of shuffled, packed documents, independent of the number of ranks.

    documents    concatenated in an order drawn from seed and epoch
    sequences    ``seq_length`` tokens and one more, the last target, cut from the documents; a shorter remainder at
                 the end is dropped, other tokens in each epoch if there are several documents
    samples      the sequences in an order drawn from seed and epoch (``permutation``), epoch after epoch

A step takes the next ``global_batch`` samples, and each data-parallel rank its share of them; a batch may cross the end
of one or several epochs. The position of a run is therefore one number, ``samples_seen``, and a run that resumes on
other ranks takes the same samples.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallel_ops.models.context import IGNORE_INDEX
from parallel_ops.train.data.permutation import Permutation
from parallel_ops.train.data.tokens import TokenStream


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one rank.

    Attributes:
        tokens, targets: int64 ``[s, b]``; a target is -100 where the next token is in another document.
        positions, cu_seqlens: With a document mask, where the micro-batch is one packed row (``b = 1``): the position
            of each token in its document, int64 ``[s]``, and the document boundaries, int32 ``[documents + 1]``.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda t: t.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed = {name: None if t is None else change(t) for name, t in vars(self).items()}
        return Batch(**changed)  # type: ignore[arg-type]


class Samples:
    """Sequences of a stream of documents.

    Args:
        seq_length: Tokens in a sequence.
        seed: Seed of the orders of documents and of sequences; ``None`` keeps documents, too, as they lie in the files.
        document_mask: Attention does not cross documents, and the first token of a document is no target; a
            micro-batch is then one row of all its sequences.
        shuffle: ``False`` keeps the order of the sequences in the packed documents, which are shuffled all the same.

    Attributes:
        in_epoch: Samples in an epoch.

    Raises:
        ValueError: The stream is shorter than one sequence and its last target.
    """

    def __init__(
        self, stream: TokenStream, *, seq_length: int, seed: int | None, document_mask: bool = False,
        shuffle: bool = True,
    ) -> None:  # fmt: skip
        if len(stream) < seq_length + 1:
            raise ValueError(f"the data has {len(stream)} tokens, but a sequence needs {seq_length + 1}")
        self.stream, self.seq_length, self.seed = stream, seq_length, seed
        self.document_mask, self.shuffle = document_mask, shuffle and seed is not None
        self.in_epoch = (len(stream) - 1) // seq_length
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)
        self._ends: NDArray[np.int64] = np.empty(0, np.int64)

    def samples(self, numbers: range) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """The ``seq_length + 1`` tokens of each sample, and the offsets at which its documents begin, 0 included."""
        found = []
        while numbers:
            epoch, first = divmod(numbers[0], self.in_epoch)
            here, numbers = numbers[: self.in_epoch - first], numbers[self.in_epoch - first :]
            self._draw(epoch)
            found += [self._sequence(int(n)) for n in self._order_of(np.arange(first, first + len(here)))]
        return found

    def document_of(self, number: int, token: int) -> int:
        """The number of the document from which a sample has a token."""
        epoch, own = divmod(number, self.in_epoch)
        self._draw(epoch)
        sequence = int(self._order_of(np.array([own]))[0])
        return next(document for document, piece in self._pieces(sequence) if token in piece)

    def _order_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sequences at these positions of the current epoch."""
        return self._permuted(sequences) if self.shuffle else sequences

    def _sequence(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """One sequence of the current epoch."""
        pieces = [piece.astype(np.int64) for _, piece in self._pieces(number)]
        begins = np.cumsum([0, *map(len, pieces[:-1])])
        return np.concatenate(pieces), begins.astype(np.int64)

    def _pieces(self, number: int) -> Iterator[tuple[int, NDArray[np.integer]]]:
        """The documents of a sequence, each with its tokens in the sequence."""
        start, left = number * self.seq_length, self.seq_length + 1
        place = int(np.searchsorted(self._ends, start, side="right"))
        while left:
            document = int(self._order[place])
            length = int(self.stream.lengths[document])
            piece = self.stream.document(document, max(0, start - (int(self._ends[place]) - length)), left)
            if len(piece):
                yield document, piece
            left, place = left - len(piece), place + 1

    def batch(self, numbers: range) -> Batch:
        """The samples ``numbers`` as one micro-batch."""
        found = self.samples(numbers)
        rows = torch.from_numpy(np.stack([tokens for tokens, _ in found], axis=1))
        tokens, targets = rows[:-1], rows[1:].clone()
        if not self.document_mask:
            return Batch(tokens, targets)
        s = self.seq_length
        for column, (_, begins) in enumerate(found):
            targets[begins[begins > 0] - 1, column] = IGNORE_INDEX
        starts = np.concatenate([begins[begins < s] + s * row for row, (_, begins) in enumerate(found)])
        bounds = torch.from_numpy(np.append(starts, s * len(found)))
        places = torch.arange(s * len(found))
        positions = places - bounds[torch.searchsorted(bounds, places, right=True) - 1]
        tokens, targets = (t.t().reshape(-1, 1) for t in (tokens, targets))
        return Batch(tokens, targets, positions, bounds.to(torch.int32))

    def _draw(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self._epoch = epoch
        self._order = np.arange(self.stream.documents)
        if self.seed is not None:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.stream.documents)
            self._permuted = Permutation(self.in_epoch, seed=self.seed, epoch=epoch)
        self._ends = np.cumsum(self.stream.lengths[self._order])


def shares(samples_seen: int, *, global_batch: int, micro_batch: int, replicas: int, replica: int) -> list[range]:
    """The sample numbers of each micro-batch of one data-parallel rank, in the step after ``samples_seen`` samples."""
    own = global_batch // replicas
    first = samples_seen + replica * own
    return [range(first + i, first + i + micro_batch) for i in range(0, own, micro_batch)]
