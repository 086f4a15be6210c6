"""The index of Megatron-LM's token files: ``name.idx`` beside ``name.bin``.

"MMIDIDX\\0\\0", version (u64), dtype code (u8), sequences (u64), documents + 1 (u64)
lengths (i32) and byte offsets (i64) of the sequences, then each document's first sequence (i64) and their number
"MASK" where ``name.mask`` is part of the data: of this package, behind what other readers read
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
# Megatron-LM's codes; the others are of floating-point types.
CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_HEAD = "<QBQQ"
_MASKED = b"MASK"


def write(file: Any, lengths: NDArray[np.int64], dtype: np.dtype[Any], *, masked: bool = False) -> None:
    """Writes the index of documents of one sequence each to an open file; ``masked`` if there is a mask of the loss.

    Raises:
        ValueError: A document has more tokens than the index can say.
    """
    if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
        raise ValueError(f"a document has {lengths.max():,} tokens, and the index counts at most 2,147,483,647")
    code = next(code for code, name in CODES.items() if np.dtype(name) == dtype)
    offsets = (np.cumsum(lengths) - lengths) * dtype.itemsize
    file.write(MAGIC + struct.pack(_HEAD, 1, code, len(lengths), len(lengths) + 1))
    for values, kind in ((lengths, "<i4"), (offsets, "<i8"), (np.arange(len(lengths) + 1), "<i8")):
        file.write(values.astype(kind).data)
    file.write(_MASKED if masked else b"")


def is_masked(index: Path) -> bool:
    """True if the tokens of this index were written with a mask."""
    with index.open("rb") as file:
        file.seek(-min(len(_MASKED), index.stat().st_size), 2)
        return file.read() == _MASKED


def read(index: Path) -> tuple[np.dtype[Any], int, NDArray[np.int64]]:
    """The dtype of the tokens, their number, and the end of each document, int64.

    Raises:
        ValueError: It is no such index, cut off, or of sequences or documents that do not lie one behind the other;
        names the file.
    """
    size, head = index.stat().st_size, len(MAGIC) + struct.calcsize(_HEAD)
    with index.open("rb") as file:
        content = file.read(head)
    if not content.startswith(MAGIC) or len(content) < head:
        raise ValueError(f"{index} is not an index of Megatron-LM's")
    version, code, sequences, documents = struct.unpack_from(_HEAD, content, len(MAGIC))
    if version != 1 or code not in CODES:
        raise ValueError(f"{index} has version {version} and type code {code}; known are version 1 and {list(CODES)}")
    if size < head + sequences * 12 + documents * 8:
        raise ValueError(f"{index} is cut off: {size} bytes for {sequences} sequences, {documents} documents")
    mapped = np.memmap(index, np.uint8, mode="r")
    parts = (("<i4", sequences, 0), ("<i8", sequences, sequences * 4), ("<i8", documents, sequences * 12))
    lengths, starts, firsts = (np.frombuffer(mapped, kind, count, head + offset) for kind, count, offset in parts)
    ends = np.cumsum(lengths, dtype=np.int64)
    dtype = np.dtype(CODES[code])
    if not np.array_equal((ends - lengths) * dtype.itemsize, starts):
        raise ValueError(f"{index} has its sequences in another order than the .bin, or with gaps: write both anew")
    # Each document's first sequence; the last entry is the number of sequences, unless the last document was not ended.
    if (np.diff(firsts, prepend=0, append=sequences) < 0).any():
        raise ValueError(
            f"{index} has documents that do not lie one behind the other in its {sequences} sequences: write it anew"
        )
    inner = firsts[firsts > 0]
    if len(inner) and inner[-1] < sequences:
        inner = np.append(inner, sequences)
    return dtype, int(ends[-1]) if sequences else 0, ends[inner - 1] if len(inner) else ends
