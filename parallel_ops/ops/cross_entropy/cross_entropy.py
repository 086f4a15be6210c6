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
The forward reads the logits once, the backward reads them and writes the gradient. With ``gradient_in_forward`` the
forward also writes the gradient for an incoming gradient of 1, which saves one pass; the backward multiplies it by the
real one, and reads nothing if that is 1.

A logit of -inf marks a column as absent: it gets no gradient and is left out of the mean of smoothing. So a padded
vocabulary is masked by -inf in its padding columns (F.cross_entropy with smoothing returns inf there).

Sources: Szegedy et al., arXiv:1512.00567 (smoothing); Chowdhery et al., arXiv:2204.02311 (z-loss); Gemma Team,
arXiv:2408.00118 (softcap).
"""

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from parallel_ops.ops.cross_entropy.kernels import LossStatistics, statistics_of
from parallel_ops.ops.cross_entropy.options import (
    REDUCTIONS,
    LossArguments,
    LossOptions,
    check_logits,
    check_reduction,
)
from parallel_ops.ops.cross_entropy.whole_logits import forward, forward_with_gradient


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
        gradient_in_forward: computes the gradient in the forward pass, for ``"mean"`` and ``"sum"``: two passes over
            the logits instead of three. It is held until the backward, in a tensor of the size of the logits, or with
            ``inplace_backward`` in the logits themselves. Only one backward.
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
    check = lambda: check_logits(name, logits, target, class_weight)  # noqa: E731
    indices = target.contiguous() if isinstance(target, Tensor) else target
    arguments = (logits, indices, class_weight, *options, REDUCTIONS.index(reduction))
    try:
        if gradient_in_forward:
            check()
            loss, column, saved, *_ = forward_with_gradient(*arguments, inplace_backward, return_statistics)
        elif return_statistics:
            check()
            loss, column, saved, _ = forward.dispatched(*arguments, inplace_backward)
        else:
            loss, column, saved, _ = forward.checked(check, *arguments, inplace_backward)
    except RuntimeError:
        # The CPU kernel checks the targets as it reads them, since a separate check costs as much as a small kernel.
        # If a target was the error, the next line raises it with the row and the target.
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
