"""Bias and SwiGLU in one pass.

    g, u   = x[..., :F] + b[:F], x[..., F:] + b[F:]        (gate half first)
    y      = silu(g) * u                                    silu(z) = z sigmoid(z)
    dg     = dy * u * silu'(g)                              silu'(z) = sigmoid(z) + z sigmoid(z) sigmoid(-z)
    du     = dy * silu(g)
    db     = sum over rows of [dg, du]                      (fp32 partial sums in an order set by the shape)

Saved for backward: x and b, nothing else. Both halves are read in place and both halves of dx are written in place:
no chunk, no cat. The unfused composite saves x + b and silu(g), and joins dg and du by a copy.
Source: Shazeer, arXiv:2002.05202.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_ops.ops._check import check_bias, check_rows
from parallel_ops.ops._registration import cast_to_autocast_dtype, register


def bias_swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, where ``gate`` and ``up`` are the halves of ``x + bias``, forward and backward fused.

    Args:
        x: ``[..., 2F]``, gate half first; float32, float16, bfloat16 or float64, any strides.
        bias: ``[2F]``, dtype and device of ``x``; ``None`` for plain SwiGLU.

    Returns:
        ``[..., F]``, contiguous, dtype of ``x``. Under autocast the inputs are cast to the autocast dtype.

    Raises:
        TypeError: unsupported or differing dtypes. ValueError: wrong shape (an odd last dimension too) or device.

    Sharding: elementwise over rows, so any shard of rows gives that shard of y. A shard of the last dimension must
    hold the gate columns and the up columns of the same features, as ``[gate shard, up shard]``; bias likewise, and
    its gradient is then that shard's (partial over ranks that hold different rows).
    """
    check_rows("bias_swiglu", x)
    if x.shape[-1] % 2:
        raise ValueError(
            f"bias_swiglu: the last dimension of x must be even (gate half, up half), got shape {list(x.shape)}"
        )
    check_bias("bias_swiglu", bias, x)
    return _forward(x, bias)


def bias_swiglu_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same in plain PyTorch."""
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def _output(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _fake(x: Tensor, bias: Tensor | None) -> Tensor:
    return _output(x)


def _fake_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0 if bias is None else bias.shape)


def _cuda(x: Tensor, bias: Tensor | None) -> Tensor:
    from parallel_ops.triton_kernels import bias_swiglu as kernels

    y = _output(x)
    kernels.forward(x, bias, y)
    return y


def _cuda_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    from parallel_ops.triton_kernels import bias_swiglu as kernels

    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dbias = x.new_empty(0 if bias is None else bias.shape)
    kernels.backward(grad, x, bias, dx, dbias)
    return dx, dbias


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    x, bias = ctx.saved_tensors
    dx, dbias = _backward(grad, x, bias)
    return dx, None if bias is None else dbias


_backward = register("bias_swiglu_backward", fake=_fake_backward, cuda=_cuda_backward)
_forward = register(
    "bias_swiglu",
    fake=_fake,
    cuda=_cuda,
    setup_context=_setup_context,
    backward=_autograd,
    autocast=cast_to_autocast_dtype,
)
