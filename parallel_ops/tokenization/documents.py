"""Documents of text files, JSON lines and Parquet, in parts that processes read independently.

    *.jsonl, *.ndjson, *.json    one object a line, its key ``key`` is the document
    *.parquet                    one row a document, of the column ``key``
    anything else                raw text, one document a file, or documents between lines that equal ``separator``

Suffixes are of any case. Text may be compressed, with ``.gz``, ``.bz2``, ``.xz`` or ``.zst`` behind its suffix; it is
then one part. A folder stands for its files with one of the suffixes above, ``.txt`` or ``.md``, and those of its
folders, in sorted order; see ``_internal.files.find``. A null is an empty document in every format.

Parts begin where a line does, so no document of JSON lines or between separators is cut. A text file of one document is
cut into parts, and all long documents into pieces, where a line that begins with a visible character follows one that
ends with a visible character. Tokenizers that split at whitespace, as those of GPT-2 and Llama 3 do, find the same
tokens there as in the whole.
"""

import itertools
import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_ops._internal.files import Found, expanded, find, suffix_of
from parallel_ops.tokenization import formats
from parallel_ops.tokenization.messages import ROW_KEYS, Conversation, value_of
from parallel_ops.tokenization.options import Options

# Characters that are encoded at once: an encoding takes some hundred bytes a token.
PIECE = 1 << 20
_CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S\r\n)(?=\S)")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
# Bytes of a part. With few parts processes idle at the end, with many the folder of parts is long.
_LEAST_PART, _MOST_PART, _PARTS = 4 << 20, 64 << 20, 1024
# Bytes that a file counts for at least, so that a part has at most some thousand files.
_LEAST_FILE = 4 << 10


@dataclass(frozen=True)
class Part:
    """A share of a file.

    Attributes:
        kind: ``"text"``, ``"json"`` or ``"parquet"``.
        start, stop: Bytes of the file, or row groups of Parquet; ``stop = -1`` for a compressed file's end.
        begins, ends: Its first document begins here, and its last one ends here. size: Bytes on the disk.
    """

    path: str
    kind: str
    start: int
    stop: int
    begins: bool
    ends: bool
    size: int


@dataclass(frozen=True)
class Document:
    """A text or messages. ``begins``, ``ends``: No piece of the document comes before, and none follows."""

    value: str | Conversation
    begins: bool = True
    ends: bool = True


def files_of(inputs: Sequence[Path], options: Options) -> Found:
    """The files of ``inputs``, which are files, folders and patterns, and what of folders is not read.

    Raises:
        FileNotFoundError: One does not exist. ValueError: A folder has no file to read, a file is given twice, or is a
        pipe or device.
    """

    def reason(file: Path) -> str | None:
        kind = formats.kind_of(file)
        if kind is None:
            return "no text, JSON lines or Parquet by its suffix"
        return "raw text, and --chat reads messages" if options.chat and kind == "text" else None

    found = Found()
    for path in map(expanded, inputs):
        own = find(path, reason, deep=True)
        if not own.files:
            known = [suffix for suffix, kind in formats.KINDS.items() if not options.chat or kind != "text"]
            raise ValueError(f"{path} has no file that ends in {', '.join(known)}")
        found.files += own.files
        found.unread += own.unread
    seen: dict[Path, Path] = {}
    for file in found.files:
        if file.exists() and not file.is_file():  # a pipe, say, has no size and is read once
            raise ValueError(f"{file} is no regular file: write what it has into one")
        if (whole := file.resolve()) in seen:
            as_well = "" if seen[whole] == file else f", as {seen[whole]} too"
            raise ValueError(f"{file} is given twice{as_well}")
        seen[whole] = file
    return found


