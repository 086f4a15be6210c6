"""Rotary position embedding.

    (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin)           for each pair (x1, x2) of a head's first R dimensions
    y        = x                                            for the others
    dx       = the same of dy, with sin negated

Pair i of R/2 is (x[i], x[R/2 + i]), "half-rotated", as in GPT-NeoX, Llama and Megatron-LM; or (x[2i], x[2i+1]),
"interleaved", as in the paper and GPT-J. Its angle at position p is given by cos[p, i] and sin[p, i], which are used in
fp32 whatever the dtype of x: rounded to bf16, as composites have them, they are off by up to 0.2%.

Saved for backward: cos, sin and the positions; x is not needed. Source: Su et al., arXiv:2104.09864.
"""

from typing import Any

import torch
from torch import Tensor

from parallel_ops.ops._check import check_floating, check_same_device
from parallel_ops.ops._registration import register


def rotary_embedding(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, positions: Tensor | None = None
) -> Tensor:
    """``x`` with the first dimensions of each head rotated by its position's angles.

    Args:
        x: ``[s, b, h, d]`` or packed ``[t, h, d]``, float32, float16, bfloat16 or float64, any strides: a view of a
            fused qkv is read as it is.
        cos, sin: ``[positions, R / 2]``, R <= d even; float32 or the dtype of ``x``. They take no gradient.
        interleaved: which dimensions make a pair (see the top of this file).
        positions: int64, ``[s]``, ``[s, b]`` or, for packed ``x``, ``[t]``: the row of ``cos`` and ``sin`` for each
            token. ``None``: row i for index i of the first dimension. Context-parallel ranks and packed sequences need
            them. One out of range raises on CPU; on CUDA, where checking would wait for the GPU, it gives NaN.

    Returns:
        Shape and dtype of ``x``, contiguous.

    Raises:
        TypeError: unsupported dtypes. ValueError: wrong shapes or devices, positions out of range (CPU), angles that
        require a gradient.

    Sharding: every token and head is independent, so x may be sharded on any dimension but the last, and y is sharded
    alike; positions are those of the tokens that the rank holds, cos and sin are replicated.
    """
    _check(x, cos, sin, positions)
    return _forward(x, cos, sin, positions, interleaved)


def rotary_embedding_reference(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, positions: Tensor | None = None
) -> Tensor:
    """The same in plain PyTorch, as Megatron-LM and Transformers have it: angles in the dtype of x."""
    rows = torch.arange(x.shape[0], device=x.device) if positions is None else positions
    tokens = (*rows.shape, *(1 for _ in range(x.dim() - 1 - rows.dim())))
    cos, sin = (t[rows].to(x.dtype).view(*tokens, t.shape[-1]) for t in (cos, sin))
    rotated, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    if interleaved:
        cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
        turned = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), dim=-1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        x1, x2 = rotated.chunk(2, dim=-1)
        turned = torch.cat((-x2, x1), dim=-1)
    return torch.cat((rotated * cos + turned * sin, rest), dim=-1)


def _check(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> None:
    op = "rotary_embedding"
    check_floating(op, "x", x)
    if x.dim() not in (3, 4):
        raise ValueError(f"{op}: x must be [s, b, h, d] or [t, h, d], got {list(x.shape)}")
    for name, angles in (("cos", cos), ("sin", sin)):
        check_floating(op, name, angles)
        check_same_device(op, name, angles, "x", x)
        if angles.dtype not in (torch.float32, x.dtype):
            raise TypeError(f"{op}: {name} must be float32 or the dtype of x, {x.dtype}, got {angles.dtype}")
        if angles.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: {name} requires a gradient, which is not implemented; detach it")
        if angles.dim() != 2 or 2 * angles.shape[1] > x.shape[-1]:
            raise ValueError(
                f"{op}: {name} must be [positions, R / 2] with R at most {x.shape[-1]}, the last dimension of x, "
                f"got {list(angles.shape)}"
            )
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"{op}: sin must be like cos, {list(cos.shape)} of {cos.dtype}, got {list(sin.shape)} of {sin.dtype}"
        )
    if positions is None:
        if x.shape[0] > cos.shape[0]:
            raise ValueError(f"{op}: cos has {cos.shape[0]} rows, but x has {x.shape[0]} positions")
        return
    if not isinstance(positions, Tensor) or positions.dtype is not torch.int64:
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"{op}: positions must be an int64 tensor, got {got}")
    check_same_device(op, "positions", positions, "x", x)
    if positions.shape not in (x.shape[:1], x.shape[:-2]):
        allowed = " or ".join(str(list(shape)) for shape in dict.fromkeys((x.shape[:1], x.shape[:-2])))
        raise ValueError(f"{op}: positions must have shape {allowed}, got {list(positions.shape)}")
    # Compiled, the kernel's own check remains, a RuntimeError: values are not known while tracing.
    if positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
        low, high = (int(v) for v in positions.aminmax())
        if low < 0 or high >= cos.shape[0]:
            raise ValueError(f"{op}: positions run from {low} to {high}, but cos has {cos.shape[0]} rows")


def _fake(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> Tensor:
    return x.new_empty(x.shape)


def _cuda_rotate(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, *, inverse: bool
) -> Tensor:
    from parallel_ops.triton_kernels import rotary_embedding as kernels

    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernels.rotate(x, cos, sin, positions, y, interleaved=interleaved, inverse=inverse)
    return y


def _cuda(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> Tensor:
    return _cuda_rotate(x, cos, sin, positions, interleaved, inverse=False)


def _cuda_backward(grad: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> Tensor:
    return _cuda_rotate(grad, cos, sin, positions, interleaved, inverse=True)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, bool], output: Tensor) -> None:
    _, cos, sin, positions, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin, positions)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    return _backward(grad, *ctx.saved_tensors, ctx.interleaved), None, None, None, None


_backward = register("rotary_embedding_backward", fake=_fake, cuda=_cuda_backward)
_forward = register("rotary_embedding", fake=_fake, cuda=_cuda, setup_context=_setup_context, backward=_autograd)
