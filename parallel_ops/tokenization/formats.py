"""Bytes, lines and rows of input files. Whatever is damaged is a ``ValueError`` that names the file and the place."""

import bz2
import importlib
import json
import lzma
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from parallel_ops._internal.files import suffix_of

KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".md": "text"}
# Several files in one, which would be read as one text.
ARCHIVES = (".tar", ".zip", ".7z", ".rar", ".tgz", ".tbz", ".tbz2", ".txz")
# Bytes that are decompressed at once: what follows the end of a member is copied.
_BLOCK = 1 << 16
_COUNTED = 1 << 20

# A row, and its place in the input for messages.
Row = tuple[dict[str, Any], Callable[[], str]]


def _zstd() -> Any:
    try:
        return importlib.import_module("zstandard").ZstdDecompressor().decompressobj()
    except ImportError:
        raise ImportError("a file in .zst needs zstandard; run: pip install zstandard") from None


COMPRESSED: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(31), ".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor, ".zst": _zstd,
}  # fmt: skip


def kind_of(file: Path) -> str | None:
    """``"json"``, ``"parquet"`` or ``"text"`` by the suffix, before that of a compression; ``None`` for another one."""
    if suffix_of(file) not in COMPRESSED:
        return KINDS.get(suffix_of(file))
    kind = KINDS.get(suffix_of(Path(file.stem)))
    return None if kind == "parquet" else kind


def check_name(file: Path) -> None:
    """Raises if files of this name are not read.

    Raises:
        ValueError: It is neither one text nor JSON lines nor Parquet. ImportError: A package for it is missing.
    """
    inner = ""
    if new := COMPRESSED.get(suffix_of(file)):
        new()
        inner = suffix_of(Path(file.stem))
    if suffix_of(file) in ARCHIVES or inner in ARCHIVES:
        raise ValueError(f"{file} is an archive of files; unpack it, and name the files or their folder")
    if inner == ".parquet":
        raise ValueError(f"{file} is Parquet in another compression; unpack it")


def decompressed(path: str) -> bytes:
    """The content of a compressed file, of all its members.

    Raises:
        ValueError: It is damaged or cut off. ImportError: A package for its compression is missing.
    """
    suffix = suffix_of(Path(path))
    found: list[bytes] = []
    member: Any = None
    with open(path, "rb") as file:
        rest = file.read(_BLOCK)
        if not rest:
            raise ValueError(f"{path} is not {suffix[1:]}, or cut off: it is empty")
        while rest:
            if member is None:
                rest = rest.lstrip(b"\0") if found else rest  # padding between members
                member = COMPRESSED[suffix]() if rest else None
            if member is not None:
                try:
                    found.append(member.decompress(rest))
                except MemoryError:
                    raise
                except Exception as error:  # each library has errors of its own
                    raise ValueError(f"{path} is not {suffix[1:]}, or damaged: {error}") from None
                rest, member = (member.unused_data, None) if member.eof else (b"", member)
            rest = rest or file.read(_BLOCK)
    if member is not None:
        raise ValueError(f"{path} is not {suffix[1:]}, or cut off: it has no end")
    return b"".join(found)


def decoded(path: str, content: bytes, start: int, *, mark: bool) -> str:
    """Text of UTF-8, with ``mark`` without a byte order mark at its front. ``start``: Offset, for the message."""
    try:
        return content.decode("utf-8-sig" if mark else "utf-8")
    except UnicodeDecodeError as error:
        wide = content[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = "; it is UTF-16: convert it, as by iconv -f UTF-16 -t UTF-8" if wide else ""
        raise ValueError(f"{path} is not UTF-8 at byte {start + error.start}{hint}") from None


def json_lines(path: str, content: bytes, offset: int) -> Iterator[Row]:
    """The objects of ``content``, which lies at ``offset`` in the file."""
    start, number = 0, 0
    while start < len(content):
        end = content.find(b"\n", start) + 1 or len(content)
        number += 1
        if line := decoded(path, content[start:end], offset + start, mark=True).strip():
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                hint = "; one object a line is read, not an array of them" if line.startswith("[") else ""
                raise ValueError(f"{_line(path, offset, number)} is not JSON: {error}{hint}") from None
            place = lambda number=number: _line(path, offset, number)  # noqa: E731
            if not isinstance(found, dict):
                raise ValueError(f"{place()} is no object, but {type(found).__name__}")
            yield found, place
        start = end


def _line(path: str, offset: int, number: int) -> str:
    """The name of a line, counted in the file."""
    before = 0
    if offset:
        with open(path, "rb") as content:
            sizes = (min(_COUNTED, offset - at) for at in range(0, offset, _COUNTED))
            before = sum(content.read(size).count(b"\n") for size in sizes)
    return f"{path} line {before + number}"


def open_parquet(path: str) -> Any:
    """pyarrow's reader of a file. ValueError: It is not Parquet. ImportError: pyarrow is not installed."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise ImportError(f"{path} is Parquet; to read it, run: pip install pyarrow") from None
    try:
        return parquet.ParquetFile(path)
    except Exception as error:
        if isinstance(error, OSError) and error.filename:
            raise
        raise ValueError(f"{path} is not Parquet, or damaged: {error}") from None


def parquet_rows(path: str, start: int, stop: int, columns: Collection[str]) -> Iterator[Row]:
    """The rows of the row groups ``start`` to ``stop``, of the columns that are there, without nulls in structs."""
    opened = open_parquet(path)
    number = sum(opened.metadata.row_group(group).num_rows for group in range(start))
    there = [name for name in opened.schema_arrow.names if name in columns]
    batches = opened.iter_batches(1000, row_groups=range(start, stop), columns=there)
    while True:
        try:
            batch = next(batches, None)
        except (OSError, ValueError) as error:  # pyarrow's are of these
            raise ValueError(f"{path} is damaged after row {number}: {error}") from None
        if batch is None:
            return
        for row in batch.to_pylist():
            number += 1
            place = lambda number=number: f"{path} row {number}"  # noqa: E731
            yield {key: _without_nulls(value) for key, value in row.items()}, place


def _without_nulls(value: Any) -> Any:
    """A column has every key of its structs in each row, null where a row has no such key."""
    if isinstance(value, dict):
        return {key: _without_nulls(own) for key, own in value.items() if own is not None}
    return [_without_nulls(own) for own in value] if isinstance(value, list) else value
