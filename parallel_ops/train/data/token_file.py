"""One memory-mapped file of tokens. See ``tokens`` for the formats."""

import functools
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parallel_ops._internal.files import suffix_of
from parallel_ops.tokenization import indexed
from parallel_ops.train.data.datasets import Block

SUFFIXES = (".bin", ".npy")
_BLOCK = 1 << 20


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

    @property
    def masks(self) -> Sequence[str]:
        return () if self.mask is None else (".mask",)

    def blocks(self) -> Iterator[Block]:
        """Views of the file."""
        for start in range(0, len(self.tokens), _BLOCK):
            mask = None if self.mask is None else self.mask[start : start + _BLOCK]
            yield (
                self.tokens[start : start + _BLOCK],
                None if mask is None else functools.partial(np.not_equal, mask, 0),
            )

    def document(self, number: int, start: int, length: int | None) -> NDArray[np.integer]:
        """A view of the file."""
        begin, last = (int(self.ends[number - 1]) if number else 0) + start, int(self.ends[number])
        return self.tokens[begin : last if length is None else min(last, begin + length)]

    def counted(self, number: int, start: int, length: int) -> NDArray[np.bool_] | None:
        if self.mask is None:
            return None
        begin = (int(self.ends[number - 1]) if number else 0) + start
        return self.mask[begin : min(int(self.ends[number]), begin + length)] != 0


def beside(file: Path, suffix: str) -> Path | None:
    """The file of the same name with another suffix, in lower or upper case."""
    return next((own for s in (suffix, suffix.upper()) if (own := file.with_suffix(s)).exists()), None)


def open_file(path: Path, dtype: str, eos_id: int | None, *, masked: bool) -> TokenFile:
    index = beside(path, ".idx") if suffix_of(path) == ".bin" else None
    if index is not None:
        tokens, ends = _indexed(path, index)
    else:
        tokens = _array(path) if suffix_of(path) == ".npy" else _raw(path, np.dtype(dtype))
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"{path} must hold one dimension of integers, got {list(tokens.shape)} {tokens.dtype}")
        ends = np.array([], np.int64) if eos_id is None else np.flatnonzero(tokens == eos_id) + 1
        if not len(ends) or ends[-1] != len(tokens):
            ends = np.append(ends, len(tokens))
    if not len(tokens):
        raise ValueError(f"{path} has no tokens in it")
    return TokenFile(path, tokens, ends.astype(np.int64), _mask(path, index, len(tokens)) if masked else None)


def _mask(path: Path, index: Path | None, tokens: int) -> NDArray[np.uint8] | None:
    """The mask beside a token file, if it has one."""
    own = beside(path, ".mask")
    if own is None or own == path:
        if index is not None and indexed.is_masked(index):
            raise ValueError(
                f"{path.with_suffix('.mask')} is missing, which says what of {path} counts in the loss: put it beside "
                "it, or set data.prompt_loss = true to count all tokens"
            )
        return None
    mask = np.asarray(_raw(own, np.dtype(np.uint8)), np.uint8)
    if len(mask) != tokens:
        raise ValueError(f"{own} has {len(mask)} bytes, but {path} has {tokens} tokens")
    if (found := int(mask[:_BLOCK].max())) > 1:
        raise ValueError(f"{own} must have bytes of 0 and 1, got {found}")
    return mask


def _array(path: Path) -> NDArray[np.integer]:
    try:
        # Unlike np.load it opens .npy alone, neither archives nor pickles.
        mapped: NDArray[np.integer] = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, SyntaxError, tokenize.TokenError) as error:  # NumPy parses the header as Python
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
