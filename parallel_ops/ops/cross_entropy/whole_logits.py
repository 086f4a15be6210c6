"""The torch ops of the cross-entropy of whole logits; the formulas are in ``cross_entropy.py``.

forward                  loss, and what the backward needs of each row
forward_with_gradient    the same and the gradient, for losses that are reduced
"""

from typing import Any

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.registration import register
from parallel_ops.ops.cross_entropy.kernels import (
    accumulation_dtype,
    combine_on_cuda,
    gradient,
    is_memory,
    saved_per_row,
    statistics_on_cuda,
    target_weights,
)
from parallel_ops.ops.cross_entropy.options import (
    COLUMN_IGNORED,
    INVALID,
    NONE,
    REDUCTIONS,
    LossOptions,
    divisor_of,
    reduced,
)


def _fake(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, label_smoothing: float, z_loss: float,
    softcap: float, ignore_index: int, ignore_out_of_range: bool, reduction: int, *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype, rows = accumulation_dtype(logits.dtype), target.numel()
    width = saved_per_row(label_smoothing != 0.0, class_weight is not None)
    return (
        logits.new_empty(target.shape if reduction == NONE else (), dtype=dtype),
        target.new_empty(rows, dtype=torch.int64),
        logits.new_empty((width, rows), dtype=dtype),
        logits.new_empty((), dtype=dtype),
    )


def _cuda(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, label_smoothing: float, z_loss: float,
    softcap: float, ignore_index: int, ignore_out_of_range: bool, reduction: int,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    cols, smoothing = logits.shape[-1], label_smoothing != 0.0
    part, column = statistics_on_cuda(
        logits, target, class_weight, 0, cols, ignore_index, ignore_out_of_range, softcap, smoothing
    )
    loss, saved = combine_on_cuda(part.unsqueeze(0), column, label_smoothing, z_loss)
    loss, divisor = reduced(loss, REDUCTIONS[reduction], column, target_weights(saved))
    return loss.view(target.shape) if reduction == NONE else loss, column, saved, divisor


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, class_weight, *options, ctx.reduction, ctx.inplace = inputs
    _, column, saved, divisor = output
    ctx.mark_non_differentiable(column, saved, divisor)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, class_weight, column, saved, divisor)
    ctx.options, ctx.arguments = LossOptions(*options), len(inputs)


def _autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * ctx.arguments
    logits, class_weight, column, saved, divisor = ctx.saved_tensors
    divisor = None if ctx.reduction == NONE else divisor
    dlogits = gradient(grad, logits, class_weight, column, saved, divisor, ctx.options, inplace=ctx.inplace)
    return dlogits, *(None,) * (ctx.arguments - 1)


def forward_with_gradient(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, label_smoothing: float, z_loss: float,
    softcap: float, ignore_index: int, ignore_out_of_range: bool, reduction: int, inplace: bool, all_outputs: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``forward``, with the gradient for an incoming gradient of 1 computed in the same pass over the logits.

    Args:
        inplace: write the gradient over the logits if possible.
        all_outputs: return the statistics of rows with gradients too.
    """
    given = (target, class_weight, label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range, reduction)
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return forward(logits, *given, False)
    if inplace and logits.is_contiguous() and is_memory(logits) and not torch.compiler.is_compiling():
        return _GradientOverLogits.apply(logits, *given)
    return (_with_gradient.dispatched if all_outputs else _with_gradient)(logits, *given)


def _fake_with_gradient(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return *_fake(logits, *arguments), logits.new_empty(logits.shape)


def _cuda_with_gradient(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, label_smoothing: float, z_loss: float,
    softcap: float, ignore_index: int, ignore_out_of_range: bool, reduction: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return *_launch_with_gradient(
        logits, target, class_weight, label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range, reduction,
        out=out,
    ), out  # fmt: skip


def _cuda_with_gradient_inplace(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, label_smoothing: float, z_loss: float,
    softcap: float, ignore_index: int, ignore_out_of_range: bool, reduction: int,
    of_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _launch_with_gradient(
        logits, target, class_weight, label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range, reduction,
        of_sum, out=logits,
    )  # fmt: skip


def _launch_with_gradient(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, label_smoothing: float, z_loss: float,
    softcap: float, ignore_index: int, ignore_out_of_range: bool, reduction: int, of_sum: bool = False, *, out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from parallel_ops.triton_kernels.cross_entropy import cross_entropy as kernels

    # The divisor of the mean is needed before the first row.
    valid = (target >= 0) & (target < logits.shape[-1])
    kept = (target != ignore_index) & (valid | (not ignore_out_of_range))
    column = torch.where(kept, torch.where(valid, target, INVALID), COLUMN_IGNORED).flatten().long()
    weights = None
    if class_weight is not None:
        weights = torch.where(column >= 0, class_weight[column.clamp(min=0)], 0.0)
    dtype = accumulation_dtype(logits.dtype)
    divisor = divisor_of(REDUCTIONS[reduction], column, None if weights is None else weights.to(dtype), dtype)
    saved = logits.new_empty(
        (saved_per_row(label_smoothing != 0.0, class_weight is not None), target.numel()), dtype=dtype
    )
    loss = saved.new_empty(target.numel())
    scale = torch.ones_like(divisor) if of_sum else divisor.reciprocal()
    kernels.with_gradient(
        logits, target, class_weight, scale, loss, column, saved, out,
        label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, ignore_index=ignore_index,
        ignore_out_of_range=ignore_out_of_range,
    )  # fmt: skip
    if reduction == NONE:
        return loss.view(target.shape), column, saved, divisor
    return loss.sum() / divisor, column, saved, divisor


def _setup_context_with_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[4])
    ctx.arguments = len(inputs)


def _autograd_with_gradient(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * ctx.arguments
    (dlogits,) = ctx.saved_tensors
    if not is_memory(dlogits):
        return (dlogits * grad).to(dlogits.dtype), *(None,) * (ctx.arguments - 1)
    _scale_inplace(dlogits, grad)
    torch.autograd.graph.increment_version(dlogits)  # it is used up
    return dlogits, *(None,) * (ctx.arguments - 1)


class _GradientOverLogits(torch.autograd.Function):
    """``_with_gradient`` that writes over the logits. Torch has no formulas for ops that write over arguments."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        dlogits, inputs = logits.detach(), (logits, *arguments)
        arguments = (*arguments, False)
        outputs = loss_and_grad_inplace(dlogits, *arguments)
        torch.autograd.graph.increment_version(logits)
        _setup_context_with_gradient(ctx, inputs, (*outputs, dlogits))
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _autograd_with_gradient(ctx, *grads)


def _cuda_scale(dlogits: Tensor, factor: Tensor) -> None:
    from parallel_ops.triton_kernels.cross_entropy import cross_entropy as kernels

    kernels.scale(dlogits, factor)


_scale_inplace = register("cross_entropy_scale_", cuda=_cuda_scale)
loss_and_grad_inplace = register("cross_entropy_with_gradient_", fake=_fake, cuda=_cuda_with_gradient_inplace)
_with_gradient = register(
    "cross_entropy_with_gradient",
    fake=_fake_with_gradient,
    cuda=_cuda_with_gradient,
    setup_context=_setup_context_with_gradient,
    backward=_autograd_with_gradient,
    differentiable=1,
)
forward = register(
    "cross_entropy", fake=_fake, cuda=_cuda, setup_context=_setup_context, backward=_autograd, differentiable=1
)
