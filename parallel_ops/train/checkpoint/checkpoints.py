"""Checkpoints of a run, by torch.distributed.checkpoint: saved on any ranks, read on any others.

    FOLDER/step-00000050/run.json       the step, what the run is, and size and checksum of each other file
    FOLDER/step-00000050/__0_0.distcp   what rank 0 has of model and optimizer; .metadata says what is where
    FOLDER/.step-00000100.part/         one that is being written

A checkpoint gets its name when all of it is on the disk, so whoever is killed while it is written leaves the ones
before as they were.
"""

import contextlib
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_state

_STEP, _PART = re.compile(r"step-(\d{8,})"), re.compile(r"\.step-\d{8,}\.part")
_DESCRIPTION, _METADATA, _SUMS = "run.json", ".metadata", "sums.json"
_PIECE = 1 << 24


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, with the file and the reason; raised on every rank."""


@dataclass(frozen=True)
class Description:
    """What a checkpoint says of itself.

    Attributes:
        step: steps taken. samples: taken from the data.
        model, data: what the run is of, as plain values; see ``Trainer``. rest: what else resuming needs.
    """

    step: int
    samples: int
    model: dict[str, Any]
    data: dict[str, Any]
    rest: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run in one folder.

    Args:
        keep: how many stay; older ones are deleted once a newer one is complete.
        asynchronous: ``save`` returns when the state is copied to host memory, and a thread writes it.
        group: of all ranks, over gloo, that nobody else uses; ``None`` for one rank.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, keep: int = 2, asynchronous: bool = True, group: ProcessGroup | None) -> None:
        self.folder, self.keep, self.asynchronous, self.group = folder, keep, asynchronous, group
        self._writing: tuple[Path, Future[Any]] | None = None
        if group is None:  # a thread writes, after this: no block with another filter would last
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        if _rank(group) == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if _PART.fullmatch(path.name):
                    shutil.rmtree(path)

    def begin(self, step: int) -> None:
        """A run goes on here from ``step``; all ranks call it. Later checkpoints are set aside, under other names.

        Raises:
            CheckpointError: a run that begins, in a folder that has checkpoints.
        """
        later = {number: path for number, path in steps_in(self.folder).items() if number > step}
        if later and not step:
            raise CheckpointError(
                f"{self.folder} has a checkpoint of step {max(later)} already: go on from it with --resume, or name "
                "another folder"
            )
        if self.group is not None:
            dist.barrier(self.group)
        if _rank(self.group) == 0:
            for path in later.values():
                aside = path.with_name(f"abandoned-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)

    def save(self, state: dict[str, Any], description: Description) -> None:
        """Saves tensors and what describes them; all ranks call it. Waits for the one before.

        Raises:
            CheckpointError: this one cannot be written, or the one before could not.
        """
        self.wait()
        part = self.folder / f".step-{description.step:08}.part"
        with self._reported(part):
            if _rank(self.group) == 0:
                shutil.rmtree(part, ignore_errors=True)
            writer = _Writer(part, self.folder / f"step-{description.step:08}", description, self.keep)
            options: dict[str, Any] = {"storage_writer": writer, "process_group": self.group}
            options["no_dist"] = self.group is None
            if self.asynchronous:
                self._writing = part, async_save(state, **options)  # type: ignore[assignment]
            else:
                save_state(state, **options)

    def wait(self) -> None:
        """Until what is being written is there.

        Raises:
            CheckpointError: it could not be written.
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
                shutil.rmtree(part, ignore_errors=True)
            kept = steps_in(self.folder)
            last = f"the last complete one is {kept[max(kept)]}" if kept else "there is none before it"
            raise CheckpointError(f"{error} ({last})") from error.__cause__


