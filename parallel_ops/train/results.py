"""What a step gives, and how a run ends."""

from dataclasses import dataclass
from pathlib import Path


class NotFinite(FloatingPointError):
    """A loss or gradient norm that is not finite, with the step and its samples."""


@dataclass(frozen=True)
class Step:
    """What one step gave.

    Attributes:
        number: of the step, counted from 1.
        loss: mean over all tokens of the step, before its update, in nats. grad_norm: over all parameters, not clipped.
        tokens: of all ranks. seconds: from the wait for data to the end of the update. lr: learning rate.
        skipped: nothing was updated, since the norm is not finite.
        stop: the signal that asked a rank to stop, if one did.
    """

    number: int
    loss: float
    grad_norm: float
    tokens: int
    seconds: float
    lr: float
    skipped: bool
    stop: str | None


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        step: steps taken in all. loss: of the last step that this call took; NaN where it took none.
        stopped: the signal that ended it before its last step, ``"SIGTERM"`` or ``"SIGINT"``; ``None``.
        checkpoint: the last one in the folder of checkpoints, if there is one.
    """

    step: int
    loss: float
    stopped: str | None
    checkpoint: Path | None
