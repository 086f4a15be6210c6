"""Paths as users write them, and the files of a folder that are read. Needs neither torch nor NumPy."""

import contextlib
import glob
import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")
# Unread files that are named; further ones are counted.
_NAMED = 20
# Of a file's digest: bytes from the beginning of one block to that of the next, and those that are read.
_STRIDE, _LOOK = 64 << 20, 4 << 20


def expanded(path: str | Path) -> Path:
    """``path`` with ``~``, ``~user``, ``$VARIABLE`` and ``${VARIABLE}`` replaced, unless it exists as it stands.

    Raises:
        ValueError: A variable is not set, the path is empty, or there is no such user.
    """
    text = str(path)
    if not text.startswith("~") and os.path.lexists(text):
        return Path(path)
    found = os.path.expandvars(text)
    if missing := _VARIABLE.search(found):
        raise ValueError(f"{text}: the variable {missing[0]} is not set")
    if not found:
        raise ValueError(f"{text!r} is an empty path; . is the current folder")
    found = os.path.expanduser(found)
    if found.startswith("~") and "/" in found and not os.path.lexists(found.partition("/")[0]):
        raise ValueError(f"{text}: there is no user {found.partition('/')[0][1:]!r}")
    return Path(found)


def one_path(path: str | Path) -> Path:
    """``expanded`` for a single file or folder; a pattern with ``*`` or ``?`` must match one that exists.

    Raises:
        ValueError: See ``expanded``; or the pattern matches none or several.
    """
    found = expanded(path)
    if not _is_pattern(found, "*?"):
        return found
    matches = _matches(found)
    if len(matches) != 1:
        some = f"{len(matches)} paths: {', '.join(map(str, matches[:4]))}" if matches else "nothing"
        raise ValueError(f"{path} must name one path, and matches {some}")
    return matches[0]


def matches(path: Path) -> list[Path]:
    """``path``, or what a pattern matches, in sorted order.

    Raises:
        FileNotFoundError: It does not exist, or the pattern matches nothing.
    """
    if os.path.lexists(path):
        return [path]
    there = _matches(path) if _is_pattern(path, "*?[") else []
    if not there:
        raise FileNotFoundError(f"{path} matches nothing" if _is_pattern(path, "*?[") else f"{path} does not exist")
    return there


@dataclass
class Found:
    """Files to read. ``unread``: Other files and folders, not hidden, each with the reason."""

    files: list[Path] = field(default_factory=list)
    unread: list[tuple[Path, str]] = field(default_factory=list)


def find(path: Path, reason: Callable[[Path], str | None], *, deep: bool) -> Found:
    """The files that a path stands for, in sorted order.

    A file is itself, whatever its name. Of a folder, or of a pattern such as ``data/*.bin``, those files are read for
    which there is no ``reason`` against it. Names that begin with a dot are left out. Each file and folder is read
    once: a link to one that is read already is in ``unread``.

    Args:
        path: As ``expanded`` returns it.
        reason: Why a file is not read, ``""`` if it belongs to another one, or ``None`` if it is read.
        deep: Read the folders of a folder too; otherwise these are in ``unread``.

    Raises:
        FileNotFoundError: The path does not exist, or the pattern matches nothing. OSError: From the file system.
    """
    files: list[Path] = []
    unread: list[tuple[Path, str]] = []
    there = matches(path)
    if there == [path] and not path.is_dir():
        return Found([path])
    for match in there:
        own, left = _entries(match, deep=deep) if match.is_dir() else ([match], [])
        files, unread = files + own, unread + left
    return chosen(files, unread, reason)


def chosen(files: Iterable[Path], unread: Iterable[tuple[Path, str]], reason: Callable[[Path], str | None]) -> Found:
    """Those of ``files`` that are read, each once; see ``find``. ``unread``: What is not, beside them."""
    found = Found(unread=list(unread))
    first: dict[tuple[int, int], Path] = {}
    # A link after the file itself. Hard links are files of their own.
    for is_link, path in sorted((path.is_symlink(), path) for path in files):
        why = reason(path)
        if why is None and not path.is_file():
            why = "no regular file" if path.exists() else "a link to nothing"
        if why is None:
            status = path.stat()
            same = first.setdefault((status.st_dev, status.st_ino), path)
            if same == path or not is_link:
                found.files.append(path)
                continue
            why = f"the same file as {same}"
        if why:
            found.unread.append((path, why))
    found.files.sort()
    found.unread.sort()
    return found


def described(unread: Sequence[tuple[Path, str]]) -> str:
    """Unread files with their reasons, for a message."""
    reasons: dict[str, list[str]] = {}
    for path, reason in unread[:_NAMED]:
        reasons.setdefault(reason, []).append(str(path))
    more = f"; and {len(unread) - _NAMED:,} more" if len(unread) > _NAMED else ""
    return "; ".join(f"{', '.join(paths)} ({reason})" for reason, paths in reasons.items()) + more


def digest_of(files: Iterable[Path]) -> str:
    """A digest of the content of files: the first 4 MiB of each 64 MiB."""
    found = hashlib.blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        found.update(str(size).encode())
        with path.open("rb") as file:
            for start in range(0, size, _STRIDE):
                file.seek(start)
                found.update(file.read(_LOOK))
    return found.hexdigest()


def read_toml(path: Path | str) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        OSError: From the file system. ValueError: The file is not TOML, or this Python has no reader of it.
    """
    try:
        toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise ValueError("TOML files need Python 3.11 or the package tomli") from None
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:  # Windows' editors write a byte order mark
            found: dict[str, Any] = toml.loads(file.read())
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError(f"{path} is not TOML: {error}") from None
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file that holds an object.

    Raises:
        OSError: From the file system. ValueError: The file is not JSON, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object, got {type(found).__name__}")
    return found


@contextlib.contextmanager
def naming_errors(path: Path) -> Iterator[None]:
    """Gives ``path`` to an OSError that names no file: those of writes, as to a full disk, do not.

    Write arrays by ``file.write``: NumPy's ``tofile`` raises an OSError without the system's reason.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def suffix_of(path: Path) -> str:
    """The suffix in lower case."""
    return path.suffix.lower()


def _is_pattern(path: Path, characters: str) -> bool:
    return any(character in str(path) for character in characters) and not os.path.lexists(path)


def _matches(path: Path) -> list[Path]:
    return sorted(map(Path, glob.glob(str(path), recursive=True)))


def _entries(root: Path, *, deep: bool) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The files below a folder, and what is not looked into. Real folders come before links, so they have the names."""
    files: list[Path] = []
    unread: list[tuple[Path, str]] = []
    read: dict[tuple[int, int], Path] = {}
    folders, links = [root], list[Path]()
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        status = folder.stat()
        if first := read.get(key := (status.st_dev, status.st_ino)):
            unread.append((folder, f"the same folder as {first}"))
            continue
        read[key] = folder
        with os.scandir(folder) as there:
            for entry in sorted(there, key=lambda entry: entry.name):
                path = folder / entry.name
                if entry.name.startswith("."):
                    continue
                if not entry.is_dir():
                    files.append(path)
                elif deep:
                    (links if entry.is_symlink() else folders).append(path)
                else:
                    unread.append((path, "a folder"))
    return files, unread
