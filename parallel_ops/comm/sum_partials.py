"""The sum of what all ranks computed, in rank order.

    y = partials[0] + partials[1] + ... + bias + residual      in fp32 (fp64 for fp64), rounded once

One kernel reads every partial once and writes the sum: at most 20 bytes an element for eight partials in 16 bits, where
sums of whole tensors move 82. The order is that of the ranks, so the result depends neither on the order of arrival nor
on a backend's algorithm.
"""

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_same_device
from parallel_ops._internal.dispatch.registration import register


def sum_partials(partials: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """``partials[0] + partials[1] + ... + bias + residual`` in fp32, rounded once; not differentiable.

    Args:
        partials: ``[P, ...]``, the partials of all ranks in rank order; float32, float16, bfloat16 or float64 (added in
            fp64), or integers, without bias and residual (added as they are). Any strides.
        bias: ``[N]``, N the last dimension of ``partials``, of any of these floating dtypes.
        residual: shape of a partial, dtype of ``partials``.

    Returns:
        ``[...]``, contiguous, dtype of ``partials``.

    Raises:
        TypeError: dtypes that do not fit. ValueError: shapes that do not fit.

    Sharding: partials S(0) of what was received; everything on this rank alone.
    """
    if partials.dim() == 0 or partials.shape[0] == 0:
        raise ValueError(f"sum_partials: partials must have shape [P, ...] with P > 0, got {list(partials.shape)}")
    shape = partials.shape[1:]
    if bias is not None:
        if bias.dim() != 1 or bias.shape != shape[-1:]:
            raise ValueError(f"sum_partials: bias must have shape {list(shape[-1:])}, got {list(bias.shape)}")
        check_same_device("sum_partials", "bias", bias, "partials", partials)
    if residual is not None:
        if residual.shape != shape:
            raise ValueError(f"sum_partials: residual must have shape {list(shape)}, got {list(residual.shape)}")
        check_same_device("sum_partials", "residual", residual, "partials", partials)
        if residual.dtype is not partials.dtype:
            raise TypeError(f"sum_partials: residual must be {partials.dtype} like partials, got {residual.dtype}")
    if partials.dtype.is_floating_point:
        return _sum(partials, bias, residual)
    if bias is not None or residual is not None:
        raise TypeError(f"sum_partials: bias and residual are for floating partials, got {partials.dtype}")
    return partials.sum(0, dtype=partials.dtype)


def sum_partials_reference(partials: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The same in plain PyTorch, one tensor after the other."""
    total = partials[0].to(torch.promote_types(partials.dtype, torch.float32), copy=True)
    for other in (*partials[1:], *(t for t in (bias, residual) if t is not None)):
        total += other
    return total.to(partials.dtype)


def outputs(partials: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    return partials.new_empty(partials.shape[1:])


def launch(y: Tensor, partials: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    from parallel_ops.triton_kernels import sum_partials as kernels

    kernels.sum_partials(partials, bias, residual, y)


_sum = register("sum_partials", outputs=outputs, launch=launch)
