"""Token files on disk, read as one stream of documents. Files are memory-mapped, not loaded.

    name.bin beside name.idx    Megatron-LM's indexed dataset; the index has the documents and the dtype
    name.mask beside them       1 where a token counts in the loss and 0 where not, a byte a token; optional
    name.bin                    raw tokens of the dtype ``dtype``, documents end with ``eos_id``
    name.npy                    a one-dimensional array of integers, documents end with ``eos_id``
    a folder of a Hugging Face dataset, as ``save_to_disk`` writes it: one document a row; see ``datasets``

Any other folder stands for all such files in it, in sorted order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from parallel_ops.tokenization import indexed
from parallel_ops.train.data import datasets

_SUFFIXES = (".bin", ".npy")
_BLOCK = 1 << 20


class Documents(Protocol):
    """Documents of one file or dataset.

    Attributes:
        path: The file or folder. dtype: Dtype of the tokens.
        lengths: Tokens of each document, int64 ``[documents]``.
    """

    @property
    def path(self) -> Path: ...

    @property
    def dtype(self) -> np.dtype[np.integer]: ...

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    def document(self, number: int, start: int, length: int | None) -> NDArray[np.integer]:
        """At most ``length`` tokens of a document, from ``start`` on."""

    def counted(self, number: int, start: int, length: int) -> NDArray[np.bool_] | None:
        """Whether ``length`` tokens of a document count in the loss; ``None`` if all of the file do."""

    def blocks(self) -> Iterator[NDArray[np.integer]]:
        """All tokens, in arrays of some megabytes, read lazily."""


@dataclass(frozen=True)
class TokenFile:
    """One memory-mapped file.

    Attributes:
        tokens: All tokens.
        ends: End offset of each document, int64, ascending; the last is the number of tokens.
        mask: 1 where a token counts in the loss, uint8; ``None`` if all do.
    """

    path: Path
    tokens: NDArray[np.integer]
    ends: NDArray[np.int64]
    mask: NDArray[np.uint8] | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    @property
    def dtype(self) -> np.dtype[np.integer]:
        return self.tokens.dtype

    def blocks(self) -> Iterator[NDArray[np.integer]]:
        """Views of the file."""
        for start in range(0, len(self.tokens), _BLOCK):
            yield self.tokens[start : start + _BLOCK]

    def document(self, number: int, start: int, length: int | None) -> NDArray[np.integer]:
        """A view of the file."""
        begin, last = (int(self.ends[number - 1]) if number else 0) + start, int(self.ends[number])
        return self.tokens[begin : last if length is None else min(last, begin + length)]

    def counted(self, number: int, start: int, length: int) -> NDArray[np.bool_] | None:
        if self.mask is None:
            return None
        begin = (int(self.ends[number - 1]) if number else 0) + start
        return self.mask[begin : min(int(self.ends[number]), begin + length)] != 0


class TokenStream:
    """The documents of several files, numbered ``0`` to ``documents - 1``.

    Args:
        paths: Files or folders.
        dtype: NumPy dtype of raw tokens.
        eos_id: Last token of each document in files without an index; ``None`` for one document a file.
        column: Column of datasets with the tokens.

    Attributes:
        files: The files in order. sizes: Tokens of each file.
        masked: Some tokens do not count in the loss.
        skipped: Files in the folders of ``paths`` that are not read, without hidden files and indices.

    Raises:
        FileNotFoundError, PermissionError: From the file system. ValueError: A file does not have the format of its
        name, is truncated, or has no tokens; the message names it. ImportError: See ``datasets.Dataset``.
    """

    def __init__(
        self, paths: Sequence[Path], *, dtype: str = "uint16", eos_id: int | None = None, column: str = "input_ids"
    ) -> None:
        self.files: list[Documents] = []
        self.skipped: list[Path] = []
        for path in paths:
            if datasets.is_dataset(path):
                self.files.append(datasets.Dataset(path, column))
            else:
                self.files += [_open(file, dtype, eos_id) for file in files_of(path, dtype)]
                self.skipped += _skipped(path)
        if not self.files:
            raise ValueError(
                f"there is no .bin or .npy file in {', '.join(map(str, paths)) or 'an empty list'}; with the dtype "
                "uint8 the bytes of any file are tokens, where its own path is given"
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
        return any(file.counted(0, 0, 0) is not None for file in self.files)

    def counted(self, number: int, start: int, length: int) -> NDArray[np.bool_]:
        """Whether ``length`` tokens of a document, which it has, count in the loss."""
        file, own = self.place(number)
        found = file.counted(own, start, length)
        return np.ones(length, np.bool_) if found is None else found

    def place(self, number: int) -> tuple[Documents, int]:
        """The file of a document, and the document's number in that file."""
        which = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self.files[which], number - int(self._firsts[which])


def files_of(path: Path, dtype: str) -> list[Path]:
    """The token files of a path; that of a dataset is one.

    Raises:
        FileNotFoundError: It does not exist. ValueError: It has another suffix, or several datasets.
    """
    if datasets.is_dataset(path):
        return [path]
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix not in _SUFFIXES and dtype != "uint8":
        raise ValueError(
            f"{path} must end in {' or '.join(_SUFFIXES)}; with the dtype uint8 the bytes of any file are tokens"
        )
    return [path]


def _skipped(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    there = sorted(found for found in path.iterdir() if found.is_dir() or found.suffix not in _SUFFIXES)
    indices = {found for found in there if found.suffix in (".idx", ".mask") and found.with_suffix(".bin").exists()}
    return [found for found in there if found not in indices and not found.name.startswith(".")]


def _open(path: Path, dtype: str, eos_id: int | None) -> TokenFile:
    index, mask = path.with_suffix(".idx"), None
    if path.suffix == ".bin" and index.exists():
        tokens, ends = _indexed(path, index)
        if (own := path.with_suffix(".mask")).exists():
            mask = np.asarray(_raw(own, np.dtype(np.uint8)), np.uint8)
            if len(mask) != len(tokens):
                raise ValueError(f"{own} has {len(mask)} bytes, but {path} has {len(tokens)} tokens")
    else:
        tokens = _array(path) if path.suffix == ".npy" else _raw(path, np.dtype(dtype))
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"{path} must hold one dimension of integers, got {list(tokens.shape)} {tokens.dtype}")
        ends = np.array([], np.int64) if eos_id is None else np.flatnonzero(tokens == eos_id) + 1
        if not len(ends) or ends[-1] != len(tokens):
            ends = np.append(ends, len(tokens))
    if not len(tokens):
        raise ValueError(f"{path} has no tokens in it")
    return TokenFile(path, tokens, ends.astype(np.int64), mask)


def _array(path: Path) -> NDArray[np.integer]:
    try:
        # Unlike np.load it opens .npy alone, neither archives nor pickles.
        mapped: NDArray[np.integer] = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as an array of integers: {error}") from None
    return mapped


def _raw(path: Path, dtype: np.dtype[np.generic]) -> NDArray[np.integer]:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise ValueError(f"{path} has {size} bytes, which is no multiple of {dtype.itemsize}, the size of {dtype}")
    mapped: NDArray[np.integer] = np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)
    return mapped


def _indexed(path: Path, index: Path) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Tokens and document ends of a file in Megatron-LM's format, whose sequences are contiguous."""
    dtype, sequences_end, ends = indexed.read(index)
    tokens = _raw(path, dtype)
    if sequences_end != len(tokens):
        raise ValueError(f"{path} has {len(tokens)} tokens, but {index} has {sequences_end}")
    return tokens, ends
