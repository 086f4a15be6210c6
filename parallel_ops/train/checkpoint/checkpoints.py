"""Checkpoints of a run, by torch.distributed.checkpoint. They can be read on another number of ranks.

    FOLDER/step-00000050/run.json       step, model and data of the run; size and checksum of each file
    FOLDER/step-00000050/__0_0.distcp   rank 0's part of model and optimizer; .metadata is the index
    FOLDER/.step-00000100.part/         a checkpoint that is being written or deleted
    FOLDER/.owner                       the run that writes and deletes here; see ``owner``

A checkpoint is renamed to its final name when all of it is on the disk, so a run that is killed while writing leaves
the earlier ones intact. Errors of what is deleted are warnings; see ``removal``.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from parallel_ops.train.checkpoint.description import (
    CheckpointError,
    Description,
    Sums,
    is_checkpoint,
    problem_of,
    read_description,
    steps_in,
)
from parallel_ops.train.checkpoint.metadata import SafeLoadPlanner, SafeReader, read_metadata
from parallel_ops.train.checkpoint.owner import Owner
from parallel_ops.train.checkpoint.planners import SavePlanner
from parallel_ops.train.checkpoint.removal import PART, part_of, remove, set_aside
from parallel_ops.train.checkpoint.writer import CheckpointWriter
from parallel_ops.train.step.reductions import of_first_rank

__all__ = ["CheckpointError", "Checkpoints", "Description", "check_folder", "describe", "load", "newest", "steps_in"]


class Checkpoints:
    """The checkpoints of a run in one folder, which it owns until ``close``; all ranks construct it.

    Args:
        keep: Number of checkpoints kept; older ones are deleted when a newer one is complete.
        keep_best: Keep the one with the lowest evaluation loss too.
        asynchronous: ``save`` returns when the state is copied to host memory, and a thread writes it.
        group: A gloo group of all ranks, used for checkpoints only; ``None`` without a default process group.

    Raises:
        CheckpointError: The folder is a checkpoint, or belongs to a run that goes on; on every rank. OSError: It
            cannot be made; on every rank.
    """

    def __init__(
        self, folder: Path, *, keep: int = 2, keep_best: bool = False, asynchronous: bool = True,
        group: ProcessGroup | None,
    ) -> None:  # fmt: skip
        self.folder, self.asynchronous, self.group = folder, asynchronous, group
        self.keep, self.keep_best = keep, keep_best
        self._writing: tuple[Path, Future[Any]] | None = None
        check_folder(folder)
        if group is None:  # for good: the thread writes after any block with another filter
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        self._owner: Owner | None = None
        of_first_rank(self._open, group)

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._owner = Owner(self.folder)
        for path in self.folder.iterdir():
            if PART.fullmatch(path.name):
                remove(path)

    def close(self) -> None:
        """Waits for the current save, whose error is dropped, and leaves the folder to other runs."""
        with contextlib.suppress(CheckpointError):
            self.wait()
        if self._owner is not None:
            self._owner.close()

    def begin(self, step: int) -> None:
        """Starts saving from ``step`` on; all ranks call it. Later checkpoints are renamed to ``abandoned-...``.

        Raises:
            CheckpointError: ``step`` is 0, and the folder has checkpoints.
        """

        def abandon() -> None:
            later = {number: path for number, path in steps_in(self.folder).items() if number > step}
            if later and not step:
                raise CheckpointError(
                    f"{self.folder} has a checkpoint of step {max(later)} already: resume from it with --resume, or "
                    "name another folder"
                )
            for path in later.values():
                remove(path.with_name(f"abandoned-{path.name}"))
                set_aside(path)

        of_first_rank(abandon, self.group)

    def save(self, state: dict[str, Any], description: Description) -> None:
        """Saves a state and its description after the previous save is complete; all ranks call it.

        Raises:
            CheckpointError: This checkpoint or the previous one cannot be written.
        """
        self.wait()
        final = self.folder / f"step-{description.step:08}"
        part = part_of(final)
        with self._reported(part):
            writer = CheckpointWriter(final, description, self._owner, self.keep, self.keep_best)
            options: dict[str, Any] = {"storage_writer": writer, "planner": SavePlanner(), "process_group": self.group}
            options["no_dist"] = self.group is None
            if self.asynchronous:
                self._writing = part, async_save(state, **options)  # type: ignore[assignment]
            else:
                save_state(state, **options)

    def failed(self) -> bool:
        """True if the current save has failed on this rank; ``wait`` raises its error."""
        if self._writing is None or not self._writing[1].done():
            return False
        return self._writing[1].exception() is not None

    def wait(self) -> None:
        """Waits until the current save is complete.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        if self._writing is not None:
            (part, future), self._writing = self._writing, None
            with self._reported(part):
                future.result()

    @contextlib.contextmanager
    def _reported(self, part: Path) -> Iterator[None]:
        try:
            with _explained(f"cannot write the checkpoint {part}"):
                yield
        except CheckpointError as error:
            if _rank(self.group) == 0:
                remove(part)
            kept = steps_in(self.folder)
            last = f"the last complete one, {kept[max(kept)]}, stays valid" if kept else "there is none before it"
            raise CheckpointError(f"{error} ({last})") from error.__cause__


