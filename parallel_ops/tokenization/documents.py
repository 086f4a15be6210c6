"""Documents of text files, JSON lines and Parquet, in parts that processes read independently.

    *.jsonl, *.ndjson, *.json    one object a line, its key ``key`` is the document
    *.parquet                    one row a document, of the column ``key``
    anything else                raw text, one document a file, or documents between lines that equal ``separator``

Text may be compressed, with ``.gz`` behind its suffix; it is then one part. A folder stands for its files with one of
the suffixes above, ``.txt`` or ``.md``, and those of its folders, in sorted order.

Parts begin where a line does, so no document of JSON lines or between separators is cut. A text file of one document is
cut into parts, and all long documents into pieces, where a line that begins with a visible character follows one that
ends with a visible character. Tokenizers that split at whitespace, as those of GPT-2 and Llama 3 do, find the same
tokens there as in the whole.
"""

import gzip
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_ops.tokenization.options import Options

_JSON, _TEXT = (".jsonl", ".ndjson", ".json"), (".txt", ".md")
# Characters that are encoded at once: an encoding takes some hundred bytes a token.
PIECE = 1 << 20
_CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S\r\n)(?=\S)")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
# Bytes of a part. With few parts processes idle at the end, with many the folder of parts is long.
_LEAST_PART, _MOST_PART, _PARTS = 4 << 20, 64 << 20, 1024


@dataclass(frozen=True)
class Part:
    """A share of a file.

    Attributes:
        kind: ``"text"``, ``"json"`` or ``"parquet"``.
        start, stop: Bytes of the file, or row groups of Parquet; ``stop = -1`` for a compressed file's end.
        last: The file ends here. size: Bytes on the disk.
    """

    path: str
    kind: str
    start: int
    stop: int
    last: bool
    size: int


@dataclass(frozen=True)
class Document:
    """A text or a list of messages. ``ends``: No further piece of the document follows."""

    value: Any
    ends: bool = True


def files_of(inputs: Sequence[Path]) -> list[Path]:
    """The files of ``inputs``, which are files and folders.

    Raises:
        FileNotFoundError: One does not exist. ValueError: A folder has no file to read, or a file is given twice.
    """
    found: list[Path] = []
    for path in inputs:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        inside = sorted(file for file in path.rglob("*") if _known(file)) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path} has no file that ends in {', '.join((*_JSON, '.parquet', *_TEXT))}")
        found += inside
    if len(set(found)) < len(found):
        raise ValueError(f"{next(file for file in found if found.count(file) > 1)} is given twice")
    return found


