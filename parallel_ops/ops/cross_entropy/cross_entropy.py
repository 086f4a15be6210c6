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
they are stored separately because lse in fp32 has only three decimals left at logits of 1e4, and p would have no more.
The forward reads the logits once, the backward reads them and writes the gradient.

A logit of -inf marks a column as absent: it gets no gradient and is left out of the mean of smoothing. So a padded
vocabulary is masked by -inf in its padding columns (F.cross_entropy with smoothing returns inf there).

Sources: Szegedy et al., arXiv:1512.00567 (smoothing); Chowdhery et al., arXiv:2204.02311 (z-loss); Gemma Team,
arXiv:2408.00118 (softcap).
"""

from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from parallel_ops._internal.dispatch.registration import register
from parallel_ops.ops.cross_entropy.kernels import (
    LossStatistics,
    combine,
    logits_backward,
    outputs,
    reduced,
    setup_context,
    statistics,
    statistics_of,
)
from parallel_ops.ops.cross_entropy.options import LossArguments, LossOptions, check_logits, check_target_values


class CrossEntropyArguments(LossArguments, total=False):
    """Keyword arguments of ``cross_entropy``."""

    inplace_backward: bool


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
    return_statistics: bool = False,
) -> Tensor | tuple[Tensor, LossStatistics]:
    """Cross-entropy of whole logits; ``vocab_parallel_cross_entropy`` takes shards of them.

    Args:
        logits: ``[..., V]``, float32, float16, bfloat16 or float64, any strides. -inf marks an absent column.
        target: ``[...]``, int64 or int32 class indices.
        class_weight: ``[V]``, of any of these dtypes: the weight of each class, as in ``F.cross_entropy``. The z-loss
            is not weighted. It takes no gradient.
        label_smoothing: the share of the target spread evenly over the vocabulary, in [0, 1].
        z_loss: weight of logsumexp squared.
        softcap: ``c`` replaces each logit x by ``c * tanh(x / c)``.
        ignore_index: rows with this target have loss and gradient 0.
        ignore_out_of_range: rows with a target outside the vocabulary are ignored too. Otherwise they are an error.
        reduction: ``"none"``, ``"sum"``, or ``"mean"``: over the rows that are not ignored, 0 if there are none
            (``F.cross_entropy`` returns NaN).
        inplace_backward: writes the gradient over the logits (if contiguous), which saves as much memory again. A
            second backward, or the backward of another op that saved these logits, raises. Under ``torch.compile``,
            which plans memory itself, the gradient is a new tensor.
        return_statistics: returns (loss, ``LossStatistics``).

    Returns:
        A scalar tensor, or ``[...]`` for ``reduction="none"``; float32, or float64 for float64 logits. A tuple with
        ``return_statistics``.

    Raises:
        TypeError: unsupported dtypes. ValueError: wrong shapes, devices or options and, on CPU, a target outside the
            vocabulary. On CUDA, where checking values would wait for the device, rows with such a target have NaN
            loss and gradient.

    Sharding: every row is independent; logits, target and loss may be sharded on any dimension but the vocabulary's.

    Examples:
        >>> import torch
        >>> from parallel_ops import cross_entropy
        >>> logits, target = torch.randn(32, 1000), torch.randint(1000, (32,))
        >>> expected = torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1)
        >>> torch.allclose(cross_entropy(logits, target, label_smoothing=0.1), expected)
        True
    """
    options = LossOptions.checked(
        "cross_entropy", label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range, reduction
    )
    return cross_entropy_impl(
        "cross_entropy", logits, target, class_weight, options, inplace_backward, return_statistics
    )


def cross_entropy_impl(
    name: str, logits: Tensor, target: Tensor, class_weight: Tensor | None, options: LossOptions,
    inplace_backward: bool, return_statistics: bool,
) -> Tensor | tuple[Tensor, LossStatistics]:  # fmt: skip
    """``cross_entropy``, whose errors name the op ``name``."""
    check = lambda: check_logits(name, logits, target, class_weight)  # noqa: E731
    indices = target.contiguous() if isinstance(target, Tensor) else target
    arguments = (logits, indices, class_weight, *options, inplace_backward)
    try:
        if return_statistics:
            check()
            loss, column, saved, _ = cross_entropy_op.dispatched(*arguments)
        else:
            loss, column, saved, _ = cross_entropy_op.checked(check, *arguments)
    except RuntimeError:
        # The CPU kernel checks the targets as it reads them, since a separate check costs as much as a small kernel.
        # If a target was the error, the next line raises it with the row and the target.
        if not options.ignore_out_of_range:
            check_target_values(name, target, logits.shape[-1], options.ignore_index)
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
    """``cross_entropy`` in plain PyTorch."""
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


def forward(logits: Tensor, target: Tensor, class_weight: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """(loss, column, saved, divisor) on CUDA."""
    options = LossOptions(*arguments[:6])
    part, column = statistics(logits, target, class_weight, 0, logits.shape[-1], *options)
    loss, saved = combine(part.unsqueeze(0), column, *options)
    loss, divisor = reduced(loss, options, column, saved)
    return loss.view(target.shape) if options.per_row else loss, column, saved, divisor


cross_entropy_op = register(
    "cross_entropy",
    outputs=outputs,
    cuda=forward,
    setup_context=setup_context,
    backward=logits_backward,
    differentiable=1,
)
