"""Token files on disk, read as one stream of documents. Files are memory-mapped, not loaded.

    name.bin beside name.idx    Megatron-LM's indexed dataset; the index has the documents and the dtype
    name.bin                    raw tokens of the dtype ``dtype``, documents end with ``eos_id``
    name.npy                    a one-dimensional array of integers, documents end with ``eos_id``
    name.mask beside one        1 where a token counts in the loss and 0 where not, a byte a token; optional
    a folder of a Hugging Face dataset, as ``save_to_disk`` writes it: one document a row; see ``datasets``

Any other folder, or a pattern such as ``data/*.bin``, stands for all such files in it, in sorted order; see
``_internal.files.find``.
"""

import functools
import hashlib
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from parallel_ops._internal.files import Found, chosen, find, matches, suffix_of
from parallel_ops.train.data import datasets
from parallel_ops.train.data.datasets import Block
from parallel_ops.train.data.token_file import SUFFIXES, beside, open_file

# Bytes that are read before a run, at most: seconds from a disk, less from the page cache.
MOST_BYTES = 1 << 30


class Documents(Protocol):
    """Documents of one file or dataset.

    Attributes:
        path: The file or folder. dtype: Dtype of the tokens.
        masks: Names of the files or columns that say which tokens count in the loss.
        lengths: Tokens of each document, int64 ``[documents]``.
    """

    @property
    def path(self) -> Path: ...

    @property
    def dtype(self) -> np.dtype[np.integer]: ...

    @property
    def masks(self) -> Sequence[str]: ...

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    def document(self, number: int, start: int, length: int | None) -> NDArray[np.integer]:
        """At most ``length`` tokens of a document, from ``start`` on."""

    def counted(self, number: int, start: int, length: int) -> NDArray[np.bool_] | None:
        """Whether ``length`` tokens of a document count in the loss; ``None`` if all of the file do."""

    def blocks(self) -> Iterator[Block]:
        """All tokens, in arrays of some megabytes, read lazily, each with what says which of them count."""


