"""What the softmaxes share: the check of ``scale`` and the reference of a softmax with true minus infinities."""

import math

import torch
from torch import Tensor


def check_scale(op: str, scale: float) -> None:
    """``scale`` is a finite Python number."""
    if isinstance(scale, bool) or not isinstance(scale, (float, int)):
        raise TypeError(f"{op}: scale must be a Python float, got {type(scale).__name__}")
    if not -math.inf < scale < math.inf:  # isfinite() would break a torch.compile graph
        raise ValueError(f"{op}: scale must be finite, got {scale}")


def visible_softmax(logits: Tensor, hidden: Tensor | None) -> Tensor:
    """Softmax over the last dimension where ``hidden`` is False, zero elsewhere and in rows that see nothing."""
    if hidden is not None:
        logits = logits.masked_fill(hidden, -torch.inf)
    empty = (logits == -torch.inf).all(dim=-1, keepdim=True)
    y = logits.masked_fill(empty, 0.0).softmax(dim=-1)
    return y.masked_fill(empty if hidden is None else empty | hidden, 0.0)
