"""The options that all cross-entropies take, and checks of their arguments."""

import math
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_floating, check_same_device

REDUCTIONS = ("none", "mean", "sum")
NONE = REDUCTIONS.index("none")

# Values of `column` for rows whose target is not a column of this shard.
ON_ANOTHER_SHARD, COLUMN_IGNORED, INVALID = -1, -2, -3


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
    """The options of a loss, in the order of the ops' schemas, made once by the public functions.

    Attributes:
        softcap: 0 for none.
        reduction: index in ``REDUCTIONS``.
    """

    label_smoothing: float
    z_loss: float
    softcap: float
    ignore_index: int
    ignore_out_of_range: bool
    reduction: int

    @property
    def per_row(self) -> bool:
        """True for ``reduction="none"``."""
        return self.reduction == NONE

    @classmethod
    def checked(
        cls, op: str, label_smoothing: float, z_loss: float, softcap: float | None, ignore_index: int,
        ignore_out_of_range: bool, reduction: str,
    ) -> "LossOptions":  # fmt: skip
        """The options as a user gave them. Raises ValueError or TypeError, which name ``op`` and the option."""
        if reduction not in REDUCTIONS:
            raise ValueError(f"{op}: reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"{op}: label_smoothing must be between 0 and 1, got {label_smoothing}")
        if not 0.0 <= z_loss < math.inf:
            raise ValueError(f"{op}: z_loss must be a finite number of at least 0, got {z_loss}")
        if softcap is not None and not 0.0 < softcap < math.inf:
            raise ValueError(f"{op}: softcap must be None or a finite number above 0, got {softcap}")
        if not isinstance(ignore_index, int):
            raise TypeError(f"{op}: ignore_index must be an int, got {type(ignore_index).__name__}")
        return cls(
            float(label_smoothing), float(z_loss), float(softcap or 0.0), ignore_index, ignore_out_of_range,
            REDUCTIONS.index(reduction),
        )  # fmt: skip


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


def check_target(op: str, target: Tensor, shape: torch.Size, what: str, name: str = "target") -> None:
    """``target``, called ``name``, holds integer class indices and has the given shape, which is ``what``."""
    if not isinstance(target, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(target).__name__}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: {name} must be int64 or int32 class indices, got {target.dtype}")
    if target.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {list(shape)}, {what}, got {list(target.shape)}")


def check_target_values(op: str, target: Tensor, vocab: int, ignore_index: int, name: str = "target") -> None:
    """ValueError for a target outside the vocabulary on CPU; on CUDA the loss of such a row is NaN instead."""
    if target.device.type != "cpu":
        return
    flat = target.flatten()
    bad = ((flat < 0) | (flat >= vocab)) & (flat != ignore_index)
    if bool(bad.any()):
        row = int(bad.int().argmax())
        raise ValueError(
            f"{op}: {name} {int(flat[row])} in row {row} is outside the vocabulary [0, {vocab}) and is not ignore_index"
        )
