"""Scale, mask and softmax in one pass.

    z  = scale x + m                   m additive; or z = -inf where a boolean mask is True
    y  = exp(z - max z) / sum exp(z - max z)
    dx = scale y (dy - sum(dy y) / sum(y))      (fp32 sums in an order set by the row length)
    dm = dx / scale, summed over what m was broadcast over

The division by sum(y), which is one up to rounding, keeps the mean of dy from multiplying the rounding error. With a
sink the sum is less than one, and 4 bytes per row are saved. Otherwise only y is saved for backward; a masked key has
y = 0 and so no gradient. The unfused composite writes scale x and the masked logits to memory and keeps the mask.

Masking uses -inf, not a large negative number: a masked key gets exactly zero for any scores (NaN included), and a row
that sees no key is zeros with zero gradients instead of NaN. A row sees no key if every logit is -inf, by the mask or
by the scores themselves.

Source: Megatron-LM's fused softmax (arXiv:1909.08053, arXiv:2104.04473), here for any row length, mask shape and
dtype.
"""

from typing import Any

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.checks import FLOATING_DTYPES, check_floating, check_same_device
from parallel_ops._internal.dispatch.registration import register
from parallel_ops.ops.softmaxes.shared import check_scale, empty_row_values, sink_gradient, sink_vector, visible_softmax


def scaled_masked_softmax(
    scores: Tensor,
    mask: Tensor | None,
    scale: float = 1.0,
    *,
    window: tuple[int, int] | None = None,
    sink: Tensor | float | None = None,
) -> Tensor:
    """``softmax(scale * scores)`` over the last dimension under a mask, forward and backward fused.

    Args:
        scores: ``[b, np, sq, sk]``, or any shape ``[..., sk]``; float32, float16, bfloat16 or float64, any strides.
        mask: broadcastable to ``scores`` in every dimension, any strides, never expanded in memory. bool, or uint8 as
            Megatron-LM has it: ``True`` (not zero) masks the key out. Floating point (any of the four dtypes): added
            to ``scale * scores`` in fp32 (fp64 for fp64 scores), where -inf masks the key out; it gets a gradient if
            it requires one (T5's relative positions, learned ALiBi slopes). ``None``: no mask.
        scale: finite.
        window: ``(left, right)``: query i sees the keys ``i + sk - sq - left`` to ``i + sk - sq + right``, unless
            ``mask`` masks them. It is joined with the mask, which then has at least ``[sq, sk]`` elements in memory;
            for windows that do not reach forward ``scaled_causal_softmax`` needs no mask.
        sink: one more logit of every row, not scaled, whose probability is in no output: a number, or a tensor ``[np]``
            (``[1]``) with a value for each head, which gets a gradient; ``None`` for none. Rows then sum to less
            than one. (StreamingLLM, arXiv:2309.17453; 0 is the "off by one" softmax.)

    Returns:
        Shape and dtype of ``scores``, contiguous; arithmetic in fp32 (fp64 for fp64), also under autocast. Masked
        keys are exactly zero and their scores are not used; a row without a single key is zeros. NaN or +inf in
        a score that is not masked makes the rest of its row NaN.

    Raises:
        TypeError: unsupported dtype of ``scores``, ``mask`` or ``sink``, ``scale`` not a number.
        ValueError: ``mask`` not broadcastable or on another device; ``scale`` not finite; ``window`` negative, or of
            scores without queries; ``sink`` of a wrong shape or device.

    Sharding: rows are independent, so any shard of the leading dimensions (batch, heads, queries) gives that shard of
    y, with the matching shard of mask and sink; the last dimension must be whole.

    Examples:
        >>> import torch
        >>> from parallel_ops import scaled_masked_softmax
        >>> scaled_masked_softmax(torch.zeros(1, 3), torch.tensor([[False, False, True]]))  # True: not seen
        tensor([[0.5000, 0.5000, 0.0000]])
    """
    _check(scores, mask, scale, window)
    mask = mask if window is None else _windowed(scores, mask, window)
    y, _ = _forward(scores, mask, sink_vector("scaled_masked_softmax", sink, scores), scale)
    return y


def scaled_masked_softmax_reference(
    scores: Tensor,
    mask: Tensor | None,
    scale: float = 1.0,
    *,
    window: tuple[int, int] | None = None,
    sink: Tensor | float | None = None,
) -> Tensor:
    """The same in plain PyTorch."""
    logits = scores * scale
    if window is not None:
        mask = _windowed(scores, mask, window)
    if mask is None:
        return visible_softmax(logits, None, sink)
    if not mask.is_floating_point():
        return visible_softmax(logits, mask != 0, sink)
    return visible_softmax(logits + mask.to(scores.dtype), mask == -torch.inf, sink)


