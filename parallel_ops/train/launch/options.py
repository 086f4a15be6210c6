"""Options of a start on the command line."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Start:
    """Options of a start.

    Attributes:
        resume: Resume from the checkpoint ``path``, or from the newest in ``checkpoint.dir`` if there is one.
        path: A checkpoint, or a folder of checkpoints; ``None`` for ``checkpoint.dir``.
        new_phase: Begin a new phase of training from ``path``; see ``Trainer.begin_phase``.
        elastic: Choose a new plan if the number of ranks differs from the plan's.
        max_restarts: Restarts of the local processes from the last checkpoint after a failure.
        command: The command line without ``--resume``, for messages; empty if there is none.
        trainer: Makes the trainer of a rank, a context with ``train``, from the arguments of ``Trainer``; a function or
            object that can be pickled. ``None`` for ``Trainer`` itself.
    """

    resume: bool = False
    path: Path | None = None
    new_phase: bool = False
    elastic: bool = False
    max_restarts: int = 0
    command: str = ""
    trainer: Callable[..., Any] | None = None
