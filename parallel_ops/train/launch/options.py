"""How a run is started, from the command line."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Start:
    """How a run is started.

    Attributes:
        resume: go on from a checkpoint: that of ``path``, or the newest in ``checkpoint.dir`` if there is one.
        path: a checkpoint, or a folder of them; ``None`` for ``checkpoint.dir``.
        elastic: where there are other ranks than the plan has, it is chosen anew for them.
        max_restarts: how often processes that are started here begin again, from the last checkpoint, after one failed.
        command: the command line without ``--resume``, for messages; empty where there is none.
    """

    resume: bool = False
    path: Path | None = None
    elastic: bool = False
    max_restarts: int = 0
    command: str = ""
