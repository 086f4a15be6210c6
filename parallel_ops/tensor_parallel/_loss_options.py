"""The options that both cross-entropies take, their checks, and the reduction of per-row losses."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")

# torch sums a longer CPU tensor in as many pieces as it has threads, which would set the bits of the result.
_ONE_PIECE = 32768


@dataclass(frozen=True)
class LossOptions:
    """How a row's loss is made of its logits. ``softcap`` 0 means none, as in the ops' schemas."""

    label_smoothing: float
    z_loss: float
    softcap: float
    ignore_index: int

    @classmethod
    def checked(
        cls, op: str, label_smoothing: float, z_loss: float, softcap: float | None, ignore_index: int
    ) -> "LossOptions":
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"{op}: label_smoothing must be between 0 and 1, got {label_smoothing}")
        if not 0.0 <= z_loss < math.inf:
            raise ValueError(f"{op}: z_loss must be a finite number of at least 0, got {z_loss}")
        if softcap is not None and not 0.0 < softcap < math.inf:
            raise ValueError(f"{op}: softcap must be None or a finite number above 0, got {softcap}")
        if not isinstance(ignore_index, int):
            raise TypeError(f"{op}: ignore_index must be an int, got {type(ignore_index).__name__}")
        return cls(float(label_smoothing), float(z_loss), float(softcap or 0.0), ignore_index)


def check_reduction(op: str, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction must be 'none', 'mean' or 'sum', got {reduction!r}")


def check_target(op: str, target: Tensor, shape: torch.Size, what: str) -> None:
    """``target`` holds integer class indices and has the given shape, that of ``what``."""
    if not isinstance(target, Tensor):
        raise TypeError(f"{op}: target must be a tensor, got {type(target).__name__}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: target must be int64 or int32 class indices, got {target.dtype}")
    if target.shape != shape:
        raise ValueError(f"{op}: target must have shape {list(shape)}, {what}, got {list(target.shape)}")


def reduce(loss: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Reduces per-row losses. The mean is over rows that count, and 0 where none does; nothing waits for a device."""
    if reduction == "none":
        return loss
    total = _sum(loss)
    return total / count_kept(target, ignore_index) if reduction == "mean" else total


def count_kept(target: Tensor, ignore_index: int) -> Tensor:
    """The number of rows that are not ignored, at least 1."""
    return (target != ignore_index).sum().clamp(min=1)


def _sum(loss: Tensor) -> Tensor:
    if loss.device.type != "cpu" or loss.numel() <= _ONE_PIECE:
        return loss.sum()
    pieces = torch.nn.functional.pad(loss.flatten(), (0, -loss.numel() % 1024)).view(-1, 1024)
    return pieces.sum(1).sum()
