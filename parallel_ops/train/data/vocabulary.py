"""Checks that the tokens of the data are in the model's vocabulary: before a run, and again in each batch.

Before the start all data is read up to a bound, beyond it blocks at even distances over all files.
"""

import numpy as np

from parallel_ops.train.data.tokens import MOST_BYTES, TokenStream, sampled


def check(stream: TokenStream, vocabulary: int, *, most: int = MOST_BYTES) -> float:
    """Compares tokens with the size of a vocabulary. Files whose dtype has no larger values are not read.

    Args:
        most: Bytes to read at most.

    Returns:
        The share of the data that was compared.

    Raises:
        ValueError: A token is outside the vocabulary; names the file.
    """
    every, blocks = sampled([file for file in stream.files if not _narrow(file.dtype, vocabulary)], most)
    for file, (block, _) in blocks:
        if len(block):
            for found in (int(block.min()), int(block.max())):
                if not 0 <= found < vocabulary:
                    raise ValueError(f"data: {file.path} has token {found}, {outside(vocabulary)}")
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