def open_checked(path: Path, group: ProcessGroup | None) -> Metadata:
    """The index of a checkpoint after checking its files; all ranks call it.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    sums = verified(path, group)
    metadata, problems = None, []
    try:
        metadata = read_metadata(path, {name: size for name, (size, _) in sums.items()})
    except (ValueError, OSError) as error:
        problems.append(str(error))
    _agree(problems, path, group)
    assert metadata is not None
    return metadata


def load(state: dict[str, Any], path: Path, group: ProcessGroup | None, metadata: Metadata) -> None:
    """Loads a checkpoint, or a part of it, into ``state``; all ranks call it. No code in a file is run.

    Args:
        metadata: The result of ``open_checked``.

    Raises:
        CheckpointError: A file is missing or damaged, or the tensors are not those of ``state``.
    """
    with _explained(f"cannot load the checkpoint {path}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        reader = SafeReader(path, metadata)
        load_state(state, storage_reader=reader, planner=SafeLoadPlanner(), process_group=group, no_dist=group is None)


def describe(path: Path) -> Description:
    """The description of a checkpoint.

    Raises:
        CheckpointError: The description is missing or damaged.
    """
    try:
        return read_description(path)[0]
    except CheckpointError as error:
        raise _damaged(str(error), path) from error.__cause__


def newest(folder: Path) -> Path:
    """The checkpoint with the most steps in a folder, or the folder itself if it is a checkpoint.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    if is_checkpoint(folder):
        return folder
    steps = steps_in(folder)
    if not steps:
        raise CheckpointError(f"{folder} has no checkpoint in it: no folder named step-00000001 or the like")
    return steps[max(steps)]


def check_folder(folder: Path) -> None:
    """CheckpointError: The folder is a checkpoint, so checkpoints cannot be saved in it."""
    if is_checkpoint(folder):
        raise CheckpointError(
            f"checkpoint.dir {folder} is a checkpoint itself; name the folder for new ones, such as "
            f"{folder.parent}, and resume from this one with --resume {folder}"
        )


def _damaged(problem: str, path: Path) -> CheckpointError:
    """The error of a damaged checkpoint. It names the newest other one that is complete; checksums are not verified."""
    there = steps_in(path.parent)
    for step in sorted(there, reverse=True):
        other = there[step]
        if other.name == path.name:
            continue
        with contextlib.suppress(CheckpointError):
            sums = read_description(other)[1]
            if not any(problem_of(other / name, size, None) for name, (size, _) in sums.items()):
                return CheckpointError(f"{problem}; the newest other one that has all its files is {other}", other)
    return CheckpointError(f"{problem}; {path.parent} has no other one that has all its files")


def verified(path: Path, group: ProcessGroup | None) -> Sums:
    """Verifies the files of the description, each rank a share of them.

    Raises:
        CheckpointError: A file is missing or damaged; on all ranks.
    """
    problems: list[str] = []
    sums: Sums = {}
    try:
        sums = read_description(path)[1]
        for name, (size, wanted) in sorted(sums.items())[_rank(group) :: 1 if group is None else group.size()]:
            if problem := problem_of(path / name, size, wanted):
                problems.append(problem)
    except CheckpointError as error:
        problems.append(str(error))
    _agree(problems, path, group)
    return sums


def _agree(problems: list[str], path: Path, group: ProcessGroup | None) -> None:
    """CheckpointError: A rank has found a problem; raised on every rank."""
    if problems := of_all(problems, group):
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise _damaged(f"{problems[0]}{more}", path)


def of_all(names: Iterable[str], group: ProcessGroup | None) -> list[str]:
    """The names of all ranks, each once; all ranks call it."""
    everyone: list[list[str]] = [list(names)] * (1 if group is None else group.size())
    if group is not None:
        dist.all_gather_object(everyone, everyone[0], group=group)
    return list(dict.fromkeys(name for some in everyone for name in some))


@contextlib.contextmanager
def _explained(failure: str) -> Iterator[None]:
    """Converts torch's collected errors into one ``CheckpointError``."""
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(reason, KeyboardInterrupt):
            raise reason from None
        raise CheckpointError(f"{failure}: rank {rank}: {reason}") from error
    except OSError as error:
        raise CheckpointError(f"{failure}: {error}") from error


def _rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()
