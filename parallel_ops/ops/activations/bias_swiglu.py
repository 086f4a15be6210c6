"""Bias and SwiGLU in one pass.

    g, u   = x[..., :F] + b[:F], x[..., F:] + b[F:]        (gate half first; interleaved: x[..., ::2], x[..., 1::2])
    y      = w * silu(g) * u                                silu(z) = z sigmoid(z)
    dg     = dy * w * u * silu'(g)                          silu'(z) = sigmoid(z) + z sigmoid(z) sigmoid(-z)
    du     = dy * w * silu(g)
    db     = sum over rows of [dg, du]                      (fp32 partial sums in an order set by the shape)
    dw     = sum over columns of dy * silu(g) * u

w is one weight a row, 1 where there are none: the router's probability of the expert that the token went to. With the
options of ``gated.py`` silu has a factor in its sigmoid, g and u are clamped, and u has an offset.
Saved for backward: x, b and w, nothing else; the input half of a split backward copies b, which db needs too. Both
halves of x are read in place and both halves of dx are written in place: no chunk, no cat. The unfused composite saves
x + b and silu(g), and joins dg and du by a copy.
Source: Shazeer, arXiv:2002.05202.
"""

from typing import Any

from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_bias, check_row_weights, check_rows, empty_like_or_none
from parallel_ops._internal.dispatch.registration import cast_first, register
from parallel_ops._internal.gradients.split_backward import kept_parameter, requested
from parallel_ops.ops.activations.gated import silu_mul_reference, swiglu_options


def bias_swiglu(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """``silu(gate) * up``, where ``gate`` and ``up`` are the halves of ``x + bias``, forward and backward fused.

    Args:
        x: ``[..., 2F]``, gate half first; float32, float16, bfloat16 or float64, any strides.
        bias: ``[2F]``, of any of these dtypes, on the device of ``x``; ``None`` for plain SwiGLU.
        weights: ``[...]`` or ``[..., 1]``, of any of these dtypes: each row of the result is multiplied by its weight,
            as in a mixture of experts. ``None``: by nothing.
        alpha, limit, up_offset: as in ``silu_mul``, of the halves of ``x + bias``.
        interleaved: gate and up are ``x[..., ::2]`` and ``x[..., 1::2]``, as in gpt-oss; without a bias.

    Returns:
        ``[..., F]``, contiguous, dtype of ``x``. Under autocast x and bias are cast to the autocast dtype.

    Raises:
        TypeError: unsupported dtypes, an option that is no number or bool. ValueError: wrong shape (an odd last
            dimension too) or device, a ``limit`` that is not above 0, a bias with ``interleaved``.

    Sharding: elementwise over rows, so any shard of rows gives that shard of y. A shard of the last dimension must
    hold the gate columns and the up columns of the same features, as ``[gate shard, up shard]``; bias likewise, and
    its gradient is then that shard's (partial over ranks that hold different rows). The gradient of weights is partial
    over ranks that hold different columns.

    Examples:
        >>> import torch
        >>> from parallel_ops import bias_swiglu
        >>> x, bias = torch.randn(16, 2, 128), torch.randn(128)
        >>> gate, up = (x + bias).chunk(2, dim=-1)
        >>> torch.allclose(bias_swiglu(x, bias), torch.nn.functional.silu(gate) * up, atol=1e-5)
        True
    """
    check_rows("bias_swiglu", x)
    if x.shape[-1] % 2:
        raise ValueError(
            f"bias_swiglu: the last dimension of x must be even (gate half, up half), got shape {list(x.shape)}"
        )
    check_bias("bias_swiglu", bias, x)
    check_row_weights("bias_swiglu", weights, "x", x)
    if not isinstance(interleaved, bool):
        raise TypeError(f"bias_swiglu: interleaved must be a bool, got {type(interleaved).__name__}")
    if interleaved and bias is not None:
        raise ValueError("bias_swiglu: interleaved takes no bias; add it before, as grouped_linear does")
    return _forward(x, bias, weights, *swiglu_options("bias_swiglu", alpha, limit, up_offset), interleaved)


def bias_swiglu_reference(
    x: Tensor, bias: Tensor | None = None, *, weights: Tensor | None = None, interleaved: bool = False, **options: Any
) -> Tensor:
    """The same in plain PyTorch."""
    z = x if bias is None else x + bias
    gate, up = (z[..., ::2], z[..., 1::2]) if interleaved else z.chunk(2, dim=-1)
    return silu_mul_reference(gate, up, weights=weights, **options).to(x.dtype)


def outputs(x: Tensor, bias: Tensor | None, weights: Tensor | None, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def backward_outputs(
    grad: Tensor, x: Tensor, bias: Tensor | None, weights: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), empty_like_or_none(bias, x), empty_like_or_none(weights, x)


def launch(
    y: Tensor, x: Tensor, bias: Tensor | None, weights: Tensor | None, alpha: float, limit: float | None,
    up_offset: float, interleaved: bool = False,
) -> None:  # fmt: skip
    from parallel_ops.triton_kernels.activations import activations as kernels

    options: dict[str, Any] = {"alpha": alpha, "limit": limit, "up_offset": up_offset, "interleaved": interleaved}
    kernels.forward(*_gate_and_up(x, interleaved), bias, weights, y, activation="silu", **options)


def launch_backward(
    gradients: tuple[Tensor, Tensor, Tensor], grad: Tensor, x: Tensor, bias: Tensor | None, weights: Tensor | None,
    alpha: float, limit: float | None, up_offset: float, interleaved: bool = False,
) -> None:  # fmt: skip
    from parallel_ops.triton_kernels.activations import activations as kernels

    dx, dbias, dweights = gradients
    options: dict[str, Any] = {"alpha": alpha, "limit": limit, "up_offset": up_offset, "interleaved": interleaved}
    both, dboth = _gate_and_up(x, interleaved), _gate_and_up(dx, interleaved)
    kernels.backward(grad, *both, bias, weights, *dboth, dbias, dweights, activation="silu", **options)


def _gate_and_up(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The halves of x; twice x itself where its elements are gate and up in turn."""
    half = x.shape[-1] // 2
    return (x, x) if interleaved else (x[..., :half], x[..., half:])


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, weights, *ctx.options = inputs
    ctx.save_for_backward(x, bias, weights)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, bias, weights = ctx.saved_tensors
    for_x, for_bias, for_weights = now = requested(ctx)[:3]
    bias = kept_parameter(ctx, "bias_swiglu", "bias", bias, 1, now)
    dx, dbias, dweights = _backward(grad, x, bias, weights, *ctx.options)
    of_parameters = dbias if for_bias else None, dweights if for_weights else None
    return dx if for_x else None, *of_parameters, *(None,) * len(ctx.options)


_backward = register("bias_swiglu_backward", outputs=backward_outputs, launch=launch_backward)
_forward = register(
    "bias_swiglu",
    outputs=outputs,
    launch=launch,
    setup_context=setup_context,
    backward=backward,
    autocast=cast_first(2),
    reference=lambda x, bias, weights, alpha, limit, up_offset, interleaved: bias_swiglu_reference(
        x, bias, weights=weights, interleaved=interleaved, alpha=alpha, limit=limit, up_offset=up_offset
    ),
)
