"""Text as bytes: 256 tokens, no tokenizer, any language and any file."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
# Folders of the standard library that are not read: installed packages, tests and tables of escapes.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"},
)


def load_text(path: Path = STANDARD_LIBRARY) -> Tensor:
    """The bytes of a text.

    Args:
        path: A file, which is memory-mapped, or a folder, whose regular files are joined in sorted order, except
            hidden ones. Of the standard library only ``*.py`` files are read, without tests and tables.

    Returns:
        ``[n]`` uint8, on the CPU.

    Raises:
        FileNotFoundError, PermissionError, OSError: From the file system, with the path.
        ValueError: The path is neither a file nor a folder, or is empty.
    """
    if path == STANDARD_LIBRARY:
        tokens = _join(sorted(file for file in _files(path, SKIPPED_FOLDERS) if file.suffix == ".py"))
    elif path.is_dir():
        tokens = _join(sorted(_files(path)))
    elif path.is_file():
        tokens = _map(path)
    elif path.exists():
        raise ValueError(f"{path} is neither a file nor a folder")
    else:
        raise FileNotFoundError(f"{path} does not exist")
    if not tokens.numel():
        raise ValueError(f"{path} has no text in it")
    return tokens


def _map(path: Path) -> Tensor:
    size = path.stat().st_size
    with path.open("rb"):  # torch's own message for an unreadable file does not name the reason
        pass
    return torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def _join(files: list[Path]) -> Tensor:
    content = bytearray().join(file.read_bytes() for file in files)
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _files(folder: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        yield from (file for name in names if not name.startswith(".") and (file := Path(root, name)).is_file())
