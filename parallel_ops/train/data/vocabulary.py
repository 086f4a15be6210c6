"""Checks that the tokens of the data are in the model's vocabulary: before a run, and again in each batch.

Before the start all data is read up to a bound, beyond it blocks at even distances over all files.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parallel_ops.train.data.tokens import TokenStream

# Seconds from a disk, less from the page cache.
MOST_BYTES = 1 << 30


def check(stream: TokenStream, vocabulary: int, *, most: int = MOST_BYTES) -> float:
    """Compares tokens with the size of a vocabulary. Files whose dtype has no larger values are not read.

    Args:
        most: Bytes to read at most.

    Returns:
        The share of the data that was compared.

    Raises:
        ValueError: A token is outside the vocabulary; names the file.
    """
    files = [file for file in stream.files if not _narrow(file.dtype, vocabulary)]
    size = sum(
        tokens * file.dtype.itemsize
        for file, tokens in zip(stream.files, stream.sizes, strict=True)
        if not _narrow(file.dtype, vocabulary)
    )
    every = max(1, -(-size // most))

    def blocks() -> Iterator[tuple[Path, NDArray[np.integer]]]:
        for file in files:
            for block in file.blocks():
                yield file.path, block

    for path, block in islice(blocks(), 0, None, every):
        if len(block):
            for found in (int(block.min()), int(block.max())):
                if not 0 <= found < vocabulary:
                    raise ValueError(f"data: {path} has token {found}, {outside(vocabulary)}")
    return 1 / every


def outside(vocabulary: int) -> str:
    """The end of an error message about a token."""
    return (
        f"outside the model's vocabulary of {vocabulary}; is model.vocab_size that of the tokenizer, and data.dtype "
        "that of the file?"
    )


def _narrow(dtype: np.dtype[np.integer], vocabulary: int) -> bool:
    limits = np.iinfo(dtype)
    return limits.min >= 0 and limits.max < vocabulary
