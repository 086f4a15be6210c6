"""Text as bytes: 256 tokens, no tokenizer, any language and any file."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

# Of the standard library: what is installed beside it, tests, and tables of escapes, which are not source code.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"},
)


def load_text(path: Path | None = None) -> Tensor:
    """The bytes of a text.

    Args:
        path: a file, which is memory-mapped, or a folder, whose regular files (none that is hidden) are joined in
            sorted order; ``None`` for the standard library of the running Python: its ``*.py`` files, but for tests
            and tables.

    Returns:
        ``[n]`` uint8, on the CPU.

    Raises:
        FileNotFoundError, PermissionError, OSError: as the file system says, naming the path.
        ValueError: neither a file nor a folder, or nothing in it.
    """
    if path is None:
        tokens = _join(_standard_library())
    elif path.is_dir():
        tokens = _join(sorted(_files(path)))
    elif path.is_file():
        tokens = _map(path)
    elif path.exists():
        raise ValueError(f"{path} is neither a file nor a folder")
    else:
        raise FileNotFoundError(f"{path} does not exist")
    if not tokens.numel():
        raise ValueError(f"{path or 'the standard library'} has no text in it")
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


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(file for file in _files(root, SKIPPED_FOLDERS) if file.suffix == ".py")
