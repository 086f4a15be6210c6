"""The results of a step and of a run."""

from dataclasses import dataclass
from pathlib import Path


class NotFinite(FloatingPointError):
    """A loss or gradient norm is not finite; the message has the step and its samples."""


@dataclass(frozen=True)
class Step:
    """The results of one step.

    Attributes:
        number: Number of the step, from 1.
        loss: Mean over all tokens of the step, before its update, in nats.
        grad_norm: Norm over all parameters, before clipping.
        tokens: Tokens of all ranks. seconds: From the wait for data to the end of the update. lr: Learning rate.
        skipped: No parameter was updated, since the norm is not finite.
        stop: The stop signal that any rank has received, or ``None``.
        redone: A step of a CUDA graph had more rows for an expert than its capacity, and was taken again without both.
        save_failed: The checkpoint that was written beside the step has failed.
        evaluation_loss: Loss of the evaluation after the step, if there was one.
        without_target: No target of the step counts in the loss, which is then 0.
        experts: How evenly experts were used, by the names of ``expert_use.METRICS``; ``None`` without experts.
    """

    number: int
    loss: float
    grad_norm: float
    tokens: int
    seconds: float
    lr: float
    skipped: bool
    stop: str | None
    evaluation_loss: float | None = None
    experts: dict[str, float] | None = None
    without_target: bool = False
    save_failed: bool = False
    redone: bool = False


@dataclass(frozen=True)
class Result:
    """The end of a run.

    Attributes:
        step: Optimizer steps taken in total. loss: Loss of the last step of this call; NaN if it took none.
        stopped: The signal that stopped the run before its last step, ``"SIGTERM"``, ``"SIGINT"`` or ``"SIGHUP"``; else
            ``None``.
        checkpoint: The newest checkpoint in ``checkpoint.dir``, or ``None``.
        evaluation_loss: Loss of the last evaluation of this call; ``None`` without one.
        best: The lowest evaluation loss of the checkpoints in ``checkpoint.dir``, and its checkpoint, or ``None``.
    """

    step: int
    loss: float
    stopped: str | None
    checkpoint: Path | None
    evaluation_loss: float | None = None
    best: tuple[float, Path] | None = None
