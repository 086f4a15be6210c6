"""Root-mean-square normalisation, with an optional residual added in the same pass.

    s      = x + r                           (r optional; rounded to the wider dtype of both, then normalised)
    xhat   = s rstd,  rstd = 1 / sqrt(mean(s^2) + eps)
    y      = xhat w                                         (w + 1 in place of w where it is zero-centred)

    g      = dy w
    ds     = rstd (g - xhat mean(g xhat)) + the incoming gradient of s       (of x and of r alike)
    dw[j]  = sum over rows i of dy[i, j] xhat[i, j]                           (fp32, in an order set by the shape)

Saved for backward: s (x itself without a residual), w, and rstd, 4 bytes per row. The composite that models write keeps
an fp32 copy of the row besides. Source: Zhang and Sennrich, arXiv:1910.07467.
"""

from typing import Any, overload

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.registration import register
from parallel_ops.ops.norms import shared
from parallel_ops.ops.norms.shared import (
    check_eps,
    check_norm,
    empty_gradients,
    empty_like_parameter,
    empty_statistic,
    empty_sum,
    gradients,
    in_dtype_of_stream,
    setup_context,
)


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = ..., *, residual: None = None, zero_centered: bool = ...
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = ..., *, residual: Tensor, zero_centered: bool = ...
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Root-mean-square normalisation over the last dimension, of ``x`` or of ``x + residual``.

    Args:
        x: ``[..., H]``, float32, float16, bfloat16 or float64, any strides; any H.
        weight: ``[H]`` on the device of ``x``, of any of these dtypes (float64 with float64 alone), so that 16-bit
            activations can have float32 parameters; ``None`` for ones.
        eps: added to the mean square.
        residual: shape and device of ``x``; its dtype, or float32 beside 16-bit ``x``; added to it first.
        zero_centered: multiply by ``1 + weight``, so that weight decay pulls towards the identity (as Gemma does).

    Returns:
        ``y``, ``[..., H]``, contiguous, dtype of ``x``; with a residual ``(y, x + residual)``, the sum in the dtype of
        the residual. Under autocast dtypes stay as they are, save combinations other than these, which are widened.

    Raises:
        TypeError: unsupported or ill-matched dtypes. ValueError: wrong shape or device, negative ``eps``.

    Sharding: rows are independent, so x, residual and y may be sharded alike on any dimension but the last; weight is
    replicated, and its gradient is then partial over the ranks (sum it).

    Examples:
        >>> import torch
        >>> from parallel_ops import rms_norm
        >>> x, weight = torch.randn(16, 2, 64), torch.ones(64)
        >>> torch.allclose(rms_norm(x, weight), torch.nn.functional.rms_norm(x, (64,), weight, eps=1e-6), atol=1e-6)
        True
    """
    check_eps("rms_norm", eps)
    check = lambda: check_norm("rms_norm", x, weight, None, residual)  # noqa: E731
    y, total, _ = _forward.checked(check, x, weight, residual, eps, zero_centered)
    return y if residual is None else (y, total)


def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same in plain PyTorch, as Llama has it: fp32 inside, cast back before the weight."""
    s = x if residual is None else x + residual
    wide = s.to(torch.promote_types(s.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = wide.to(s.dtype)
    if weight is not None:
        y = (1 + weight if zero_centered else weight) * y
    y = y.to(x.dtype)
    return y if residual is None else (y, s)


_Three = tuple[Tensor, Tensor, Tensor]


def outputs(x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, zero_centered: bool) -> _Three:
    return torch.empty_like(x, memory_format=torch.contiguous_format), empty_sum(x, residual), empty_statistic(x)


def backward_outputs(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, zero_centered: bool,
    needs_x: bool = True, needs_weight: bool = True,
) -> _Three:  # fmt: skip
    return *empty_gradients(grad, x, needs_x), empty_like_parameter(weight, x, needs_weight)


def launch(
    out: _Three, x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, zero_centered: bool
) -> None:
    from parallel_ops.triton_kernels.norms import forward as kernels

    y, total, rstd = out
    kernels.forward(x, weight, None, residual, y, total, None, rstd, eps=eps, zero_centered=zero_centered)


def launch_backward(
    out: _Three, grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, *flags: bool
) -> None:
    shared.launch_backward(out, grad, grad_sum, x, weight, None, None, rstd, *flags)


def backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    return gradients(_backward, ctx, grad, grad_sum)


_backward = register("rms_norm_backward", outputs=backward_outputs, launch=launch_backward)
_forward = register(
    "rms_norm",
    outputs=outputs,
    launch=launch,
    setup_context=setup_context,
    backward=backward,
    differentiable=2,
    autocast=in_dtype_of_stream(residual=2, parameters=(1,)),
    reference=lambda x, weight, residual, eps, zero_centered: rms_norm_reference(
        x, weight, eps, residual=residual, zero_centered=zero_centered
    ),
)
