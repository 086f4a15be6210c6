"""Shared by the softmaxes: checks, the sink and its gradient, and the reference of a softmax with true infinities."""

import math

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_floating, check_same_device


def check_scale(op: str, scale: float, name: str = "scale") -> None:
    """``scale`` is a finite Python number."""
    if isinstance(scale, bool) or not isinstance(scale, (float, int)):
        raise TypeError(f"{op}: {name} must be a Python float, got {type(scale).__name__}")
    if not -math.inf < scale < math.inf:  # isfinite() would break a torch.compile graph
        raise ValueError(f"{op}: {name} must be finite, got {scale}")


def sink_vector(op: str, sink: Tensor | float | None, scores: Tensor) -> Tensor | None:
    """The sink in the form that the kernels take: one value, or one for each head, in the dtype of the arithmetic."""
    if sink is None:
        return None
    acc = torch.promote_types(scores.dtype, torch.float32)
    if isinstance(sink, (float, int)) and not isinstance(sink, bool):
        return scores.new_full((1,), sink, dtype=acc)
    if not isinstance(sink, Tensor):
        raise TypeError(f"{op}: sink must be a tensor, a number or None, got {type(sink).__name__}")
    check_floating(op, "sink", sink)
    check_same_device(op, "sink", sink, "scores", scores)
    heads = scores.shape[-3] if scores.dim() >= 3 else 1
    if sink.dim() != 1 or sink.shape[0] not in (1, heads):
        raise ValueError(
            f"{op}: sink must have shape [1] or [{heads}], one for each head (the last dimension of scores but two), "
            f"got {list(sink.shape)}"
        )
    return sink.to(acc).contiguous()


def empty_row_values(t: Tensor, wanted: bool) -> Tensor:
    """One value for each row of ``t`` in the dtype of the arithmetic, if wanted; else empty."""
    rows = 1 if wanted else 0
    for size in t.shape[:-1]:
        rows *= size
    return t.new_empty(rows if t.shape[-1] else 0, dtype=torch.promote_types(t.dtype, torch.float32))


def sink_gradient(by_row: Tensor, y: Tensor, heads: int) -> Tensor:
    """The gradient of each head's sink from that of each row's."""
    if by_row.numel() == 0:
        return by_row.new_zeros(heads)
    queries = y.shape[-2] if y.dim() >= 2 else 1
    return by_row.view(-1, heads, queries).sum(2).sum(0)


def visible_softmax(logits: Tensor, hidden: Tensor | None, sink: Tensor | float | None = None) -> Tensor:
    """Softmax over the last dimension where ``hidden`` is False, zero elsewhere and in rows that see nothing."""
    if hidden is not None:
        logits = logits.masked_fill(hidden, -torch.inf)
    empty = (logits == -torch.inf).all(dim=-1, keepdim=True)
    logits = logits.masked_fill(empty, 0.0)
    if sink is None:
        y = logits.softmax(dim=-1)
    else:
        column = torch.as_tensor(sink, device=logits.device).to(logits.dtype)
        column = column.view(-1, 1, 1) if column.numel() > 1 else column
        y = torch.cat([logits, column.expand(*logits.shape[:-1], 1)], dim=-1).softmax(dim=-1)[..., :-1]
    return y.masked_fill(empty if hidden is None else empty | hidden, 0.0)
