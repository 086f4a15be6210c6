"""Linears whose three products are in float8, scaled by row.

    q(T)  = T / s rounded to float8,    s = max |row of T| / the format's maximum, fp32, one for each row
    Y     = q(X) q(W)^T                 rows of X and of W; e4m3, e4m3
    dX    = q(dY) q(W^T)^T              rows of dY and of W^T; e5m2, e4m3
    dW    = q(dY^T) q(X^T)^T            rows of dY^T and of X^T; e5m2, e4m3

A row is always what the product sums over, so both scales leave the sum, and ``torch._scaled_mm`` applies them to its
fp32 sums. Each matrix is quantized twice, by row and by column, from 16 bits: saved are X and W as they are, as
``F.linear`` does, so other ops share the memory. Scales are of the current values: there is no history to keep.
``_scaled_mm`` with such scales takes e5m2 as its first operand only, e4m3 as its second, the first by rows and the
second by columns, and rounds its sums to bfloat16 (aten/src/ATen/native/cuda/RowwiseScaledMM.cu).

Sources: Micikevicius et al., arXiv:2209.05433 (the formats, and which tensor has which); torchao's float8 training,
whose recipe by row has e4m3 for gradients too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.autograd import once_differentiable
from parallel_ops._internal.dispatch.checks import check_same_device
from parallel_ops._internal.gradients.split_backward import requested

_NAME = "float8_linear"

# What the kernels of _scaled_mm need of each dimension but the number of rows of the first operand.
MULTIPLE = 16

# The smallest normal fp32: scales below it would be flushed to zero on some devices.
_TINY = torch.finfo(torch.float32).tiny


def quantize_rows(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``t`` in float8 with a scale for each row: ``t ~ values * scales``.

    Args:
        t: ``[rows, columns]``, floating-point, any strides.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        values: ``[rows, columns]`` in ``dtype``, contiguous. scales: ``[rows, 1]``, fp32. A row of zeros stays zeros; a
        row with NaN or infinity has values or a scale that are not finite, so that a product with it is NaN.
    """
    most = torch.finfo(dtype).max
    wide = t.float()
    if t.shape[1] == 0:
        return t.to(dtype).contiguous(), wide.new_full((t.shape[0], 1), _TINY)
    scales = (wide.abs().amax(dim=1, keepdim=True) / most).clamp(min=_TINY)
    # The quotient may round to more than the maximum, which some casts make NaN. clamp keeps NaN.
    return (wide / scales).clamp(-most, most).to(dtype).contiguous(), scales


def scaled_product(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], *, emulated: bool, gradient: bool = False
) -> Tensor:
    """``A B^T``, ``[M, N]`` in bfloat16, of what ``quantize_rows`` made of A ``[M, K]`` and B ``[N, K]``.

    Args:
        emulated: multiply in fp32, on any device.
        gradient: Add the tensor cores' partial sums in fp32 registers. Otherwise they stay in the tensor cores, which
            is faster and less exact. Transformer Engine and torchao choose alike.
    """
    (values, scales), (other_values, other_scales) = a, b
    if emulated:
        return ((values.float() * scales) @ (other_values.float() * other_scales).t()).bfloat16()
    return torch._scaled_mm(
        values,
        other_values.t(),
        scale_a=scales,
        scale_b=other_scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=not gradient,
    )


def _forward(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], emulated: bool) -> list[Tensor]:
    rows = quantize_rows(x.flatten(0, -2), torch.float8_e4m3fn)  # once for all weights
    outputs = []
    for weight, bias in zip(weights, biases, strict=True):
        y = scaled_product(rows, quantize_rows(weight, torch.float8_e4m3fn), emulated=emulated)
        outputs.append((y if bias is None else y + bias).view(*x.shape[:-1], weight.shape[0]))
    return outputs


def _padded(t: Tensor) -> Tensor:
    """A matrix with rows of zeros up to a multiple of ``MULTIPLE``: they add nothing to a sum over rows."""
    missing = -t.shape[0] % MULTIPLE
    return torch.nn.functional.pad(t, (0, 0, 0, missing)) if missing else t


