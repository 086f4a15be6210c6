"""Layer normalisation, with an optional residual added in the same pass.

    s      = x + r                           (r optional; rounded to the wider dtype of both, then normalised)
    xhat   = (s - mean(s)) rstd,  rstd = 1 / sqrt(var(s) + eps)
    y      = xhat w + b                                     (w + 1 in place of w where it is zero-centred)

    g      = dy w
    ds     = rstd (g - mean(g) - xhat mean(g xhat)) + the incoming gradient of s      (of x and of r alike)
    dw[j]  = sum over rows i of dy[i, j] xhat[i, j],  db[j] = that of dy[i, j]      (fp32, in an order set by the shape)

Statistics are fp32, the variance in a second pass over the row on chip: E[s^2] - E[s]^2 cancels. Saved for backward: s
(x itself without a residual), w, and mean and rstd, 4 bytes each per row. Source: Ba, Kiros and Hinton,
arXiv:1607.06450.
"""

import functools
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_ops._internal.dispatch.registration import register
from parallel_ops.ops.norms.shared import (
    check_eps,
    check_norm,
    empty_gradients,
    empty_like_parameter,
    empty_statistic,
    empty_sum,
    gradients,
    in_dtype_of_stream,
    launch_backward,
    setup_context,
)


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = ...,
    *,
    residual: None = None,
    zero_centered: bool = ...,
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = ...,
    *,
    residual: Tensor,
    zero_centered: bool = ...,
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer normalisation over the last dimension, of ``x`` or of ``x + residual``.

    Args:
        x: ``[..., H]``, float32, float16, bfloat16 or float64, any strides; any H.
        weight: ``[H]`` on the device of ``x``, of any of these dtypes (float64 with float64 alone), so that 16-bit
            activations can have float32 parameters; ``None`` for ones.
        bias: ``[H]`` in the dtype of ``weight``, or ``None``.
        eps: added to the variance.
        residual: shape and device of ``x``; its dtype, or float32 beside 16-bit ``x``; added to it first.
        zero_centered: multiply by ``1 + weight``, so that weight decay pulls towards the identity.

    Returns:
        ``y``, ``[..., H]``, contiguous, dtype of ``x``; with a residual ``(y, x + residual)``, the sum in the dtype of
        the residual. Under autocast dtypes stay as they are, save combinations other than these, which are widened.

    Raises:
        TypeError: unsupported or ill-matched dtypes. ValueError: wrong shape or device, negative ``eps``.

    Sharding: rows are independent, so x, residual and y may be sharded alike on any dimension but the last; weight and
    bias are replicated, and their gradients are then partial over the ranks (sum them).

    Examples:
        >>> import torch
        >>> from parallel_ops import layer_norm
        >>> x, weight, bias = torch.randn(16, 2, 64), torch.ones(64), torch.zeros(64)
        >>> expected = torch.nn.functional.layer_norm(x, (64,), weight, bias)
        >>> torch.allclose(layer_norm(x, weight, bias), expected, atol=1e-6)
        True
    """
    check_eps("layer_norm", eps)
    check = lambda: check_norm("layer_norm", x, weight, bias, residual)  # noqa: E731
    y, total, *_ = _forward.checked(check, x, weight, bias, residual, eps, zero_centered)
    return y if residual is None else (y, total)


def layer_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same in plain PyTorch."""
    s = x if residual is None else x + residual
    if weight is not None and zero_centered:
        weight = 1 + weight
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in (s, weight, bias) if t is not None))
    weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
    y = F.layer_norm(s.to(dtype), s.shape[-1:], weight, bias, eps).to(x.dtype)
    return y if residual is None else (y, s)


_Four = tuple[Tensor, Tensor, Tensor, Tensor]


def outputs(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, zero_centered: bool
) -> _Four:
    return x.new_empty(x.shape), empty_sum(x, residual), empty_statistic(x), empty_statistic(x)


def backward_outputs(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, zero_centered: bool, needs_x: bool = True, needs_parameters: bool = True,
) -> _Four:  # fmt: skip
    dweight, dbias = (empty_like_parameter(p, x, needs_parameters) for p in (weight, bias))
    return *empty_gradients(grad, x, needs_x), dweight, dbias


def launch(
    out: _Four, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float,
    zero_centered: bool,
) -> None:  # fmt: skip
    from parallel_ops.triton_kernels.norms import forward as kernels

    kernels.forward(x, weight, bias, residual, *out, eps=eps, zero_centered=zero_centered)


def backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    return gradients(_backward, ctx, grad, grad_sum)


_backward = register("layer_norm_backward", outputs=backward_outputs, launch=launch_backward)
_forward = register(
    "layer_norm",
    outputs=outputs,
    launch=launch,
    setup_context=setup_context,
    backward=backward,
    differentiable=2,
    autocast=in_dtype_of_stream(residual=3, parameters=(1, 2)),
    reference=lambda x, weight, bias, residual, eps, zero_centered: layer_norm_reference(
        x, weight, bias, eps, residual=residual, zero_centered=zero_centered
    ),
)