def parts_of(files: Sequence[Path], options: Options) -> list[tuple[Part, ...]]:
    """The parts of files, which depend on the files' bytes and the options alone; small files share one.

    Raises:
        ValueError: A file is not what its suffix says, or has no such column. OSError: From the file system.
        ImportError: Parquet needs pyarrow.
    """
    sizes = [file.stat().st_size for file in files]
    most = min(max(sum(sizes) // _PARTS, _LEAST_PART), _MOST_PART)
    found: list[tuple[Part, ...]] = []
    room = 0
    for file, size in zip(files, sizes, strict=True):
        for part in _parts(file, size, most, options):
            if found and part.size <= room:
                found[-1] += (part,)
            else:
                found.append((part,))
                room = most
            room -= max(part.size, _LEAST_FILE)
    return found


def _parts(file: Path, size: int, most: int, options: Options) -> list[Part]:
    formats.check_name(file)
    kind = formats.kind_of(file) or "text"
    if options.chat and kind == "text":
        raise ValueError(f"{file}: messages need JSON lines or Parquet, not raw text")
    if kind == "parquet":
        return _row_groups(file, size, options.key, most)
    if suffix_of(file) in formats.COMPRESSED:
        return [Part(str(file), kind, 0, -1, True, True, size)]
    bounds = itertools.pairwise(_bounds(file, size, most, kind, options.separator))
    cut = kind == "text" and options.separator is None
    return [
        Part(str(file), kind, start, stop, not cut or start == 0, not cut or stop == size, stop - start)
        for start, stop in bounds
    ]


def documents(part: Part, options: Options) -> Iterator[Document]:
    """The documents that begin in a part.

    Raises:
        ValueError: A document is damaged; names file and line or row. OSError: From the file system.
    """
    if part.kind == "text":
        yield from _texts(part, options.separator)
        return
    if part.kind == "json":
        rows = formats.json_lines(part.path, _content(part), part.start)
    else:
        rows = formats.parquet_rows(part.path, part.start, part.stop, {options.key, *ROW_KEYS})
    for row, place in rows:
        yield from _pieces(value_of(row, options, place))


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


def _pieces(value: str | Conversation, *, begins: bool = True, ends: bool = True) -> Iterator[Document]:
    """A document, long texts in pieces; ``begins``, ``ends``: The first and last piece are those of the document."""
    found: list[str | Conversation] = [*pieces(value)] if isinstance(value, str) else [value]
    for number, piece in enumerate(found, 1):
        yield Document(piece, begins and number == 1, ends and number == len(found))


def _bounds(file: Path, size: int, most: int, kind: str, separator: str | None) -> list[int]:
    """Offsets at which parts begin, and the end."""
    if size <= most:
        return [0, size]
    ends = re.compile(rb"\n" if kind == "json" else rb"\S\r*\n(?=\S)")
    if separator is not None:
        ends = re.compile(rb"(?<=\n)" + re.escape(separator.encode()) + rb"\r*\n")
    found = [0]
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        while found[-1] + most < size and (end := ends.search(content, found[-1] + most - 1)):
            found.append(end.end())
    return found if found[-1] == size else [*found, size]


def _content(part: Part) -> bytes:
    if part.stop < 0:
        return formats.decompressed(part.path)
    with open(part.path, "rb") as content:
        content.seek(part.start)
        return content.read(part.stop - part.start)


def _texts(part: Part, separator: str | None) -> Iterator[Document]:
    """Documents between separators, or pieces of the whole text."""
    text = formats.decoded(part.path, _content(part), part.start, mark=not part.start)
    if separator is None:
        yield from _pieces(text, begins=part.begins, ends=part.ends)
        return
    lines: list[str] = []
    for line in itertools.chain(_LINE.findall(text), [separator]):  # str.splitlines splits at more characters
        if line.rstrip("\r\n") != separator:
            lines.append(line)
        elif lines:
            yield from _pieces("".join(lines).removeprefix("\ufeff"))  # of a file before they were put together
            lines = []


def _row_groups(file: Path, size: int, key: str, most: int) -> list[Part]:
    opened = formats.open_parquet(str(file))
    names = opened.schema_arrow.names
    if key not in names:
        raise ValueError(f"{file} has no column {key!r}; it has {', '.join(names)}; --key names the one")
    sizes = [opened.metadata.row_group(number).total_byte_size for number in range(opened.num_row_groups)]
    found, start = [], 0
    for stop in range(1, len(sizes) + 1):
        if stop == len(sizes) or sum(sizes[start : stop + 1]) > most:
            share = size * sum(sizes[start:stop]) // max(1, sum(sizes))
            found.append(Part(str(file), "parquet", start, stop, True, True, share))
            start = stop
    return found
