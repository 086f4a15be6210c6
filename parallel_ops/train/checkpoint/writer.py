"""Writes one checkpoint with checksums. It is renamed to its final name when all ranks have written."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.futures import Future

from parallel_ops.train.checkpoint.description import (
    METADATA,
    Description,
    Sums,
    best_in,
    checksum,
    steps_in,
    write_description,
)
from parallel_ops.train.checkpoint.owner import Owner
from parallel_ops.train.checkpoint.removal import part_of, remove, set_aside
from parallel_ops.train.report.outputs import warn

_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointWriter(FileSystemWriter):
    """Writes with checksums; the coordinator gives the folder its name ``final`` when all ranks have written.

    Args:
        owner: Owner of the folder of checkpoints, on the coordinator.
    """

    def __init__(
        self, final: Path, description: Description, owner: Owner | None, keep: int, keep_best: bool
    ) -> None:  # fmt: skip
        self.part, self.final, self.description = part_of(final), final, description
        self.owner, self.keep, self.keep_best = owner, keep, keep_best
        super().__init__(self.part)

    def prepare_local_plan(self, plan: Any) -> Any:
        with _written(self.final.parent):
            return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        self._check_owner()
        return super().prepare_global_plan(plans)

    def _check_owner(self) -> None:
        if self.owner is not None:
            self.owner.check()

    def write_data(self, plan: Any, planner: Any) -> Any:
        with _written(self.final.parent):
            results = super().write_data(plan, planner).value()
            names = sorted({result.storage_data.relative_path for result in results})
            found: Future[Any] = Future()
            found.set_result((results, {name: checksum(self.part / name) for name in names}))
            return found

    def finish(self, metadata: Any, results: Any) -> None:
        with _written(self.final.parent):
            super().finish(metadata, [written for written, _ in results])
            sums: Sums = {METADATA: checksum(self.part / METADATA)}
            for _, own in results:
                sums |= own
            write_description(self.part, self.description, sums)
            _sync(self.part)
            self._check_owner()
            # One of the same step is there until the new one is.
            earlier = set_aside(self.final) if os.path.lexists(self.final) else None
            self.part.rename(self.final)
            _sync(self.final.parent)
        try:
            found = steps_in(self.final.parent)
            best = best_in(self.final.parent) if self.keep_best else None
        except OSError as error:
            warn(f"no earlier checkpoint is deleted: {error}")
            return
        surplus = [found[step] for step in sorted(found)[: -self.keep] if best is None or found[step] != best[1]]
        for path in [*surplus, *([] if earlier is None else [earlier])]:
            remove(path)


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
