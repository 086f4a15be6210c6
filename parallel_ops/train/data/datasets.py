"""Hugging Face datasets on disk, as ``Dataset.save_to_disk`` writes them: folders of Arrow files, memory-mapped.

Columns beside that of the tokens say what counts: ``labels`` (-100 where a token is no target), ``loss_mask``,
``completion_mask`` and ``assistant_masks`` (0 where it is none), ``attention_mask`` (0 for padding, which is left out).
"""

import functools
import json
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel_ops.models.context import IGNORE_INDEX

_ROWS = 10_000
_LABELS, _PADDING = "labels", "attention_mask"
_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
# Columns that would change what is learnt, and are not used.
_REFUSED = (
    "position_ids", "seq_lengths", "cu_seqlens", "cu_seq_lens", "segment_ids", "loss_weight", "loss_weights", "weight",
    "sample_weight", "tools", "functions", "decoder_input_ids",
)  # fmt: skip

# Tokens, and what returns whether each of them counts in the loss; ``None`` if all do.
Block = tuple[NDArray[np.integer], Callable[[], NDArray[np.bool_]] | None]


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
        masked: Use the columns that say what counts in the loss. ignore: Columns that are not used.

    Attributes:
        masks: The columns that say what counts. unused: The columns that are not used.

    Raises:
        ImportError: The package ``datasets`` is not installed. ValueError: The dataset cannot be read, a column is
        missing or has another type, or another column would change what is learnt.
    """

    def __init__(self, path: Path, column: str, *, masked: bool = True, ignore: Collection[str] = ()) -> None:
        try:
            from datasets import load_from_disk
        except ImportError as error:
            raise ImportError(f"{path} is a Hugging Face dataset; to read it, run: pip install datasets") from error
        _check_files(path)
        try:
            rows = load_from_disk(str(path))
        except Exception as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        there = [name for name in rows.column_names if name != column]
        if column not in rows.column_names:
            raise ValueError(f"{path} has no column {column!r}; it has {', '.join(rows.column_names)}")
        if refused := [name for name in there if name in _REFUSED and name not in ignore]:
            raise ValueError(
                f"{path} has the column {refused[0]!r}, which changes what is learnt and is not used here; "
                f"data.ignore = {json.dumps(refused)} leaves it out"
            )
        known = (_PADDING, *((_LABELS, *_MASKS) if masked else ()))
        self._extra = [name for name in known if name in there and name not in ignore]
        self.masks = [name for name in self._extra if name != _PADDING]
        self.unused = [name for name in there if name not in known and name not in ignore]
        self.path, self.column = path, column
        for name in (column, *self._extra):
            self._check_type(rows.features.arrow_schema.field(name).type, name)
        self._tables = rows.select_columns([column, *self._extra]).with_format("arrow")
        self.dtype: np.dtype[np.integer] = np.dtype(
            rows.features.arrow_schema.field(column).type.value_type.to_pandas_dtype()
        )
        lengths = [self._lengths(first, table) for first, table in self._batches()]
        self.lengths: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *lengths]).astype(np.int64)
        if not self.lengths.sum():
            raise ValueError(f"{path} has no tokens in it")
        self._last: tuple[int, NDArray[np.integer], NDArray[np.bool_] | None] | None = None

    def _check_type(self, kind: Any, name: str) -> None:
        import pyarrow

        lists = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
        values = lists and (
            pyarrow.types.is_integer(kind.value_type)
            or (name != self.column and pyarrow.types.is_boolean(kind.value_type))
        )
        if not values:
            raise ValueError(f"{self.path}: column {name!r} must have lists of integers, got {kind}")

    def _batches(self) -> Iterator[tuple[int, Any]]:
        """The number of the first row, and a table, of some thousand rows each."""
        first = 0
        for table in self._tables.iter(batch_size=_ROWS):
            yield first, table
            first += len(table)

    def _lengths(self, first: int, table: Any) -> NDArray[np.int64]:
        """Tokens of each row without padding."""
        import pyarrow.compute

        each = {
            name: pyarrow.compute.list_value_length(table[name]).fill_null(0).to_numpy().astype(np.int64)
            for name in (self.column, *self._extra)
        }
        found = each[self.column]
        for name in each:
            if pyarrow.compute.list_flatten(table[name]).null_count:
                last = first + len(table) - 1
                raise ValueError(f"{self.path}: the column {name!r} has a null in a list, in rows {first} to {last}")
        for name in self._extra:
            if len(rows := np.flatnonzero(each[name] != found)):
                row = int(rows[0])
                raise ValueError(
                    f"{self.path} row {first + row}: {name!r} has {each[name][row]} values for {found[row]} tokens"
                )
        if _PADDING not in self._extra:
            return found
        kept = np.concatenate([[0], np.cumsum(_flat(table, _PADDING) != 0)])
        ends = np.cumsum(found)
        lengths: NDArray[np.int64] = kept[ends] - kept[ends - found]
        return lengths

    def _tokens(self, table: Any) -> Block:
        """The tokens of a table, without padding."""
        tokens = _flat(table, self.column)
        kept = _flat(table, _PADDING) != 0 if _PADDING in self._extra else np.ones((), np.bool_)
        tokens = tokens if kept.all() else tokens[kept]
        return tokens, functools.partial(self._counts, table, tokens, kept) if self.masks else None

    def _counts(self, table: Any, tokens: NDArray[np.integer], kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
        found = np.ones(len(tokens), np.bool_)
        for name in self.masks:
            values = _flat(table, name)
            values = values if kept.all() else values[kept]
            if name != _LABELS:
                found &= values != 0
                continue
            found &= values != IGNORE_INDEX
            if len(others := np.flatnonzero(found & (values != tokens))):
                raise ValueError(
                    f"{self.path}: the column {_LABELS!r} has {values[others[0]]} for the token {tokens[others[0]]}; "
                    f"labels are the tokens themselves, or {IGNORE_INDEX}. data.ignore = [{_LABELS!r}] leaves them out"
                )
        return found

    def blocks(self) -> Iterator[Block]:
        """The tokens of some thousand rows each, without copies unless a row is null or padded."""
        for _, table in self._batches():
            yield self._tokens(table)

    def counted(self, number: int, start: int, length: int) -> NDArray[np.bool_] | None:
        """Whether ``length`` tokens of a document count in the loss; ``None`` if all of the dataset do."""
        counts = self._row(number)[1] if self.masks else None
        return None if counts is None else counts[start : start + length]

    def document(self, number: int, start: int, length: int | None) -> NDArray[np.integer]:
        """At most ``length`` tokens of a document, from ``start`` on."""
        found = self._row(number)[0]
        return found[start : None if length is None else start + length]

    def _row(self, number: int) -> tuple[NDArray[np.integer], NDArray[np.bool_] | None]:
        last = self._last
        if last is None or last[0] != number:
            tokens, counts = self._tokens(self._tables[number : number + 1])
            self._last = last = number, tokens, None if counts is None else counts()
        return last[1:]


def _flat(table: Any, name: str) -> NDArray[Any]:
    """The values of all rows of a column of lists."""
    import pyarrow.compute

    values = pyarrow.compute.list_flatten(table[name])
    chunks = [chunk.to_numpy(zero_copy_only=False) for chunk in getattr(values, "chunks", [values])]
    return chunks[0] if len(chunks) == 1 else np.concatenate([*chunks, np.empty(0, np.int64)])
