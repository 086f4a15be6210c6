"""Hugging Face datasets on disk, as ``Dataset.save_to_disk`` writes them: folders of Arrow files, memory-mapped."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROWS = 10_000


def is_dataset(path: Path) -> bool:
    """True for the folder of a dataset. ValueError: The folder has several datasets, one a split."""
    if (path / "dataset_dict.json").exists():
        splits = ", ".join(sorted(str(own) for own in path.iterdir() if own.is_dir()))
        raise ValueError(f"{path} has several datasets; name one of {splits}")
    return (path / "dataset_info.json").exists() and (path / "state.json").exists()


def _check_files(path: Path) -> None:
    """ValueError: The dataset names files outside its folder. ImportError: This pyarrow unpickles data."""
    import pyarrow

    # Arrow files could name Python types as pickles, which pyarrow opened before 14.0.1 (CVE-2023-47248).
    if tuple(int(part) for part in re.findall(r"\d+", pyarrow.__version__)[:3]) < (14, 0, 1):
        raise ImportError(f"pyarrow {pyarrow.__version__} runs code that is in a dataset; update it to 14.0.1 or later")
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        files = [file["filename"] for file in [*state["_data_files"], *(state.get("_indices_data_files") or [])]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path / 'state.json'} is not that of a dataset: {error!r}") from error
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or file == "..":
            raise ValueError(f"{path / 'state.json'} names {file!r}, which is not a file beside it")


class Dataset:
    """The documents of a dataset, one a row.

    Args:
        column: Column with the tokens, a list of integers a row.

    Raises:
        ImportError: The package ``datasets`` is not installed. ValueError: The dataset cannot be read, or the column is
        missing or has another type.
    """

    def __init__(self, path: Path, column: str) -> None:
        try:
            from datasets import load_from_disk
        except ImportError as error:
            raise ImportError(f"{path} is a Hugging Face dataset; to read it, run: pip install datasets") from error
        _check_files(path)
        try:
            rows = load_from_disk(str(path))
        except Exception as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if column not in rows.column_names:
            raise ValueError(f"{path} has no column {column!r}; it has {', '.join(rows.column_names)}")
        self.path, self.column = path, column
        self._tables = rows.select_columns(column).with_format("arrow")
        self.dtype: np.dtype[np.integer]
        self.lengths = self._lengths(self._tables)
        self._rows = rows.select_columns(column).with_format("numpy")
        self._last: tuple[int, NDArray[np.integer]] | None = None

    def _lengths(self, rows: Any) -> NDArray[np.int64]:
        import pyarrow
        import pyarrow.compute

        kind = rows.features.arrow_schema.field(self.column).type
        lists = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
        if not (lists and pyarrow.types.is_integer(kind.value_type)):
            raise ValueError(f"{self.path}: column {self.column!r} must have lists of integers, got {kind}")
        self.dtype = np.dtype(kind.value_type.to_pandas_dtype())
        found = [
            pyarrow.compute.list_value_length(table[self.column]).fill_null(0).to_numpy()
            for table in rows.iter(batch_size=_ROWS)
        ]
        lengths = np.concatenate([np.empty(0, np.int64), *found]).astype(np.int64)
        if not lengths.sum():
            raise ValueError(f"{self.path} has no tokens in it")
        return lengths

    def blocks(self) -> Iterator[NDArray[np.integer]]:
        """The tokens of some thousand rows each, without copies unless a row is null."""
        import pyarrow.compute

        for table in self._tables.iter(batch_size=_ROWS):
            for chunk in pyarrow.compute.list_flatten(table[self.column]).chunks:
                yield chunk.to_numpy(zero_copy_only=False)

    def counted(self, number: int, start: int, length: int) -> None:
        """All tokens count in the loss."""

    def document(self, number: int, start: int, length: int | None) -> NDArray[np.integer]:
        """At most ``length`` tokens of a document, from ``start`` on."""
        if self._last is None or self._last[0] != number:
            self._last = number, np.asarray(self._rows[number][self.column])
        found = self._last[1]
        return found[start : None if length is None else start + length]
