"""Checks before a run that its outputs can be written; later on what cannot be is a warning."""

import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings

PLOT_FORMATS = (".png", ".pdf", ".svg")


def check(settings: "Settings") -> None:
    """Makes missing folders and checks that files can be written.

    Raises:
        ImportError: TensorBoard or matplotlib is needed and not installed. ValueError: Unknown format of the plot.
        OSError: A file or folder cannot be written; the message has its key.
    """
    logging = settings.logging
    pictures = logging.plot or (logging.trace if settings.plan.pp > 1 else None)
    needed = (("tensorboard", logging.tensorboard), ("matplotlib", pictures), ("wandb", logging.wandb))
    for package, given in needed:
        if given is not None and importlib.util.find_spec(package) is None:
            raise ImportError(f"{given} needs {package}; run: pip install {package}")
    if logging.plot is not None and logging.plot.suffix.lower() not in PLOT_FORMATS:
        raise ValueError(f"logging.plot must end in {', '.join(PLOT_FORMATS)}, got {logging.plot}")
    for key, folder in (
        ("checkpoint.dir", settings.checkpoint.dir),
        ("logging.tensorboard", logging.tensorboard),
        ("logging.trace", logging.trace),
        ("logging.profile", logging.profile),
    ):
        if folder is not None:
            _check_folder(key, folder)
    for key, file in (("logging.jsonl", logging.jsonl), ("logging.plot", logging.plot)):
        if file is not None:
            check_file(key, file)


def _check_folder(key: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in (folder, *folder.parents) if path.exists() and not path.is_dir())
        raise OSError(f"{key}: {file} is a file, where a folder is needed; name another") from None
    except OSError as error:
        raise OSError(f"{key}: {folder} cannot be written: {error.strerror}") from None


def check_file(key: str, file: Path) -> None:
    """Makes the folder of a file if it is missing.

    Raises:
        OSError: The file cannot be written; the message begins with ``key``.
    """
    if file.is_dir():
        raise OSError(f"{key}: {file} is a folder; name a file in it")
    if not file.exists():
        _check_folder(key, file.parent)
        return
    try:
        with file.open("ab"):
            pass
    except OSError as error:
        raise OSError(f"{key}: {file} cannot be written: {error.strerror}") from None


def warn(text: str) -> None:
    """Prints a problem that does not end the run."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def optional(name: str, warned: set[str]) -> Iterator[None]:
    """A block that writes a log, whose error is a warning, the first time.

    Args:
        warned: Names that have had theirs.
    """
    try:
        yield
    except Exception as error:  # of other packages too
        if name not in warned:
            warned.add(name)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            warn(f"{name}: {reason}; the run goes on")
