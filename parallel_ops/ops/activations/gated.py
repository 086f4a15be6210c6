"""Gated activations of two tensors, as Hugging Face's models and Liger have them: the gate and the up projection apart.

    y    = w * act(g) * u                                    act = silu or gelu; bias_swiglu.py has one tensor for both
    dg   = dy * w * u * act'(g)
    du   = dy * w * act(g)
    dw   = sum over columns of dy * act(g) * u

w is one weight a row, 1 where there are none. With the options of ``silu_mul``, as gpt-oss has them (OpenAI,
arXiv:2508.10925), silu(g) is g sigmoid(alpha g) of g clamped to at most the limit, and u is clamped to it from both
sides, then shifted by up_offset; what was clamped has gradient 0. Saved for backward: g, u and w. Source: Shazeer,
arXiv:2002.05202.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_ops._internal.dispatch.checks import (
    check_floating,
    check_row_weights,
    check_same_device,
    check_same_dtype,
    empty_like_or_none,
)
from parallel_ops._internal.dispatch.registration import cast_first, register

_Gradients = tuple[Tensor, Tensor, Tensor]


def silu_mul(
    gate: Tensor,
    up: Tensor,
    *,
    weights: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """``silu(gate) * up``, forward and backward fused: SwiGLU of separate projections.

    Args:
        gate, up: ``[..., F]``, of one shape; float32, float16, bfloat16 or float64, any strides.
        weights: ``[...]`` or ``[..., 1]``, of any of these dtypes: each row of the result is multiplied by its weight,
            as in a mixture of experts. ``None``: by nothing.
        alpha: ``gate * sigmoid(alpha * gate)`` in place of SiLU.
        limit: clamps ``gate`` to at most it and ``up`` to between ``-limit`` and ``limit``, first of all.
        up_offset: added to ``up`` then. gpt-oss has ``alpha=1.702, limit=7.0, up_offset=1.0``.

    Returns:
        ``[..., F]``, contiguous, dtype of ``gate``. Under autocast gate and up are cast to the autocast dtype.

    Raises:
        TypeError: unsupported or differing dtypes, an option that is no number. ValueError: wrong shapes or devices,
            a ``limit`` that is not above 0.

    Sharding: elementwise, so any shard of gate and up gives that shard of y. The gradient of weights is partial over
    ranks that hold different columns.

    Examples:
        >>> import torch
        >>> from parallel_ops import silu_mul
        >>> gate, up = torch.randn(16, 2, 64), torch.randn(16, 2, 64)
        >>> torch.allclose(silu_mul(gate, up), torch.nn.functional.silu(gate) * up, atol=1e-6)
        True
    """
    options = swiglu_options("silu_mul", alpha, limit, up_offset)
    return _silu_forward.checked(lambda: _check("silu_mul", gate, up, weights), gate, up, weights, *options)


def gelu_mul(gate: Tensor, up: Tensor, *, approximate: str = "tanh", weights: Tensor | None = None) -> Tensor:
    """``gelu(gate) * up``: as ``silu_mul``, GeGLU of separate projections.

    Args:
        gate, up, weights: as in ``silu_mul``.
        approximate: ``"tanh"`` or ``"none"`` (exact, by erf).

    Returns, Raises, Sharding: as in ``silu_mul``; ValueError for another ``approximate``.

    Examples:
        >>> import torch
        >>> from parallel_ops import gelu_mul
        >>> gate, up = torch.randn(16, 2, 64), torch.randn(16, 2, 64)
        >>> expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
        >>> torch.allclose(gelu_mul(gate, up), expected, atol=1e-6)
        True
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(f"gelu_mul: approximate must be 'tanh' or 'none', got {approximate!r}")
    check = lambda: _check("gelu_mul", gate, up, weights)  # noqa: E731
    return _gelu_forward.checked(check, gate, up, weights, approximate == "tanh")


def silu_mul_reference(
    gate: Tensor,
    up: Tensor,
    *,
    weights: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """The same in plain PyTorch."""
    if limit is not None:
        # Not clamp: up to torch 2.13 a value at the limit has a gradient, since 2.14 none.
        gate, up = torch.where(gate > limit, limit, gate), torch.where(up.abs() > limit, up.sign() * limit, up)
    activated = F.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)
    return _weighted(activated * (up if up_offset == 0.0 else up + up_offset), weights)


