"""The options that all cross-entropies take, their checks, and the reduction of per-row losses."""

import math
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_floating, check_same_device

REDUCTIONS = ("none", "mean", "sum")
NONE = REDUCTIONS.index("none")

# Values of `column` for rows whose target is not a column of this shard.
ON_ANOTHER_SHARD, COLUMN_IGNORED, INVALID = -1, -2, -3

# torch sums a longer CPU tensor in as many pieces as it has threads, which would set the bits of the result.
_ONE_PIECE = 32768


class LossArguments(TypedDict, total=False):
    """Keyword arguments that all cross-entropies share; see ``cross_entropy``."""

    class_weight: Tensor | None
    label_smoothing: float
    z_loss: float
    softcap: float | None
    ignore_index: int
    ignore_out_of_range: bool
    reduction: str


class LossOptions(NamedTuple):
    """How a row's loss is computed from its logits, in the order of the ops' schemas. ``softcap`` 0 means none."""

    label_smoothing: float
    z_loss: float
    softcap: float
    ignore_index: int
    ignore_out_of_range: bool

    @classmethod
    def checked(
        cls, op: str, label_smoothing: float, z_loss: float, softcap: float | None, ignore_index: int,
        ignore_out_of_range: bool,
    ) -> "LossOptions":  # fmt: skip
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"{op}: label_smoothing must be between 0 and 1, got {label_smoothing}")
        if not 0.0 <= z_loss < math.inf:
            raise ValueError(f"{op}: z_loss must be a finite number of at least 0, got {z_loss}")
        if softcap is not None and not 0.0 < softcap < math.inf:
            raise ValueError(f"{op}: softcap must be None or a finite number above 0, got {softcap}")
        if not isinstance(ignore_index, int):
            raise TypeError(f"{op}: ignore_index must be an int, got {type(ignore_index).__name__}")
        return cls(float(label_smoothing), float(z_loss), float(softcap or 0.0), ignore_index, ignore_out_of_range)


def check_reduction(op: str, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction must be 'none', 'mean' or 'sum', got {reduction!r}")


def check_logits(op: str, logits: Tensor, target: Tensor, class_weight: Tensor | None) -> None:
    """``logits`` ``[..., V]``, ``target`` ``[...]`` and ``class_weight`` ``[V]`` on one device."""
    check_floating(op, "logits", logits)
    if logits.dim() == 0:
        raise ValueError(f"{op}: logits must have at least one dimension, got a scalar")
    check_target(op, target, logits.shape[:-1], "that of logits without its last dimension")
    check_same_device(op, "target", target, "logits", logits)
    check_class_weight(op, class_weight, logits.shape[-1:], "the last dimension of logits", "logits", logits)


def check_class_weight(
    op: str, class_weight: Tensor | None, shape: torch.Size, what: str, x_name: str, x: Tensor
) -> None:
    """``class_weight`` has the given shape, which is ``what``, is on the device of ``x``, and takes no gradient."""
    if class_weight is None:
        return
    check_floating(op, "class_weight", class_weight)
    check_same_device(op, "class_weight", class_weight, x_name, x)
    if class_weight.shape != shape:
        raise ValueError(f"{op}: class_weight must have shape {list(shape)}, {what}, got {list(class_weight.shape)}")
    if class_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: class_weight requires a gradient, which is not implemented; detach it")


def check_target(op: str, target: Tensor, shape: torch.Size, what: str) -> None:
    """``target`` holds integer class indices and has the given shape, that of ``what``."""
    if not isinstance(target, Tensor):
        raise TypeError(f"{op}: target must be a tensor, got {type(target).__name__}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: target must be int64 or int32 class indices, got {target.dtype}")
    if target.shape != shape:
        raise ValueError(f"{op}: target must have shape {list(shape)}, {what}, got {list(target.shape)}")


def divisor_of(reduction: str, column: Tensor, target_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The divisor of the sum, a scalar: the rows that count, or the sum of their weights, for a mean; not 0."""
    if reduction != "mean":
        return torch.ones((), dtype=dtype, device=column.device)
    if target_weight is None:
        return (column != COLUMN_IGNORED).sum().clamp(min=1).to(dtype)
    weights = _sum(target_weight)
    return torch.where(weights == 0, 1.0, weights)


def reduced(loss: Tensor, reduction: str, column: Tensor, target_weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Per-row losses reduced, and what their sum was divided by.

    The mean is over rows that count, and 0 where none does; nothing waits for a device.

    Args:
        column: where each row's target is, or a constant.
        target_weight: the class weight of each row's target.
    """
    divisor = divisor_of(reduction, column, target_weight, loss.dtype)
    if reduction == "none":
        return loss, divisor
    total = _sum(loss)
    return total / divisor if reduction == "mean" else total, divisor


def _sum(loss: Tensor) -> Tensor:
    if loss.device.type != "cpu" or loss.numel() <= _ONE_PIECE:
        return loss.sum()
    pieces = torch.nn.functional.pad(loss.flatten(), (0, -loss.numel() % 1024)).view(-1, 1024)
    return pieces.sum(1).sum()