def parts_of(files: Sequence[Path], options: Options) -> list[Part]:
    """The parts of files, which depend on the files' bytes and the options alone.

    Raises:
        ValueError: A file is not what its suffix says, or has no such column. OSError: From the file system.
        ImportError: Parquet needs pyarrow.
    """
    total = sum(file.stat().st_size for file in files)
    most = min(max(total // _PARTS, _LEAST_PART), _MOST_PART)
    found: list[Part] = []
    for file in files:
        kind, size = _kind(file), file.stat().st_size
        if options.chat and kind == "text":
            raise ValueError(f"{file}: messages need JSON lines or Parquet, not raw text")
        if kind == "parquet":
            found += _row_groups(file, options.key, most)
        elif file.suffix == ".gz":
            found.append(Part(str(file), kind, 0, -1, True, size))
        else:
            bounds = _bounds(file, size, most, kind, options.separator)
            found += [
                Part(str(file), kind, start, stop, stop == size, stop - start)
                for start, stop in itertools.pairwise(bounds)
            ]
    return found


def documents(part: Part, options: Options) -> Iterator[Document]:
    """The documents that begin in a part.

    Raises:
        ValueError: A document is damaged; names file and line or row. OSError: From the file system.
    """
    if part.kind == "parquet":
        values: Iterable[Any] = _rows(part, options)
    else:
        values = _json_lines(part, options) if part.kind == "json" else _texts(part, options.separator)
        if part.kind == "text" and options.separator is None:
            for text in values:
                yield Document(text, ends=False)
            if part.last:
                yield Document("")
            return
    for value in values:
        if options.chat:
            yield Document(value)
            continue
        *first, last = pieces(value)
        for text in first:
            yield Document(text, ends=False)
        yield Document(last)


def pieces(text: str) -> list[str]:
    """A text in pieces of about ``PIECE`` characters, cut between two lines, or else at a space."""
    found, start = [], 0
    while len(text) - start > 2 * PIECE:
        cut = _CUT.search(text, start + PIECE, start + 2 * PIECE)
        end = cut.start() if cut else text.rfind(" ", start + PIECE, start + 2 * PIECE)
        end = start + PIECE if end < 0 else end
        found.append(text[start:end])
        start = end
    return [*found, text[start:]]


def _kind(file: Path) -> str:
    suffix = Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
    return "json" if suffix in _JSON else "parquet" if file.suffix == ".parquet" else "text"


def _known(file: Path) -> bool:
    inner = Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
    return file.is_file() and not file.name.startswith(".") and inner in (*_JSON, ".parquet", *_TEXT)


def _bounds(file: Path, size: int, most: int, kind: str, separator: str | None) -> list[int]:
    """Offsets at which parts begin, and the end."""
    begins = _line_begins(kind, separator)
    found = [0]
    with file.open("rb") as content:
        while found[-1] + most < size:
            content.seek(found[-1] + most - 1)
            before = content.readline()
            if separator is not None:  # cut at its front, so it may look like one
                before = b"\0"
            while (line := content.readline()) and not begins(before, line):
                before = line
            found.append(content.tell() - len(line))
    return found if found[-1] == size and len(found) > 1 else [*found, size]


def _line_begins(kind: str, separator: str | None) -> Callable[[bytes, bytes], bool]:
    """Whether a part may begin with a line, by the end of the line before and the line."""
    if kind == "json":
        return lambda before, line: True
    if separator is not None:
        wanted = separator.encode()
        return lambda before, line: before.rstrip(b"\r\n") == wanted
    return lambda before, line: before.rstrip(b"\r\n")[-1:].strip() != b"" and line[:1].strip() != b""


def _content(part: Part) -> bytes:
    if part.stop < 0:
        try:
            with gzip.open(part.path) as compressed:
                return compressed.read()
        except (gzip.BadGzipFile, EOFError) as error:
            raise ValueError(f"{part.path} is not gzip, or cut off: {error}") from None
    with open(part.path, "rb") as content:
        content.seek(part.start)
        return content.read(part.stop - part.start)


def _decoded(part: Part, content: bytes, offset: int) -> str:
    try:
        return content.decode("utf-8-sig" if part.start + offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{part.path} is not UTF-8 at byte {part.start + offset + error.start}") from None


def _texts(part: Part, separator: str | None) -> Iterator[str]:
    """The documents between separators, or the pieces of the whole text."""
    text = _decoded(part, _content(part), 0)
    if separator is None:
        yield from pieces(text)
        return
    lines: list[str] = []
    for line in _LINE.findall(text):  # str.splitlines splits at more characters
        if line.rstrip("\r\n") != separator:
            lines.append(line)
        elif lines:
            yield "".join(lines)
            lines = []
    if lines:
        yield "".join(lines)


def _json_lines(part: Part, options: Options) -> Iterator[Any]:
    content, start, number = _content(part), 0, 0
    while start < len(content):
        end = content.find(b"\n", start) + 1 or len(content)
        number += 1
        if line := _decoded(part, content[start:end], start).strip():
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                hint = "; one object a line is read, not an array of them" if line.startswith("[") else ""
                raise ValueError(f"{_line(part, number)} is not JSON: {error}{hint}") from None
            yield _value(found, options, lambda: _line(part, number))  # noqa: B023
        start = end


def _line(part: Part, number: int) -> str:
    """The name of a line, counted in the file."""
    before = 0
    if part.start:
        with open(part.path, "rb") as content:
            sizes = (min(PIECE, part.start - at) for at in range(0, part.start, PIECE))
            before = sum(content.read(size).count(b"\n") for size in sizes)
    return f"{part.path} line {before + number}"


def _value(found: Any, options: Options, place: Callable[[], str]) -> Any:
    if not isinstance(found, dict) or options.key not in found:
        has = f"it has {', '.join(map(repr, found))}" if isinstance(found, dict) else f"it is {type(found).__name__}"
        raise ValueError(f"{place()} has no key {options.key!r}; {has}; --key names the one with the document")
    value = found[options.key]
    if options.chat:
        return messages_of(value, place)
    if not isinstance(value, str):
        hint = "; --chat reads messages" if isinstance(value, list) else ""
        raise ValueError(f"{place()}: {options.key!r} must be text, got {type(value).__name__}{hint}")
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can have and UTF-8 cannot
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def messages_of(value: Any, place: Callable[[], str]) -> list[dict[str, Any]]:
    """``value`` as a list of messages. ValueError: It is none; names ``place``."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place()} must have a list of messages, got {value!r:.80}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"{place()}: a message needs 'role' and 'content', got {message!r:.80}")
    return value


def _parquet(path: Path | str) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ImportError(f"{path} is Parquet; to read it, run: pip install pyarrow") from None
    try:
        return parquet.ParquetFile(path)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path} is not Parquet: {error}") from None


def _row_groups(file: Path, key: str, most: int) -> list[Part]:
    opened = _parquet(file)
    names = opened.schema_arrow.names
    if key not in names:
        raise ValueError(f"{file} has no column {key!r}; it has {', '.join(names)}; --key names the one")
    groups = opened.metadata
    sizes = [groups.row_group(number).total_byte_size for number in range(groups.num_row_groups)]
    found, start = [], 0
    for stop in range(1, len(sizes) + 1):
        if stop == len(sizes) or sum(sizes[start : stop + 1]) > most:
            found.append(Part(str(file), "parquet", start, stop, stop == len(sizes), 0))
            start = stop
    shares = max(1, sum(sizes))
    whole = file.stat().st_size
    return [
        Part(p.path, p.kind, p.start, p.stop, p.last, whole * sum(sizes[p.start : p.stop]) // shares) for p in found
    ]


def _rows(part: Part, options: Options) -> Iterator[Any]:
    opened, number = _parquet(part.path), 0
    first = sum(opened.metadata.row_group(group).num_rows for group in range(part.start))
    for batch in opened.iter_batches(1000, row_groups=range(part.start, part.stop), columns=[options.key]):
        for value in batch.column(0).to_pylist():
            number += 1
            place = f"{part.path} row {first + number}"
            yield _value({options.key: "" if value is None and not options.chat else value}, options, lambda: place)  # noqa: B023
