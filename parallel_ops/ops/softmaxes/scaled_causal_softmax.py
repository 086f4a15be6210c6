"""Scale, causal mask and softmax in one pass that leaves the upper triangle alone.

    z[i, j]  = scale x[i, j]     for the keys that query i sees: j <= i + sk - sq, and j > i + sk - sq - window
    y[i, :]  = softmax of z[i, :] over those keys, zero elsewhere
    dx[i, :] = scale y (dy - sum(dy y) / sum(y)) over those keys, zero elsewhere      (fp32 sums in a fixed order)

The division by sum(y), which is one up to rounding, keeps the mean of dy from multiplying the rounding error. With a
sink the sum is less than one, and 4 bytes per row are saved.

The last query sees the last key (bottom-right alignment), as when the queries are the newest of a cached sequence.
Masked elements of scores, y and dy are not used, and not read unless they share a vector with a visible one: a square
costs half the reads, and NaN there is harmless. Saved for backward: y; there is no mask.

Source: Megatron-LM's upper-triangular fused softmax (arXiv:2104.04473); the window is Longformer's (arXiv:2004.05150).
"""

from typing import Any

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_floating
from parallel_ops._internal.dispatch.registration import register
from parallel_ops.ops.softmaxes.shared import check_scale, empty_row_values, sink_gradient, sink_vector, visible_softmax


def scaled_causal_softmax(
    scores: Tensor, scale: float = 1.0, *, window: int | None = None, sink: Tensor | float | None = None
) -> Tensor:
    """``softmax(scale * scores)`` over the keys up to each query's own, forward and backward fused.

    Args:
        scores: ``[b, np, sq, sk]``, or any shape ``[..., sq, sk]`` with ``sq <= sk``; float32, float16, bfloat16 or
            float64, any strides. Query i is aligned with key ``i + sk - sq``.
        scale: finite.
        window: the number of keys that a query sees at most, its own included; ``None`` for no limit.
        sink: one more logit of every row, not scaled, whose probability is in no output: a number, or a tensor ``[np]``
            (``[1]``) with a value for each head, which gets a gradient; ``None`` for none. Rows then sum to less
            than one. (StreamingLLM, arXiv:2309.17453; 0 is the "off by one" softmax.)

    Returns:
        Shape and dtype of ``scores``, contiguous; arithmetic in fp32 (fp64 for fp64), also under autocast. Keys that a
        query does not see are exactly zero, and so is their gradient, for any incoming gradient. A row
        whose visible scores are all -inf is zeros; NaN or +inf in a visible score makes the row's visible part NaN.

    Raises:
        TypeError: unsupported dtype of ``scores`` or ``sink``, ``scale`` not a number, ``window`` not an int.
        ValueError: fewer than two dimensions, ``sq > sk``, ``window < 1``, ``scale`` not finite, ``sink`` of a wrong
            shape or device.

    Sharding: any shard of the dimensions before the last two (batch, heads) gives that shard of y, with the matching
    shard of sink; queries and keys must be whole.

    Examples:
        >>> import torch
        >>> from parallel_ops import scaled_causal_softmax
        >>> scaled_causal_softmax(torch.zeros(2, 2))  # the first query sees one key, the second both
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    _check(scores, scale, window)
    y, _ = _forward(scores, sink_vector("scaled_causal_softmax", sink, scores), scale, window)
    return y


def scaled_causal_softmax_reference(
    scores: Tensor, scale: float = 1.0, *, window: int | None = None, sink: Tensor | float | None = None
) -> Tensor:
    """The same in plain PyTorch."""
    sq, sk = scores.shape[-2:]
    visible = torch.ones(sq, sk, dtype=torch.bool, device=scores.device).tril(sk - sq)
    if window is not None:
        visible = visible.triu(sk - sq - window + 1)
    return visible_softmax(scores * scale, ~visible, sink)


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


def outputs(scores: Tensor, sink: Tensor | None, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape), empty_row_values(scores, sink is not None)


def backward_outputs(
    grad: Tensor, y: Tensor, sink_share: Tensor | None, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), empty_row_values(y, sink_share is not None)


def launch(out: tuple[Tensor, Tensor], scores: Tensor, sink: Tensor | None, scale: float, window: int | None) -> None:
    from parallel_ops.triton_kernels.softmaxes import launchers as kernels

    kernels.forward(scores, None, sink, *out, scale=scale, causal=True, window=window)


def launch_backward(
    out: tuple[Tensor, Tensor], grad: Tensor, y: Tensor, sink_share: Tensor | None, scale: float, window: int | None
) -> None:
    from parallel_ops.triton_kernels.softmaxes import launchers as kernels

    kernels.backward(grad, y, sink_share, *out, scale=scale, causal=True, window=window)


def setup_context(
    ctx: Any, inputs: tuple[Tensor, Tensor | None, float, int | None], output: tuple[Tensor, Tensor]
) -> None:
    _, sink, ctx.scale, ctx.window = inputs
    y, sink_share = output
    ctx.heads = None if sink is None else sink.shape[0]
    ctx.mark_non_differentiable(sink_share)
    ctx.save_for_backward(y, None if sink is None else sink_share)


def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    y, sink_share = ctx.saved_tensors
    dx, by_row = _backward(grad, y, sink_share, ctx.scale, ctx.window)
    return dx, None if ctx.heads is None else sink_gradient(by_row, y, ctx.heads), None, None


_backward = register("scaled_causal_softmax_backward", outputs=backward_outputs, launch=launch_backward)
_forward = register(
    "scaled_causal_softmax",
    outputs=outputs,
    launch=launch,
    setup_context=setup_context,
    backward=backward,
    differentiable=1,
    reference=lambda scores, sink, scale, window: scaled_causal_softmax_reference(
        scores, scale, window=window, sink=sink
    ),
)