def load(state: dict[str, Any], path: Path, group: ProcessGroup | None) -> None:
    """Fills tensors from a checkpoint, whose files are checked first; all ranks call it.

    Raises:
        CheckpointError: a file that is missing or damaged, by name, or tensors that are not those of ``state``.
    """
    _verify(path, group)
    with _explained(f"cannot load the checkpoint {path}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load_state(state, checkpoint_id=path, process_group=group, no_dist=group is None)


def describe(path: Path) -> Description:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: it says nothing that we understand.
    """
    return _read(path)[0]


def newest(folder: Path) -> Path:
    """The checkpoint of the most steps in a folder, or the folder itself if it is one.

    Raises:
        CheckpointError: there is none.
    """
    if _STEP.fullmatch(folder.name) and (folder / _DESCRIPTION).exists():
        return folder
    steps = steps_in(folder)
    if not steps:
        raise CheckpointError(f"{folder} has no checkpoint in it: no folder named step-00000001 or the like")
    return steps[max(steps)]


def steps_in(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder, by step; none where there is no such folder."""
    if not folder.is_dir():
        return {}
    return {int(m[1]): path for path in folder.iterdir() if (m := _STEP.fullmatch(path.name))}


class _Writer(FileSystemWriter):
    """Writes to ``part`` with checksums; the coordinator, once all ranks have written, gives it its name."""

    def __init__(self, part: Path, final: Path, description: Description, keep: int) -> None:
        super().__init__(part)
        self.part, self.final, self.description, self.keep = part, final, description, keep

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        names = sorted({result.storage_data.relative_path for result in written.value()})
        sums = {name: _checksum(self.part / name) for name in names}
        _write_json(self.part / f"{plan.storage_data.prefix}{_SUMS}", sums)
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        sums = {_METADATA: _checksum(self.part / _METADATA)}
        for rank in range(len(results)):
            own = self.part / f"__{rank}_{_SUMS}"
            sums |= json.loads(own.read_text())
            own.unlink()
        _write_json(self.part / _DESCRIPTION, {**vars(self.description), "files": sums})
        _sync(self.part)
        shutil.rmtree(self.final, ignore_errors=True)
        self.part.rename(self.final)
        _sync(self.final.parent)
        found = steps_in(self.final.parent)
        for step in sorted(found)[: -self.keep]:
            # Its description goes first: what is left when this is interrupted is no checkpoint.
            (found[step] / _DESCRIPTION).unlink(missing_ok=True)
            shutil.rmtree(found[step])


def _read(path: Path) -> tuple[Description, dict[str, list[int]]]:
    file = path / _DESCRIPTION
    try:
        said = json.loads(file.read_text())
        files = said.pop("files")
        description = Description(**said)
        if not isinstance(description.step, int) or not isinstance(description.samples, int) or not files:
            raise ValueError("a value is missing")
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not of a checkpoint, or damaged: {error!r}") from error
    return description, files


def _verify(path: Path, group: ProcessGroup | None) -> None:
    """Each rank reads some of the files; all raise what one found."""
    problems: list[str] = []
    try:
        files = sorted(_read(path)[1].items())
        for name, (size, checksum) in files[_rank(group) :: 1 if group is None else group.size()]:
            file = path / name
            try:
                found = _checksum(file)
            except OSError as error:
                problems.append(f"{file}: {error.strerror}")
            else:
                if found[0] != size:
                    problems.append(f"{file} is damaged: it has {found[0]} bytes, of {size}")
                elif found[1] != checksum:
                    problems.append(f"{file} is damaged: its checksum is {found[1]:08x}, not {checksum:08x}")
    except CheckpointError as error:
        problems.append(str(error))
    if group is not None:
        everyone: list[list[str]] = [[] for _ in range(group.size())]
        dist.all_gather_object(everyone, problems, group=group)
        problems = sorted({problem for found in everyone for problem in found})
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        others = [str(other) for other in steps_in(path.parent).values() if other != path]
        hint = f"; there is also {max(others)}" if others else ""
        raise CheckpointError(f"{problems[0]}{more}{hint}")


@contextlib.contextmanager
def _explained(failure: str) -> Iterator[None]:
    """Torch's collected errors as one of ours."""
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(reason, KeyboardInterrupt):
            raise reason from None
        raise CheckpointError(f"{failure}: rank {rank}: {reason}") from error
    except OSError as error:
        raise CheckpointError(f"{failure}: {error}") from error


def _checksum(file: Path) -> list[int]:
    """Bytes and CRC-32 of a file."""
    size = checksum = 0
    with file.open("rb") as content:
        while piece := content.read(_PIECE):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return [size, checksum]


def _write_json(path: Path, content: Any) -> None:
    with path.open("w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """The names in a folder are on the disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()