class TokenStream:
    """The documents of several files, numbered ``0`` to ``documents - 1``.

    Args:
        paths: Files or folders.
        dtype: NumPy dtype of raw tokens.
        eos_id: Last token of each document in files without an index; ``None`` for one document a file.
        column: Column of datasets with the tokens.
        masked: Use masks, and columns of datasets that say what counts in the loss.
        ignore: Columns of datasets that are not used, of those that would otherwise be refused.

    Attributes:
        files: The files in order. sizes: Tokens of each file.
        masked: Some tokens do not count in the loss.
        skipped: What in the folders of ``paths`` is not read, without hidden files and indices, and why.

    Raises:
        FileNotFoundError, PermissionError: From the file system. ValueError: A file does not have the format of its
        name, is truncated, has no tokens or lacks its mask; the message names it. ImportError: See
        ``datasets.Dataset``.
    """

    def __init__(
        self, paths: Sequence[Path], *, dtype: str = "uint16", eos_id: int | None = None, column: str = "input_ids",
        masked: bool = True, ignore: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.files: list[Documents] = []
        self.skipped: list[tuple[Path, str]] = []
        for path in paths:
            found = files_of(path, dtype)
            self.skipped += found.unread
            for file in found.files:
                if not datasets.is_dataset(file):
                    self.files.append(open_file(file, dtype, eos_id, masked=masked))
                    continue
                rows = datasets.Dataset(file, column, masked=masked, ignore=ignore)
                self.files.append(rows)
                self.skipped += [(file, f"its column {name}") for name in rows.unused]
        if not self.files:
            raise ValueError(
                f"there is no .bin or .npy file in {', '.join(map(str, paths)) or 'an empty list'}; with the dtype "
                "uint8 the bytes of any file are tokens, where its own path is given, and `parallel-ops tokenize` "
                "makes tokens of text"
            )
        self._index()

    @classmethod
    def of(cls, files: Sequence[Documents]) -> "TokenStream":
        """A stream over files that are already open."""
        stream = cls.__new__(cls)
        stream.files, stream.skipped = list(files), []
        stream._index()
        return stream

    def _index(self) -> None:
        each = [file.lengths for file in self.files]
        self._firsts = np.cumsum([0, *map(len, each)])
        self.lengths: NDArray[np.int64] = np.concatenate(each)
        self.sizes = [int(lengths.sum()) for lengths in each]
        self._tokens = sum(self.sizes)

    @property
    def documents(self) -> int:
        return len(self.lengths)

    def __len__(self) -> int:
        """Tokens of all files."""
        return self._tokens

    def document(self, number: int, start: int = 0, length: int | None = None) -> NDArray[np.integer]:
        """Tokens of a document, from ``start`` on, at most ``length``."""
        file, own = self.place(number)
        return file.document(own, start, length)

    @property
    def masked(self) -> bool:
        return any(file.masks for file in self.files)

    def counted(self, number: int, start: int, length: int) -> NDArray[np.bool_]:
        """Whether ``length`` tokens of a document, which it has, count in the loss."""
        file, own = self.place(number)
        found = file.counted(own, start, length)
        return np.ones(length, np.bool_) if found is None else found

    def place(self, number: int) -> tuple[Documents, int]:
        """The file of a document, and the document's number in that file."""
        which = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self.files[which], number - int(self._firsts[which])

    @functools.cached_property
    def digest(self) -> tuple[str, str | None]:
        """Digests of documents and tokens, and of what counts, ``None`` where all does; of ``sampled`` blocks."""
        content = hashlib.blake2b(np.ascontiguousarray(self.lengths, "<i8").tobytes(), digest_size=16)
        mask = hashlib.blake2b(digest_size=16)
        for file, (tokens, counts) in sampled(self.files)[1]:
            content.update(file.dtype.name.encode() + np.ascontiguousarray(tokens).tobytes())
            mask.update(b"" if counts is None else np.packbits(counts()).tobytes())
        return content.hexdigest(), mask.hexdigest() if self.masked else None

    @functools.cached_property
    def share_counted(self) -> float:
        """The share of the tokens that count in the loss: of all of them, or of ``sampled`` blocks of more data."""
        if not self.masked:
            return 1.0
        every = counted = 0
        for _, (tokens, counts) in sampled(self.files)[1]:
            every, counted = every + len(tokens), counted + (len(tokens) if counts is None else int(counts().sum()))
        return counted / every


def sampled(files: Sequence[Documents], most: int = MOST_BYTES) -> tuple[int, Iterator[tuple[Documents, Block]]]:
    """Blocks of files, at even distances: every n-th, where all would have more than ``most`` bytes.

    Returns:
        n, and the blocks with their files.
    """
    size = sum(int(file.lengths.sum()) * file.dtype.itemsize for file in files)
    every = max(1, -(-size // most))
    return every, islice(((file, block) for file in files for block in file.blocks()), 0, None, every)


def files_of(path: Path, dtype: str) -> Found:
    """The token files of a path, and what of a folder is not read; a dataset is one.

    Raises:
        FileNotFoundError: It does not exist. ValueError: It has another suffix, or several datasets.
    """
    if datasets.is_dataset(path):
        return Found([path])
    if path.is_dir():
        return find(path, _reason, deep=False)
    there = matches(path)
    if there == [path]:
        if suffix_of(path) not in SUFFIXES and dtype != "uint8":
            raise ValueError(
                f"{path} must end in {' or '.join(SUFFIXES)}; with the dtype uint8 the bytes of any file are tokens, "
                "and `parallel-ops tokenize` makes tokens of text"
            )
        return Found([path])
    folders = [files_of(own, dtype) for own in there if own.is_dir()]
    unread = [left for own in folders for left in own.unread]
    found = chosen([own for own in there if not own.is_dir()], unread, _reason)
    return Found(found.files + [file for own in folders for file in own.files], found.unread)


def _reason(file: Path) -> str | None:
    """Why a file of a folder is not read; see ``find``."""
    suffix = suffix_of(file)
    if suffix in SUFFIXES:
        return None
    owners = {".idx": (".bin",), ".mask": SUFFIXES}.get(suffix, ())
    return "" if any(beside(file, owner) for owner in owners) else "of a folder .bin and .npy files are read"
