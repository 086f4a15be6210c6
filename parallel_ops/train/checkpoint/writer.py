"""Writes one checkpoint with checksums. It is renamed to its final name when all ranks have written."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from parallel_ops.train.checkpoint.description import (
    DESCRIPTION,
    METADATA,
    Description,
    Sums,
    best_in,
    checksum,
    steps_in,
    write_description,
    write_json,
)

_SUMS = "sums.json"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointWriter(FileSystemWriter):
    """Writes to ``part`` with checksums; the coordinator renames it to ``final`` when all ranks have written."""

    def __init__(self, part: Path, final: Path, description: Description, keep: int, keep_best: bool) -> None:
        super().__init__(part)
        self.part, self.final, self.description, self.keep, self.keep_best = part, final, description, keep, keep_best

    def prepare_local_plan(self, plan: Any) -> Any:
        with _written(self.final.parent):
            return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        with _written(self.final.parent):
            written = super().write_data(plan, planner)
            names = sorted({result.storage_data.relative_path for result in written.value()})
            sums = {name: checksum(self.part / name) for name in names}
            write_json(self.part / f"{plan.storage_data.prefix}{_SUMS}", sums)
            return written

    def finish(self, metadata: Any, results: Any) -> None:
        with _written(self.final.parent):
            super().finish(metadata, results)
            sums: Sums = {METADATA: checksum(self.part / METADATA)}
            for rank in range(len(results)):
                own = self.part / f"__{rank}_{_SUMS}"
                sums |= json.loads(own.read_text())
                own.unlink()
            write_description(self.part, self.description, sums)
            _sync(self.part)
            shutil.rmtree(self.final, ignore_errors=True)
            self.part.rename(self.final)
            _sync(self.final.parent)
        found = steps_in(self.final.parent)
        best = best_in(self.final.parent) if self.keep_best else None
        for step in sorted(found)[: -self.keep]:
            if best is not None and found[step] == best[1]:
                continue
            # The description first: an interrupted deletion leaves no checkpoint.
            (found[step] / DESCRIPTION).unlink(missing_ok=True)
            shutil.rmtree(found[step])


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Raises the file system's error, which torch wraps in its own."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        if cause.errno not in _FULL:
            raise cause from None
        free = shutil.disk_usage(folder).free
        raise OSError(
            f"{cause.strerror}: the disk of {folder} is full ({free / 1e6:,.1f} MB are free); free some, or name "
            "another checkpoint.dir"
        ) from None


def _sync(folder: Path) -> None:
    """Syncs a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
