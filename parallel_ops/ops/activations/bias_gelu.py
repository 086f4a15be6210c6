"""Bias and GeLU in one pass.

    y      = gelu(x + b)
    dx     = dy * gelu'(x + b)
    db[j]  = sum over rows i of dx[i, j]          (fp32 partial sums in an order set by the shape)

    gelu(z) = z Phi(z), Phi the normal distribution function           approximate="none"
            ~ z sigmoid(2 sqrt(2/pi) (z + 0.044715 z^3))               approximate="tanh"

Saved for backward: x and b, nothing else; the input half of a split backward copies b, which db needs too. The unfused
composite writes x + b to memory, saves it, and reads dx once more to sum it. Source: Hendrycks and Gimpel,
arXiv:1606.08415; the fusion is Megatron-LM's (arXiv:2104.04473).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_bias, check_rows, empty_like_or_none
from parallel_ops._internal.dispatch.registration import cast_to_autocast_dtype, register
from parallel_ops._internal.gradients.split_backward import kept_parameter, requested


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """``gelu(x + bias)``, forward and backward fused.

    Args:
        x: ``[..., H]``, float32, float16, bfloat16 or float64, any strides.
        bias: ``[H]``, of any of these dtypes, on the device of ``x``; ``None`` for plain GeLU.
        approximate: ``"tanh"`` (the approximation that GPT models use) or ``"none"`` (exact, by erf).

    Returns:
        ``[..., H]``, contiguous, dtype of ``x``. Under autocast the inputs are cast to the autocast dtype.

    Raises:
        TypeError: unsupported dtypes. ValueError: wrong shape, device or ``approximate``.

    Sharding: elementwise in x, so any shard of x gives that shard of y; bias must be the matching shard of the last
    dimension, and its gradient is then that shard's (partial over ranks that hold different rows).

    Examples:
        >>> import torch
        >>> from parallel_ops import bias_gelu
        >>> x, bias = torch.randn(16, 2, 64), torch.randn(64)
        >>> expected = torch.nn.functional.gelu(x + bias, approximate="tanh")
        >>> torch.allclose(bias_gelu(x, bias), expected, atol=1e-6)
        True
    """
    check_rows("bias_gelu", x)
    check_bias("bias_gelu", bias, x)
    if approximate not in ("tanh", "none"):
        raise ValueError(f"bias_gelu: approximate must be 'tanh' or 'none', got {approximate!r}")
    return _forward(x, bias, approximate == "tanh")


def bias_gelu_reference(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """The same in plain PyTorch."""
    return F.gelu(x if bias is None else x + bias, approximate=approximate).to(x.dtype)


def _activation(tanh: bool) -> str:
    return "gelu tanh" if tanh else "gelu"


def outputs(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def launch(y: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> None:
    from parallel_ops.triton_kernels.activations import activations as kernels

    kernels.forward(x, None, bias, None, y, activation=_activation(tanh))


def backward_outputs(grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), empty_like_or_none(bias, x)


def launch_backward(gradients: tuple[Tensor, Tensor], grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> None:
    from parallel_ops.triton_kernels.activations import activations as kernels

    dx, dbias = gradients
    no_weights = x.new_empty(0)
    kernels.backward(grad, x, None, bias, None, dx, None, dbias, no_weights, activation=_activation(tanh))


def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, bool], output: Tensor) -> None:
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, bias = ctx.saved_tensors
    for_x, for_bias = now = requested(ctx)[:2]
    dx, dbias = _backward(grad, x, kept_parameter(ctx, "bias_gelu", "bias", bias, 1, now), ctx.tanh)
    return dx if for_x else None, dbias if for_bias else None, None


_backward = register("bias_gelu_backward", outputs=backward_outputs, launch=launch_backward)
_forward = register(
    "bias_gelu",
    outputs=outputs,
    launch=launch,
    setup_context=setup_context,
    backward=backward,
    autocast=cast_to_autocast_dtype,
    reference=lambda x, bias, tanh: bias_gelu_reference(x, bias, approximate="tanh" if tanh else "none"),
)