def gelu_mul_reference(gate: Tensor, up: Tensor, *, approximate: str = "tanh", weights: Tensor | None = None) -> Tensor:
    """The same in plain PyTorch."""
    return _weighted(F.gelu(gate, approximate=approximate) * up, weights)


def _weighted(y: Tensor, weights: Tensor | None) -> Tensor:
    return y if weights is None else (y * weights.view(*y.shape[:-1], 1)).to(y.dtype)


def _check(op: str, gate: Tensor, up: Tensor, weights: Tensor | None) -> None:
    check_floating(op, "gate", gate)
    check_floating(op, "up", up)
    check_same_device(op, "up", up, "gate", gate)
    check_same_dtype(op, "up", up, "gate", gate)
    if gate.dim() == 0:
        raise ValueError(f"{op}: gate must have at least one dimension, got a scalar")
    if up.shape != gate.shape:
        raise ValueError(f"{op}: up must have the shape of gate, {list(gate.shape)}, got {list(up.shape)}")
    check_row_weights(op, weights, "gate", gate)


def swiglu_options(op: str, alpha: float, limit: float | None, up_offset: float) -> tuple[float, float | None, float]:
    """The options of SwiGLU, checked."""
    if limit is None and type(alpha) is float and type(up_offset) is float:
        return alpha, limit, up_offset
    for name, value in (("alpha", alpha), ("limit", limit), ("up_offset", up_offset)):
        if value is None and name == "limit":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    if limit is not None and not 0.0 < limit < math.inf:
        raise ValueError(f"{op}: limit must be None or a finite number above 0, got {limit}")
    return float(alpha), None if limit is None else float(limit), float(up_offset)


def outputs(gate: Tensor, up: Tensor, weights: Tensor | None, *_: object) -> Tensor:
    return gate.new_empty(gate.shape)


def backward_outputs(grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, *_: object) -> _Gradients:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), empty_like_or_none(weights, gate)


def _options(*options: Any) -> dict[str, Any]:
    """The kernel's options: of SiLU (alpha, limit, up_offset), of GeLU (tanh,)."""
    if len(options) == 1:
        return {"activation": "gelu tanh" if options[0] else "gelu"}
    return {"activation": "silu", **dict(zip(("alpha", "limit", "up_offset"), options, strict=True))}


def launch(y: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, *options: Any) -> None:
    from parallel_ops.triton_kernels.activations import activations as kernels

    kernels.forward(gate, up, None, weights, y, **_options(*options))


def launch_backward(
    gradients: _Gradients, grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, *options: Any
) -> None:
    from parallel_ops.triton_kernels.activations import activations as kernels

    dgate, dup, dweights = gradients
    no_bias = gate.new_empty(0)
    kernels.backward(grad, gate, up, None, weights, dgate, dup, no_bias, dweights, **_options(*options))


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, weights, *ctx.options = inputs
    ctx.save_for_backward(gate, up, weights)


def backward(op: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, up, weights = ctx.saved_tensors
    dgate, dup, dweights = op(grad, gate, up, weights, *ctx.options)
    return dgate, dup, None if weights is None else dweights, *(None for _ in ctx.options)


_silu_backward = register("silu_mul_backward", outputs=backward_outputs, launch=launch_backward)
_silu_forward = register(
    "silu_mul",
    outputs=outputs,
    launch=launch,
    setup_context=setup_context,
    backward=functools.partial(backward, _silu_backward),
    autocast=cast_first(2),
    reference=lambda gate, up, weights, alpha, limit, up_offset: silu_mul_reference(
        gate, up, weights=weights, alpha=alpha, limit=limit, up_offset=up_offset
    ),
)
_gelu_backward = register("gelu_mul_backward", outputs=backward_outputs, launch=launch_backward)
_gelu_forward = register(
    "gelu_mul",
    outputs=outputs,
    launch=launch,
    setup_context=setup_context,
    backward=functools.partial(backward, _gelu_backward),
    autocast=cast_first(2),
    reference=lambda gate, up, weights, tanh: gelu_mul_reference(
        gate, up, weights=weights, approximate="tanh" if tanh else "none"
    ),
)
