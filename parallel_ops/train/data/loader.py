"""Reads the micro-batches of a step while the previous step is computed."""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from parallel_ops.context_parallel import SequenceLayout
from parallel_ops.train.data.any_samples import AnySamples
from parallel_ops.train.data.batches import Batch, Sequence, batch_of, shares
from parallel_ops.train.data.by_length import ByLength
from parallel_ops.train.data.vocabulary import outside


class Loader:
    """The micro-batches of one data-parallel rank.

    Args:
        vocabulary: Size of the model's vocabulary; ``None`` disables the check of tokens.
        pinned: Use pinned memory, from which copies to a GPU are asynchronous.
        layout: Makes the layout of packed documents, of the number of tokens, ``cu_seqlens`` and ``Batch.cp_ranks``.
        by_length: Takes a rank's documents out of the rows of all replicas.
    """

    def __init__(
        self, samples: AnySamples, *, global_batch: int, micro_batch: int, replicas: int, replica: int,
        vocabulary: int | None = None, pinned: bool = False,
        layout: Callable[[int, Tensor | None, int | None], SequenceLayout] | None = None,
        by_length: ByLength | None = None,
    ) -> None:  # fmt: skip
        self._layout, self._by_length = layout, by_length
        self.samples, self.vocabulary, self.pinned = samples, vocabulary, pinned
        self._sizes = {
            "global_batch": global_batch, "micro_batch": micro_batch, "replicas": replicas, "replica": replica,
        }  # fmt: skip
        self._reader: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def step(self, samples_seen: int) -> list[Batch]:
        """The micro-batches of the step after ``samples_seen`` samples. Starts to read those of the next step.

        Raises:
            ValueError: A token is outside the vocabulary; names the file. OSError: From the file system.
        """
        if self._reader is None:
            # A thread begins on GPU 0, where torch's pinned memory would make a context for each rank of the node.
            own = functools.partial(torch.cuda.set_device, torch.cuda.current_device()) if self.pinned else None
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="parallel_ops-loader", initializer=own)
        if self._ahead is None or self._ahead[0] != samples_seen:
            self._ahead = samples_seen, self._reader.submit(self._read, samples_seen)
        batches = self._ahead[1].result()
        following = samples_seen + self._sizes["global_batch"]
        self._ahead = following, self._reader.submit(self._read, following)
        return batches

    def close(self) -> None:
        """Ends the reading thread; the next ``step`` starts it again."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
        self._reader = self._ahead = None

    def _read(self, samples_seen: int) -> list[Batch]:
        if self._by_length is None:
            return [self.read(numbers) for numbers in shares(samples_seen, **self._sizes)]
        replicas = range(self._sizes["replicas"])
        rows = [shares(samples_seen, **{**self._sizes, "replica": replica}) for replica in replicas]
        return [self._read_all(numbers, self._by_length) for numbers in zip(*rows, strict=True)]

    def _read_all(self, numbers: tuple[range, ...], by_length: ByLength) -> Batch:
        """This rank's part of the micro-batches of all replicas."""
        found = [sequence for part in numbers for sequence in self._sequences(part)]
        return self._finished(by_length(batch_of(found, document_mask=True)))

    def read(self, numbers: range) -> Batch:
        """A micro-batch of these samples, of any number. Raises as ``step`` does."""
        return self._finished(batch_of(self._sequences(numbers), document_mask=self.samples.document_mask))

    def _sequences(self, numbers: range) -> list[Sequence]:
        """The samples after the check of their tokens. Targets of a batch do not show all: -100 has no token."""
        found = self.samples.samples(numbers)
        if self.vocabulary is None:
            return found
        for number, sequence in zip(numbers, found, strict=True):
            for token in (int(sequence.tokens.min()), int(sequence.tokens.max())):
                if not 0 <= token < self.vocabulary:
                    file, document = self.samples.file_of(number, token)
                    place = f"data: {file.path} has token {token}, in its document {document}"
                    raise ValueError(f"{place}, {outside(self.vocabulary)}")
        return found

    def _finished(self, batch: Batch) -> Batch:
        """The batch pinned and with its layout."""
        if self.pinned:
            batch = batch.pinned()
        if self._layout is not None and batch.cu_seqlens is not None:
            layout = self._layout(len(batch.tokens), batch.cu_seqlens, batch.cp_ranks)
            batch = replace(batch, layout=layout)
        return batch
