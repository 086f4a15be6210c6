"""Cross-entropy with the options of language models, without a copy of the logits.

    z      = x, or c tanh(x / c) with softcap c                       one row of logits
    lse    = log sum_j exp(z_j)
    loss   = (1 - eps) w_t (lse - z_t) + eps mean_j w_j (lse - z_j) + zeta lse^2
    dx_j   = g dz_j/dx_j (a p_j + 2 zeta lse p_j - (1 - eps) w_t [j = t] - eps w_j / V),    p_j = exp(z_j - lse)
    a      = (1 - eps) w_t + eps mean_j w_j

with t the target, eps the label smoothing over the V entries of the vocabulary, w the class weights, zeta the z-loss
and g the incoming gradient. Without class weights w and a are 1; at eps = zeta = 0 and without softcap this is
``F.cross_entropy``. A mean divides by the sum of the rows' w_t, which is their number without class weights.

Saved for backward: the logits themselves (no copy), and per row the maximum and log sum exp(z - max). Their sum is lse;
they are kept apart because in fp32 lse has only three decimals left at logits of 1e4, and p would have no more. Forward
reads the logits once, backward reads them and writes the gradient. With ``gradient_in_forward`` the gradient for an
incoming gradient of 1 is written while the row is at hand, one pass less; backward multiplies it by what really comes
in, which moves nothing where that is 1.

A logit of -inf is a column that is not there: it gets no gradient and smoothing leaves it out of the mean. So a padded
vocabulary is masked by -inf in its padding columns (F.cross_entropy with smoothing gives inf there).

Sources: Szegedy et al., arXiv:1512.00567 (smoothing); Chowdhery et al., arXiv:2204.02311 (z-loss); Gemma Team,
arXiv:2408.00118 (softcap).
"""

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from parallel_ops._internal.registration import register
from parallel_ops.ops.cross_entropy.kernels import (
    LossStatistics,
    accumulation_dtype,
    combine_on_cuda,
    gradient,
    is_memory,
    saved_per_row,
    statistics_of,
    statistics_on_cuda,
    target_weights,
)
from parallel_ops.ops.cross_entropy.options import (
    COLUMN_IGNORED,
    INVALID,
    NONE,
    REDUCTIONS,
    LossArguments,
    LossOptions,
    check_logits,
    check_reduction,
    divisor_of,
    reduced,
)


class CrossEntropyArguments(LossArguments, total=False):
    """Keyword arguments of ``cross_entropy``."""

    inplace_backward: bool
    gradient_in_forward: bool


@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    return_statistics: Literal[False] = False,
    **options: Unpack[CrossEntropyArguments],
) -> Tensor: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, *, return_statistics: Literal[True], **options: Unpack[CrossEntropyArguments]
) -> tuple[Tensor, LossStatistics]: ...
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    ignore_out_of_range: bool = False,
    reduction: str = "mean",
    inplace_backward: bool = False,
    gradient_in_forward: bool = False,
    return_statistics: bool = False,
) -> Tensor | tuple[Tensor, LossStatistics]:
    """Cross-entropy of whole logits; ``vocab_parallel_cross_entropy`` takes shards of them.

    Args:
        logits: ``[..., V]``, float32, float16, bfloat16 or float64, any strides. -inf marks a column that is not there.
        target: ``[...]``, int64 or int32 class indices.
        class_weight: ``[V]``, of any of these dtypes: the weight of each class, as in ``F.cross_entropy``. The z-loss
            is not weighted. It takes no gradient.
        label_smoothing: the share of the target spread evenly over the vocabulary, in [0, 1].
        z_loss: weight of logsumexp squared.
        softcap: ``c`` replaces each logit x by ``c * tanh(x / c)``.
        ignore_index: rows with this target have loss and gradient 0.
        ignore_out_of_range: so have rows with a target outside the vocabulary, which otherwise are an error.
        reduction: ``"none"``, ``"sum"``, or ``"mean"``: over the rows that are not ignored, 0 if there are none
            (``F.cross_entropy`` gives NaN).
        inplace_backward: the gradient is written over the logits (if contiguous), which saves as much memory again.
            Autograd knows: a second backward, or the backward of another op that saved these logits, raises. Values
            read from the logits afterwards are those of the gradient. Under ``torch.compile`` memory is the compiler's
            to plan, and the gradient goes to a new tensor.
        gradient_in_forward: the gradient is made in the forward pass, for ``"mean"`` and ``"sum"``: two passes over the
            logits in place of three, for a tensor of their size that lives from forward to backward, or for the logits
            themselves with ``inplace_backward``. Only one backward.
        return_statistics: returns (loss, ``LossStatistics``).

    Returns:
        A scalar tensor, or ``[...]`` for ``reduction="none"``; float32, or float64 for float64 logits. A tuple with
        ``return_statistics``.

    Raises:
        TypeError: unsupported dtypes. ValueError: wrong shapes, devices or options and, on CPU, a target outside the
            vocabulary. On CUDA, where looking would mean waiting for the device, rows with such a target have NaN loss
            and gradient.

    Sharding: every row is independent; logits, target and loss may be sharded on any dimension but the vocabulary's.
    """
    return cross_entropy_impl(
        "cross_entropy", logits, target, class_weight, label_smoothing, z_loss, softcap, ignore_index,
        ignore_out_of_range, reduction, inplace_backward, gradient_in_forward, return_statistics,
    )  # fmt: skip


