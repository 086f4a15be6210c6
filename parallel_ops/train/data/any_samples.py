"""The interface of a run's samples, whatever they are made of: one stream, a mixture, folders that grow."""

import abc
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from parallel_ops.train.data.batches import Batch, Sequence, batch_of
from parallel_ops.train.data.tokens import Documents, TokenStream

T = TypeVar("T")
# Returns what rank 0 computes, on every rank.
Agree = Callable[[Callable[[], T]], T]


class AnySamples(abc.ABC):
    """Sequences that are numbered from 0 on, epoch after epoch.

    Attributes:
        stream: The documents. in_epoch: Sequences in an epoch. masked: Some tokens do not count in the loss.
        ignores: Targets may be ignored, so micro-batches differ in their number of targets.
        extended: Keys of ``described`` that may have more in them later.
    """

    stream: TokenStream
    in_epoch: int
    seq_length: int
    seed: int | None
    document_mask: bool
    shuffle: bool
    masked: bool
    ignores: bool
    extended: tuple[str, ...] = ()

    @abc.abstractmethod
    def samples(self, numbers: range) -> list[Sequence]:
        """The sequences of these samples."""

    @abc.abstractmethod
    def file_of(self, number: int, token: int) -> tuple[Documents, int]:
        """The file from which a sample has a token, and the document's number there."""

    def batch(self, numbers: range) -> Batch:
        """The samples ``numbers`` as one micro-batch."""
        return batch_of(self.samples(numbers), document_mask=self.document_mask)

    def reach(self, samples: int, agree: Agree[Any]) -> None:  # noqa: B027
        """Looks for more data until there are as many samples; all ranks call it with the same number."""

    def described(self) -> dict[str, Any]:
        """Plain values that identify the data in a checkpoint."""
        digests = zip(("digest", "mask"), self.stream.digest, strict=True)
        return {"tokens": len(self.stream), "documents": self.stream.documents} | {
            name: digest for name, digest in digests if digest is not None
        }

    def problem(self, saved: Mapping[str, Any]) -> str | None:
        """Why data that was ``described`` cannot be gone on with; ``None`` if it can, as far as is known here."""
        return None

    def restore(self, saved: Mapping[str, Any]) -> None:  # noqa: B027
        """Goes on with data that was ``described`` and has no ``problem``."""

    def details(self, taken: int) -> list[str]:
        """Further lines about the data of a run that takes as many samples."""
        return []


class Composite(AnySamples):
    """Samples of several others."""

    @abc.abstractmethod
    def place(self, number: int) -> tuple[AnySamples, int]:
        """The samples of which a sample is, and its number there."""

    def samples(self, numbers: range) -> list[Sequence]:
        found = []
        for number in numbers:
            samples, own = self.place(number)
            found += samples.samples(range(own, own + 1))
        return found

    def file_of(self, number: int, token: int) -> tuple[Documents, int]:
        samples, own = self.place(number)
        return samples.file_of(own, token)
