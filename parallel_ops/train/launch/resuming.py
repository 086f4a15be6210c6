"""Finds and loads the checkpoint of a run that is started with ``--resume``."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_ops.train.checkpoint import checkpoints, new_phase, resume
from parallel_ops.train.checkpoint.checkpoints import CheckpointError
from parallel_ops.train.config import Settings
from parallel_ops.train.launch.options import Start

if TYPE_CHECKING:
    from parallel_ops.train.trainer import Trainer


def restarts() -> int:
    """How often torch's agent has restarted this process."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def check(settings: Settings, start: Start) -> None:
    """Checks the checkpoint to resume from and the folder to save in, before any process group.

    Raises:
        ValueError: No folder or checkpoint is named. CheckpointError: ``checkpoint.dir`` has checkpoints of another run
        or is a checkpoint itself; the checkpoint to resume from is missing, damaged or of another model.
    """
    folder = settings.checkpoint.dir
    if start.new_phase and start.path is None:
        raise ValueError("--new-phase needs --resume PATH, the checkpoint from which it begins")
    if start.resume and start.path is None and folder is None:
        raise ValueError("--resume needs checkpoint.dir, where checkpoints are, or the PATH of one")
    there = {}
    if folder is not None:
        checkpoints.check_folder(folder)
        there = checkpoints.steps_in(folder)
    if there and not start.resume:
        raise CheckpointError(
            f"{folder} has a checkpoint of step {max(there)} already: resume from it with --resume, or name another "
            "folder"
        )
    if not start.resume:
        return
    with advised(start):
        source = source_of(settings, start)
        begins = source is not None and begins_phase(settings, start, source)
        if source is not None and begins:
            new_phase.changes_of_model(source, resume.shape_of(settings.config))
        elif source is not None:
            resume.described_as(source, resume.shape_of(settings.config))
    if there and begins:
        raise CheckpointError(
            f"{folder} has a checkpoint of step {max(there)} already: name another checkpoint.dir for the new phase, "
            "or go on in it with --resume alone"
        )
    if there and source is not None and source.resolve() not in {path.resolve() for path in there.values()}:
        raise CheckpointError(
            f"{folder} has a checkpoint of step {max(there)}, of a run that {source} is not of: resume from it with "
            f"--resume {folder}, or name another checkpoint.dir"
        )


def begins_phase(settings: Settings, start: Start, source: Path) -> bool:
    """True if a new phase begins from ``source``; a restart goes on from the phase's own checkpoints."""
    folder = settings.checkpoint.dir
    own = restarts() and folder is not None and source in checkpoints.steps_in(folder).values()
    return start.new_phase and not own


def source_of(settings: Settings, start: Start) -> Path | None:
    """The checkpoint to resume from; ``None`` for a run that begins. A restart resumes from the run's own latest
    checkpoint."""
    folder = settings.checkpoint.dir
    there = {} if folder is None else checkpoints.steps_in(folder)
    if start.path is None:
        return there[max(there)] if there else None
    if restarts():
        for step in sorted(there, reverse=True):
            if checkpoints.describe(there[step]).rest.get("origin") == str(start.path):
                return there[step]
    return checkpoints.newest(start.path)


def resume_trainer(trainer: "Trainer", start: Start) -> Path | None:
    """Resumes from a checkpoint if there is one, and prints which; all ranks call it.

    Returns:
        The checkpoint, or ``None``.

    Raises:
        CheckpointError: See ``Trainer.resume``; the message has a command for another checkpoint if there is one.
    """
    trainer.origin = None if start.path is None else str(start.path)
    lines = []
    with advised(start):
        source = source_of(trainer.settings, start)
        if source is None:
            lines.append(f"begins: {trainer.settings.checkpoint.dir} has no checkpoint")
        elif begins_phase(trainer.settings, start, source):
            lines += [f"a new phase from {source}", *trainer.begin_phase(source)]
        else:
            changes = resume.changes_of_data(trainer, source)
            trainer.resume(source)
            lines.append(f"resumes from {source}")
            if changes:
                lines.append(
                    f"note: {source} is of other data ({', '.join(changes)}): the run keeps its step and weights, and "
                    "takes samples of these data from the first one on"
                )
            if trainer.global_step >= trainer.settings.run.steps:
                lines.append(
                    f"nothing is left to do: {trainer.global_step} steps are done, and run.steps is "
                    f"{trainer.settings.run.steps}; --steps N takes more"
                )
    if trainer.rank == 0:
        after = f"restart {again}: " if (again := restarts()) else ""
        print(after + "\n".join(lines), file=sys.stderr, flush=True)
    return source


@contextlib.contextmanager
def advised(start: Start) -> Iterator[None]:
    """Adds to the error of a damaged checkpoint a command that resumes from another one."""
    try:
        yield
    except CheckpointError as error:
        if error.other is None or not start.command:
            raise
        command = f"{start.command} --resume {shlex.quote(str(error.other))}"
        raise CheckpointError(f"{error}; to resume from it: {command}", error.other) from error