def _windowed(scores: Tensor, mask: Tensor | None, window: tuple[int, int]) -> Tensor:
    """``mask`` with the keys outside the window masked out too."""
    (sq, sk), (left, right) = scores.shape[-2:], window
    ahead = torch.arange(sk, device=scores.device) - torch.arange(sk - sq, sk, device=scores.device)[:, None]
    hidden = (ahead < -left) | (ahead > right)
    if mask is None:
        return hidden
    return mask.masked_fill(hidden, -torch.inf) if mask.is_floating_point() else (mask != 0) | hidden


def _check(scores: Tensor, mask: Tensor | None, scale: float, window: tuple[int, int] | None) -> None:
    op = "scaled_masked_softmax"
    check_floating(op, "scores", scores)
    if scores.dim() == 0:
        raise ValueError(f"{op}: scores must have at least one dimension, got a scalar")
    check_scale(op, scale)
    if window is not None:
        if not isinstance(window, tuple) or len(window) != 2 or any(type(n) is not int for n in window):
            raise TypeError(f"{op}: window must be two ints, (left, right), or None, got {window!r}")
        if min(window) < 0 or scores.dim() < 2:
            raise ValueError(
                f"{op}: window must not be negative, for scores [..., sq, sk]; got {window} for {list(scores.shape)}"
            )
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"{op}: mask must be a tensor or None, got {type(mask).__name__}")
    if mask.dtype not in (torch.bool, torch.uint8) and mask.dtype not in FLOATING_DTYPES:
        raise TypeError(
            f"{op}: mask must be bool or uint8 (True = masked out) or floating point (added), got {mask.dtype}; "
            "for a mask of zeros and ones pass mask.bool()"
        )
    if mask.layout is not torch.strided:
        raise TypeError(f"{op}: mask must be a dense (strided) tensor, got layout {mask.layout}")
    check_same_device(op, "mask", mask, "scores", scores)
    if mask.dim() > scores.dim() or any(
        m not in (1, s) for m, s in zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    ):
        raise ValueError(f"{op}: mask {list(mask.shape)} is not broadcastable to scores {list(scores.shape)}")


def outputs(scores: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape), empty_row_values(scores, sink is not None)


def backward_outputs(grad: Tensor, y: Tensor, sink_share: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), empty_row_values(y, sink_share is not None)


def launch(out: tuple[Tensor, Tensor], scores: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float) -> None:
    from parallel_ops.triton_kernels.softmaxes import launchers as kernels

    kernels.forward(scores, mask, sink, *out, scale=scale)


def launch_backward(
    out: tuple[Tensor, Tensor], grad: Tensor, y: Tensor, sink_share: Tensor | None, scale: float
) -> None:
    from parallel_ops.triton_kernels.softmaxes import launchers as kernels

    kernels.backward(grad, y, sink_share, *out, scale=scale)


def setup_context(
    ctx: Any, inputs: tuple[Tensor, Tensor | None, Tensor | None, float], output: tuple[Tensor, Tensor]
) -> None:
    _, mask, sink, ctx.scale = inputs
    y, sink_share = output
    ctx.heads = None if sink is None else sink.shape[0]
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)
    ctx.mark_non_differentiable(sink_share)
    ctx.save_for_backward(y, None if sink is None else sink_share)


def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    y, sink_share = ctx.saved_tensors
    dx, by_row = _backward(grad, y, sink_share, ctx.scale)
    dmask = None
    if ctx.needs_input_grad[1]:
        shape, dtype = ctx.mask
        # The gradient of scale * scores + mask, which dx is but for the factor.
        scale = ctx.scale if ctx.scale != 0 else 1.0
        dlogits = dx if ctx.scale != 0 else _backward(grad, y, sink_share, 1.0)[0]
        summed = dlogits.to(torch.promote_types(dtype, dlogits.dtype)).sum_to_size(shape)
        dmask = (summed / scale).to(dtype)
    return dx, dmask, None if ctx.heads is None else sink_gradient(by_row, y, ctx.heads), None


_backward = register("scaled_masked_softmax_backward", outputs=backward_outputs, launch=launch_backward)
_forward = register(
    "scaled_masked_softmax",
    outputs=outputs,
    launch=launch,
    setup_context=setup_context,
    backward=backward,
    differentiable=1,
    reference=lambda scores, mask, sink, scale: scaled_masked_softmax_reference(scores, mask, scale, sink=sink),
)
