"""Scale, causal mask and softmax in one pass that leaves the upper triangle alone.

    z[i, j]  = scale x[i, j]     for the keys that query i sees: j <= i + sk - sq, and j > i + sk - sq - window
    y[i, :]  = softmax of z[i, :] over those keys, zero elsewhere
    dx[i, :] = scale y (dy - sum(dy y)) over those keys, zero elsewhere      (fp32 sum in a fixed order)

The last query sees the last key (bottom-right alignment), as when the queries are the newest of a cached sequence.
Scores, y and dy outside what a query sees are not used, and not read save for what shares a vector with it: a square
costs half the reads, and NaN there is harmless. Saved for backward: y, nothing else; no mask exists.

Source: Megatron-LM's upper-triangular fused softmax (arXiv:2104.04473); the window is Longformer's (arXiv:2004.05150).
"""

from typing import Any

import torch
from torch import Tensor

from parallel_ops.ops._check import check_floating
from parallel_ops.ops._registration import register
from parallel_ops.ops._softmax import check_scale, visible_softmax


def scaled_causal_softmax(scores: Tensor, scale: float = 1.0, *, window: int | None = None) -> Tensor:
    """``softmax(scale * scores)`` over the keys up to each query's own, forward and backward fused.

    Args:
        scores: ``[b, np, sq, sk]``, or any shape ``[..., sq, sk]`` with ``sq <= sk``; float32, float16, bfloat16 or
            float64, any strides. Query i is aligned with key ``i + sk - sq``.
        scale: finite.
        window: how many keys a query sees at most, its own included; ``None`` for no limit.

    Returns:
        Shape and dtype of ``scores``, contiguous; arithmetic in fp32 (fp64 for fp64), also under autocast. Keys that a
        query does not see are exactly zero, and so is their gradient, whatever the incoming one holds there. A row
        whose visible scores are all -inf is zeros; NaN or +inf in a visible score makes the row's visible part NaN.

    Raises:
        TypeError: unsupported dtype of ``scores``, ``scale`` not a number, ``window`` not an int.
        ValueError: fewer than two dimensions, ``sq > sk``, ``window < 1``, ``scale`` not finite.

    Sharding: any shard of the dimensions before the last two (batch, heads) gives that shard of y; queries and keys
    must be whole.
    """
    _check(scores, scale, window)
    return _forward(scores, scale, window)


def scaled_causal_softmax_reference(scores: Tensor, scale: float = 1.0, *, window: int | None = None) -> Tensor:
    """The same in plain PyTorch."""
    sq, sk = scores.shape[-2:]
    visible = torch.ones(sq, sk, dtype=torch.bool, device=scores.device).tril(sk - sq)
    if window is not None:
        visible = visible.triu(sk - sq - window + 1)
    return visible_softmax(scores * scale, ~visible)


def _check(scores: Tensor, scale: float, window: int | None) -> None:
    op = "scaled_causal_softmax"
    check_floating(op, "scores", scores)
    if scores.dim() < 2:
        raise ValueError(f"{op}: scores must have at least two dimensions, queries and keys, got {list(scores.shape)}")
    if scores.shape[-2] > scores.shape[-1]:
        raise ValueError(
            f"{op}: scores has {scores.shape[-2]} queries for {scores.shape[-1]} keys, so the first queries would see "
            "no key; there must be at least as many keys as queries"
        )
    check_scale(op, scale)
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int):
            raise TypeError(f"{op}: window must be an int or None, got {type(window).__name__}")
        if window < 1:
            raise ValueError(f"{op}: window must be at least 1 (the query's own key), got {window}")


def _fake(scores: Tensor, scale: float, window: int | None) -> Tensor:
    return scores.new_empty(scores.shape)


def _fake_backward(grad: Tensor, y: Tensor, scale: float, window: int | None) -> Tensor:
    return y.new_empty(y.shape)


def _cuda(scores: Tensor, scale: float, window: int | None) -> Tensor:
    from parallel_ops.triton_kernels import scaled_causal_softmax as kernels

    y = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    kernels.forward(scores, y, scale=scale, window=window)
    return y


def _cuda_backward(grad: Tensor, y: Tensor, scale: float, window: int | None) -> Tensor:
    from parallel_ops.triton_kernels import scaled_causal_softmax as kernels

    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    kernels.backward(grad, y, dx, scale=scale, window=window)
    return dx


def _setup_context(ctx: Any, inputs: tuple[Tensor, float, int | None], output: Tensor) -> None:
    _, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(output)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (y,) = ctx.saved_tensors
    return _backward(grad, y, ctx.scale, ctx.window), None, None


_backward = register("scaled_causal_softmax_backward", fake=_fake_backward, cuda=_cuda_backward)
_forward = register("scaled_causal_softmax", fake=_fake, cuda=_cuda, setup_context=_setup_context, backward=_autograd)