class _Float8Linear(torch.autograd.Function):
    """Plain torch, so that ``torch.compile`` makes each quantization one kernel."""

    @staticmethod
    def forward(ctx: Any, emulated: bool, count: int, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights = [w for w in parameters[:count] if w is not None]
        ctx.save_for_backward(x, *weights)
        ctx.emulated, ctx.count = emulated, count
        return tuple(_forward(x, weights, parameters[count:], emulated))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        emulated, count = ctx.emulated, ctx.count
        # A compiled backward computes all gradients.
        needed = ctx.needs_input_grad if torch.compiler.is_compiling() else requested(ctx)
        of_weights, of_biases = needed[3 : 3 + count], needed[3 + count :]
        dys = [grad.flatten(0, -2) for grad in grads]
        dx: Tensor | None = None
        if needed[2]:
            for dy, weight in zip(dys, weights, strict=True):
                rows = quantize_rows(dy, torch.float8_e5m2)
                other = quantize_rows(weight.t(), torch.float8_e4m3fn)
                part = scaled_product(rows, other, emulated=emulated, gradient=True)
                dx = part if dx is None else dx + part
            assert dx is not None
            dx = dx.view(x.shape)
        found: list[Tensor | None] = [None] * count
        if any(of_weights):
            columns = quantize_rows(_padded(x.flatten(0, -2)).t(), torch.float8_e4m3fn)
            for i, dy in enumerate(dys):
                if of_weights[i]:
                    rows = quantize_rows(_padded(dy).t(), torch.float8_e5m2)
                    found[i] = scaled_product(rows, columns, emulated=emulated, gradient=True)
        summed = [
            dy.sum(0, dtype=torch.float32).to(dy.dtype) if need else None
            for dy, need in zip(dys, of_biases, strict=True)
        ]
        return None, None, dx, *found, *summed


_Float8Linear.backward = staticmethod(once_differentiable(_NAME, _Float8Linear.backward))  # type: ignore[method-assign]


def float8_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, emulated: bool = False
) -> list[Tensor]:
    """``F.linear`` of one input with several weights, forward and backward by float8 products.

    Args:
        x: ``[..., H]``, bfloat16; under autocast to bfloat16 any floating dtype.
        weights: ``[N, H]`` each, dtype and device of ``x``; H and N are multiples of 16.
        biases: ``[N]`` or ``None``, one for each weight.
        emulated: quantize in the same way, but multiply in fp32: on any device, slower than bfloat16.

    Returns:
        ``[..., N]`` for each weight, bfloat16. Gradients are bfloat16; those of biases are sums of the output's
        gradient as it came.

    Raises:
        TypeError: another dtype. ValueError: sizes that do not fit; a device without float8, unless ``emulated``.

    Sharding: x, weights and biases of one rank.
    """
    if torch.is_autocast_enabled(x.device.type):
        to = torch.get_autocast_dtype(x.device.type)
        x, weights = x.to(to), [w.to(to) for w in weights]
        biases = [None if b is None else b.to(to) for b in biases]
    if len(biases) != len(weights) or not weights:
        raise ValueError(f"{_NAME}: biases must have one entry for each weight, got {len(biases)} for {len(weights)}")
    if not emulated and not x.is_cuda:
        raise ValueError(f"{_NAME}: x is on {x.device}, where products are not in float8; use emulated=True")
    for name, t in [("x", x), *(("weight", w) for w in weights), *(("bias", b) for b in biases if b is not None)]:
        if t.dtype is not torch.bfloat16:
            raise TypeError(f"{_NAME}: {name} must be bfloat16, got {t.dtype}; cast it, or run under torch.autocast")
        check_same_device(_NAME, name, t, "x", x)
    for weight, bias in zip(weights, biases, strict=True):
        if x.dim() < 2 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{_NAME}: weight must be [N, {x.shape[-1] if x.dim() else 'H'}] for x of {list(x.shape)}, "
                f"got {list(weight.shape)}"
            )
        if any(size % MULTIPLE for size in weight.shape):
            raise ValueError(f"{_NAME}: weight has the sizes {list(weight.shape)}, which {MULTIPLE} must divide")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{_NAME}: bias must be [{weight.shape[0]}], got {list(bias.shape)}")
    outputs: tuple[Tensor, ...] = _Float8Linear.apply(emulated, len(weights), x, *weights, *biases)
    return list(outputs)


def device_problem(device: torch.device) -> str | None:
    """Why a device has no float8 products; ``None`` if it has."""
    if device.type != "cuda":
        return f"float8 products need a GPU, and the device is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return (
            f"float8 products need a GPU of compute capability 8.9 or more (Ada, Hopper and later), and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
        )
    return None
