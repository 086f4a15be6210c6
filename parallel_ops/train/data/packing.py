"""Samples of a step: shuffled sequences of packed documents, independent of the number of ranks.

    documents    concatenated in an order drawn from seed and epoch, and cut into sequences of ``seq_length`` tokens and
                 one more, the last target; a shorter remainder at the end is dropped, other tokens in each epoch if
                 there are several documents. Or packed by best fit (``best_fit``), the same in each epoch
    samples      the sequences in an order drawn from seed and epoch (``permutation``), epoch after epoch

A step takes the next ``global_batch`` samples, and each data-parallel rank its share of them; a batch may cross the end
of one or several epochs. The position of a run is therefore one number, ``samples_seen``, and a run that resumes on
other ranks takes the same samples.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from parallel_ops.train.data.any_samples import AnySamples
from parallel_ops.train.data.batches import Sequence
from parallel_ops.train.data.best_fit import Packing
from parallel_ops.train.data.permutation import Permutation
from parallel_ops.train.data.split import Slice
from parallel_ops.train.data.tokens import Documents, TokenStream


class Samples(AnySamples):
    """Sequences of a stream of documents.

    Args:
        seq_length: Tokens in a sequence.
        seed: Seed of the orders of documents and of sequences; ``None`` keeps documents, too, as they lie in the files.
        document_mask: Attention does not cross documents, and the first token of a document is no target; a
            micro-batch is then one row of all its sequences.
        shuffle: ``False`` keeps the order of the sequences in the packed documents, which are shuffled all the same.
        best_fit: Pack documents by best fit rather than cut their concatenation.
        prompt_loss: Count tokens in the loss that the files' masks leave out.

    Attributes:
        packing: Of best fit; ``None`` without.

    Raises:
        ValueError: The stream is shorter than one sequence and its last target.
    """

    def __init__(
        self, stream: TokenStream, *, seq_length: int, seed: int | None, document_mask: bool = False,
        shuffle: bool = True, best_fit: bool = False, prompt_loss: bool = False,
    ) -> None:  # fmt: skip
        self.stream, self.seq_length, self.seed = stream, seq_length, seed
        self.document_mask, self.shuffle = document_mask, shuffle and seed is not None
        self.packing = Packing(stream.lengths, seq_length) if best_fit else None
        if self.packing is None and len(stream) < seq_length + 1:
            raise ValueError(f"the data has {len(stream)} tokens, but a sequence needs {seq_length + 1}")
        self.in_epoch = (len(stream) - 1) // seq_length if self.packing is None else len(self.packing)
        self.masked = stream.masked and not prompt_loss
        self.ignores = document_mask or best_fit or self.masked
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)
        self._ends: NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def fill(self) -> str:
        """How full the sequences of best fit are, the end of a line; empty without."""
        if self.packing is None:
            return ""
        return f", sequences {self.packing.size.sum() / (self.in_epoch * (self.seq_length + 1)):.1%} full"

    def details(self, taken: int) -> list[str]:
        return [f"packed by best fit{self.fill}"] if self.packing is not None else []

    def samples(self, numbers: range) -> list[Sequence]:
        found = []
        while numbers:
            epoch, first = divmod(numbers[0], self.in_epoch)
            here, numbers = numbers[: self.in_epoch - first], numbers[self.in_epoch - first :]
            self._draw(epoch)
            found += [self._sequence(int(n)) for n in self._order_of(np.arange(first, first + len(here)))]
        return found

    def file_of(self, number: int, token: int) -> tuple[Documents, int]:
        epoch, own = divmod(number, self.in_epoch)
        self._draw(epoch)
        sequence = int(self._order_of(np.array([own]))[0])
        pieces = self._pieces(sequence)
        document = next(
            document for document, *place in pieces if token in self.stream.document(document, *place).astype(np.int64)
        )
        file, own = self.stream.place(document)
        return file, own + (file.before if isinstance(file, Slice) else 0)

    def _order_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sequences at these positions of the current epoch."""
        return self._permuted(sequences) if self.shuffle else sequences

    def _sequence(self, number: int) -> Sequence:
        """One sequence of the current epoch."""
        places = list(self._pieces(number))
        pieces = [self.stream.document(*place).astype(np.int64) for place in places]
        begins = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
        missing = self.seq_length + 1 - int(begins[-1])
        padding = np.zeros(missing, np.int64)
        counts = None
        if self.masked or missing:
            counted = [
                self.stream.counted(*place) if self.masked else np.ones(len(piece), np.bool_)
                for place, piece in zip(places, pieces, strict=True)
            ]
            counts = np.concatenate([*counted, padding.astype(np.bool_)])
        return Sequence(np.concatenate([*pieces, padding]), begins if missing else begins[:-1], counts)

    def _pieces(self, number: int) -> Iterator[tuple[int, int, int]]:
        """The documents of a sequence, each with the first of its tokens in the sequence and their number."""
        if self.packing is not None:
            own, of = self.packing.pieces(number), self.packing
            yield from zip(of.document[own].tolist(), of.start[own].tolist(), of.size[own].tolist(), strict=True)
            return
        start, left = number * self.seq_length, self.seq_length + 1
        place = int(np.searchsorted(self._ends, start, side="right"))
        while left:
            document = int(self._order[place])
            length = int(self.stream.lengths[document])
            first = max(0, start - (int(self._ends[place]) - length))
            if taken := min(left, length - first):
                yield document, first, taken
            left, place = left - taken, place + 1

    def _draw(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self._epoch = epoch
        if self.seed is not None:
            self._permuted = Permutation(self.in_epoch, seed=self.seed, epoch=epoch)
        if self.packing is not None:
            return
        self._order = np.arange(self.stream.documents)
        if self.seed is not None:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.stream.documents)
        self._ends = np.cumsum(self.stream.lengths[self._order])
