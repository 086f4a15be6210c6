"""Scale, mask and softmax in one pass.

    z  = scale x + m                   m additive; or z = -inf where a boolean mask is True
    y  = exp(z - max z) / sum exp(z - max z)
    dx = scale y (dy - sum(dy y))      (fp32 sum in an order set by the row length)

Saved for backward: y, nothing else; a masked key has y = 0 and so no gradient. The unfused composite writes
scale x and the masked logits to memory and keeps the mask for backward.

Minus infinity is the real one, not a large negative number: a masked key gets exactly zero however low the other
scores are, whatever its own score is (NaN included), and a row that sees no key at all is zeros with zero gradients
instead of NaN. A row counts as seeing none when every logit is -inf, by the mask or by the scores themselves.

Source: Megatron-LM's fused softmax (arXiv:1909.08053, arXiv:2104.04473), here for any row length, mask shape and
dtype.
"""

from typing import Any

import torch
from torch import Tensor

from parallel_ops.ops._check import FLOATING_DTYPES, check_floating, check_same_device
from parallel_ops.ops._registration import register
from parallel_ops.ops._softmax import check_scale, visible_softmax


def scaled_masked_softmax(scores: Tensor, mask: Tensor | None, scale: float = 1.0) -> Tensor:
    """``softmax(scale * scores)`` over the last dimension under a mask, forward and backward fused.

    Args:
        scores: ``[b, np, sq, sk]``, or any shape ``[..., sk]``; float32, float16, bfloat16 or float64, any strides.
        mask: broadcastable to ``scores`` in every dimension, any strides, never expanded in memory. bool: ``True``
            masks the key out. Floating point (any of the four dtypes): added to ``scale * scores`` in fp32 (fp64 for
            fp64 scores), where -inf masks the key out. ``None``: no mask. The mask gets no gradient.
        scale: finite.

    Returns:
        Shape and dtype of ``scores``, contiguous; arithmetic in fp32 (fp64 for fp64), also under autocast. Masked
        keys are exactly zero and their scores are not looked at; a row without a single key is zeros. NaN or +inf in
        a score that is not masked makes the rest of its row NaN.

    Raises:
        TypeError: unsupported dtype of ``scores`` or ``mask``, ``scale`` not a number.
        ValueError: ``mask`` not broadcastable, on another device, or requiring a gradient; ``scale`` not finite.

    Sharding: rows are independent, so any shard of the leading dimensions (batch, heads, queries) gives that shard of
    y, with the matching shard of mask; the last dimension must be whole.
    """
    _check(scores, mask, scale)
    return _forward(scores, mask, scale)


def scaled_masked_softmax_reference(scores: Tensor, mask: Tensor | None, scale: float = 1.0) -> Tensor:
    """The same in plain PyTorch."""
    logits = scores * scale
    if mask is None:
        return visible_softmax(logits, None)
    if mask.dtype is torch.bool:
        return visible_softmax(logits, mask)
    return visible_softmax(logits + mask.to(scores.dtype), mask == -torch.inf)


def _check(scores: Tensor, mask: Tensor | None, scale: float) -> None:
    op = "scaled_masked_softmax"
    check_floating(op, "scores", scores)
    if scores.dim() == 0:
        raise ValueError(f"{op}: scores must have at least one dimension, got a scalar")
    check_scale(op, scale)
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"{op}: mask must be a tensor or None, got {type(mask).__name__}")
    if mask.dtype is not torch.bool and mask.dtype not in FLOATING_DTYPES:
        raise TypeError(
            f"{op}: mask must be bool (True = masked out) or floating point (added), got {mask.dtype}; "
            "for a mask of zeros and ones pass mask.bool()"
        )
    if mask.layout is not torch.strided:
        raise TypeError(f"{op}: mask must be a dense (strided) tensor, got layout {mask.layout}")
    check_same_device(op, "mask", mask, "scores", scores)
    if mask.requires_grad:
        raise ValueError(f"{op}: mask requires a gradient, but gets none here; pass mask.detach()")
    if mask.dim() > scores.dim() or any(
        m not in (1, s) for m, s in zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    ):
        raise ValueError(f"{op}: mask {list(mask.shape)} is not broadcastable to scores {list(scores.shape)}")


def _fake(scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return scores.new_empty(scores.shape)


def _fake_backward(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    return y.new_empty(y.shape)


def _cuda(scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    from parallel_ops.triton_kernels import scaled_masked_softmax as kernels

    y = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    kernels.forward(scores, mask, y, scale=scale)
    return y


def _cuda_backward(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    from parallel_ops.triton_kernels import scaled_masked_softmax as kernels

    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    kernels.backward(grad, y, dx, scale=scale)
    return dx


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: Tensor) -> None:
    ctx.scale = inputs[2]
    ctx.save_for_backward(output)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (y,) = ctx.saved_tensors
    return _backward(grad, y, ctx.scale), None, None


_backward = register("scaled_masked_softmax_backward", fake=_fake_backward, cuda=_cuda_backward)
_forward = register("scaled_masked_softmax", fake=_fake, cuda=_cuda, setup_context=_setup_context, backward=_autograd)
