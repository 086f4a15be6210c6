"""Deletes checkpoints, and nothing else: no link is followed, and files that no run wrote are kept."""

import os
import re
from pathlib import Path

from parallel_ops.train.checkpoint.description import DESCRIPTION, METADATA
from parallel_ops.train.report.outputs import warn

PART = re.compile(r"\.(step-\d{8,})\.part")
# Files that a save writes.
_WRITTEN = re.compile(rf"__\d+_\d+\.distcp|{re.escape(METADATA)}(\.tmp)?|{re.escape(DESCRIPTION)}")


def part_of(folder: Path) -> Path:
    """The name under which the checkpoint ``folder`` is written and deleted."""
    return folder.with_name(f".{folder.name}.part")


def remove(folder: Path) -> None:
    """Deletes a checkpoint, complete or in part. A link is left as it is; an error of the file system is a warning.

    Files that no run wrote stay, in a folder named ``abandoned-...``.
    """
    try:
        _remove(folder)
    except OSError as error:
        warn(f"{folder} could not be deleted: {error.strerror or error}")


def _remove(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        written = {e.name: e.is_file(follow_symlinks=False) and bool(_WRITTEN.fullmatch(e.name)) for e in entries}
    if not all(written.values()):
        folder = set_aside(folder)
        others = ", ".join(sorted(name for name, own in written.items() if not own)[:3])
        warn(f"{folder} is left of a checkpoint that is deleted: it has files that no run wrote ({others})")
    elif not PART.fullmatch(folder.name) and not os.path.lexists(part_of(folder)):
        # An interrupted deletion leaves no checkpoint.
        folder = folder.rename(part_of(folder))
    for name in sorted(name for name, own in written.items() if own):
        (folder / name).unlink(missing_ok=True)
    if all(written.values()):
        folder.rmdir()


def set_aside(path: Path) -> Path:
    """Renames a checkpoint or link to the first free name ``abandoned-...``, and returns that."""
    part = PART.fullmatch(path.name)
    name = f"abandoned-{part[1] if part else path.name}"
    number = 0
    while os.path.lexists(aside := path.with_name(name if not number else f"{name}.{number}")):
        number += 1
    return path.rename(aside)