def cross_entropy_impl(
    name: str, logits: Tensor, target: Tensor, class_weight: Tensor | None, label_smoothing: float, z_loss: float,
    softcap: float | None, ignore_index: int, ignore_out_of_range: bool, reduction: str, inplace_backward: bool,
    gradient_in_forward: bool, return_statistics: bool,
) -> Tensor | tuple[Tensor, LossStatistics]:  # fmt: skip
    """``cross_entropy``, whose errors name the op ``name``."""
    check_reduction(name, reduction)
    options = LossOptions.checked(name, label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range)
    if gradient_in_forward and reduction == "none":
        raise ValueError(f"{name}: gradient_in_forward needs reduction 'mean' or 'sum', got 'none'")
    run = _forward_with_gradient if gradient_in_forward else forward
    check = lambda: check_logits(name, logits, target, class_weight)  # noqa: E731
    indices = target.contiguous() if isinstance(target, Tensor) else target
    try:
        loss, column, saved, *_ = run(
            logits, indices, class_weight, *options, REDUCTIONS.index(reduction), inplace_backward, check=check,
            all_outputs=return_statistics,
        )  # fmt: skip
    except RuntimeError:
        # On CPU the kernel checks the targets as it reads them, since a check of its own costs as much as a small
        # kernel. If that was the error, the next line raises it with the row and the target.
        if not ignore_out_of_range:
            check_target_values(name, target, logits.shape[-1], ignore_index)
        raise
    return (loss, statistics_of(column, saved, target.shape)) if return_statistics else loss


def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    ignore_out_of_range: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """The same in plain PyTorch."""
    z = logits.flatten(0, -2) if logits.dim() > 1 else logits.unsqueeze(0)
    z = z.float() if logits.dtype in (torch.bfloat16, torch.float16) else z
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    target = target.flatten().long()
    if ignore_out_of_range:
        target = torch.where((target < 0) | (target >= z.shape[-1]), ignore_index, target)
    weight = None if class_weight is None else class_weight.to(z.dtype)
    loss = F.cross_entropy(
        z, target, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    kept = target != ignore_index
    if z_loss:
        loss = loss + torch.where(kept, z_loss * z.logsumexp(-1).square(), 0.0)
    if reduction == "none":
        return loss.view(logits.shape[:-1])
    if reduction == "sum":
        return loss.sum()
    divisor = kept.sum() if weight is None else torch.where(kept, weight[torch.where(kept, target, 0)], 0.0).sum()
    return loss.sum() / torch.where(divisor == 0, 1, divisor)


def check_target_values(op: str, target: Tensor, vocab: int, ignore_index: int, where: str = "") -> None:
    """ValueError for a target outside the vocabulary on CPU; on CUDA the loss of such a row is NaN instead."""
    if target.device.type != "cpu":
        return
    flat = target.flatten()
    bad = ((flat < 0) | (flat >= vocab)) & (flat != ignore_index)
    if bool(bad.any()):
        row = int(bad.int().argmax())
        raise ValueError(
            f"{op}: target {int(flat[row])} in row {row}{where} is outside the vocabulary [0, {vocab}) and is not "
            "ignore_index"
        )


def _fake(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, label_smoothing: float, z_loss: float,
    softcap: float, ignore_index: int, ignore_invalid: bool, reduction: int, *_: object,
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
    softcap: float, ignore_index: int, ignore_invalid: bool, reduction: int, *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    cols, smoothing = logits.shape[-1], label_smoothing != 0.0
    part, column = statistics_on_cuda(
        logits, target, class_weight, 0, cols, ignore_index, ignore_invalid, softcap, smoothing
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


def _forward_with_gradient(
    logits: Tensor, *arguments: Any, check: Callable[[], None], all_outputs: bool
) -> tuple[Tensor, ...]:
    check()
    *given, inplace = arguments
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return forward(logits, *given, False)
    if inplace and logits.is_contiguous() and is_memory(logits) and not torch.compiler.is_compiling():
        return _GradientOverLogits.apply(logits, *given)
    return _with_gradient(logits, *given, all_outputs=all_outputs)


def _fake_with_gradient(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return *_fake(logits, *arguments), logits.new_empty(logits.shape)


def _cuda_with_gradient(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return *_launch_with_gradient(logits, *arguments, out=out), out


def _cuda_with_gradient_inplace(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return _launch_with_gradient(logits, *arguments, out=logits)


def _launch_with_gradient(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, label_smoothing: float, z_loss: float,
    softcap: float, ignore_index: int, ignore_invalid: bool, reduction: int, of_sum: bool = False, *, out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from parallel_ops.triton_kernels.cross_entropy import cross_entropy as kernels

    # What the mean divides by is needed before the first row.
    valid = (target >= 0) & (target < logits.shape[-1])
    kept = (target != ignore_index) & (valid | (not ignore_invalid))
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
        ignore_invalid=ignore_invalid,
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
        dlogits = logits.detach()
        outputs = loss_and_grad_inplace(dlogits, *arguments, False)
        torch.autograd.graph.increment_version(logits)
        _setup_context_with_gradient(ctx, (logits, *arguments), (*outputs, dlogits))
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _autograd_with_gradient(ctx, *grads)


def _fake_scale(dlogits: Tensor, factor: Tensor) -> None:
    return None


def _cuda_scale(dlogits: Tensor, factor: Tensor) -> None:
    from parallel_ops.triton_kernels.cross_entropy import cross_entropy as kernels

    kernels.scale(dlogits, factor)


_scale_inplace = register("cross_entropy_scale_", fake=_fake_scale, cuda=_cuda_scale)
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
