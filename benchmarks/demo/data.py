"""Text as bytes: 256 tokens, no tokenizer, any language and any file."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
# Folders of the standard library that are not read: installed packages, tests and tables of escapes.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"},
)


def load_text(path: Path = STANDARD_LIBRARY) -> NDArray[np.uint8]:
    """The bytes of a text, uint8 ``[n]``.

    Args:
        path: A file, which is memory-mapped, or a folder, whose regular files are joined in sorted order, except
            hidden ones. Of the standard library only ``*.py`` files are read, without tests and tables.

    Raises:
        FileNotFoundError, PermissionError, OSError: From the file system, with the path.
        ValueError: The path is neither a file nor a folder, or is empty.
    """
    size = path.stat().st_size if path.exists() else 0
    text: NDArray[np.uint8]
    if path.is_dir():
        text = np.frombuffer(b"".join(file.read_bytes() for file in sorted(_files(path))), np.uint8)
    elif path.is_file():
        text = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
    elif path.exists():
        raise ValueError(f"{path} is neither a file nor a folder")
    else:
        raise FileNotFoundError(f"{path} does not exist")
    if not len(text):
        raise ValueError(f"{path} has no text in it")
    return text


def _files(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    library = folder == STANDARD_LIBRARY
    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [own for own in folders if not own.startswith(".") and not (library and own in SKIPPED_FOLDERS)]
        for name in names:
            if (
                not name.startswith(".")
                and (name.endswith(".py") or not library)
                and (file := Path(root, name)).is_file()
            ):
                yield file
