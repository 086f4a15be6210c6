"""Cross-entropy of logits that are sharded over the vocabulary, without a copy of the logits.

The formulas are those of ``parallel_ops/ops/cross_entropy/cross_entropy.py``, with V the global vocabulary; calls
without a group run that op.

Forward: each rank reads its logits once and computes, per row, max, sum of exp(z - max) and target logit (with
smoothing also the sum and the count of logits, with class weights also those of the target and their sum). One
all-gather sends these 12, 20 or 28 bytes a row. Every rank then combines them in rank order, so all have the same bits.
Backward: no collective; the logits are read once and the gradient is written once, rounded once.

Source: Shoeybi et al., arXiv:1909.08053 (vocabulary parallelism).
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from parallel_ops._internal.dispatch.registration import register
from parallel_ops._internal.distributed.groups import group_name, resolve_group
from parallel_ops.comm.consistency import communicates, propagate_errors
from parallel_ops.comm.primitives import gathered
from parallel_ops.ops.cross_entropy import kernels as ce_kernels
from parallel_ops.ops.cross_entropy.cross_entropy import CrossEntropyArguments, cross_entropy_impl
from parallel_ops.ops.cross_entropy.options import LossOptions, check_logits, check_reduction, reduced
from parallel_ops.tensor_parallel.loss.vocab_shards import agreed_layout

_NAME = "vocab_parallel_cross_entropy"


class VocabParallelArguments(CrossEntropyArguments, total=False):
    """Keyword arguments of ``vocab_parallel_cross_entropy``."""

    group: ProcessGroup | None


@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    return_statistics: Literal[False] = False,
    **options: Unpack[VocabParallelArguments],
) -> Tensor: ...
@overload
def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, *, return_statistics: Literal[True], **options: Unpack[VocabParallelArguments]
) -> tuple[Tensor, ce_kernels.LossStatistics]: ...
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: ProcessGroup | None = None,
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
) -> Tensor | tuple[Tensor, ce_kernels.LossStatistics]:
    """Cross-entropy of logits whose last dimension is sharded over ``group``.

    Args:
        logits: ``[..., V_r]``, float32, float16, bfloat16 or float64, any strides: this rank's part of the vocabulary,
            in rank order; shards may differ in size. Columns of -inf count as absent (padding).
        target: ``[...]``, int64 or int32: indices into the whole vocabulary, the same on every rank.
        group: the ranks that share the vocabulary; ``None`` for unsharded logits.
        class_weight: ``[V_r]``, this rank's part.
        gradient_in_forward: as in ``cross_entropy``, but only without a group.
        label_smoothing: as in ``cross_entropy``, over the whole vocabulary.
        z_loss, softcap, ignore_index, ignore_out_of_range: see ``cross_entropy``.
        reduction, inplace_backward, return_statistics: see ``cross_entropy``.

    Returns:
        The loss, a scalar, or ``[...]`` for ``reduction="none"``; float32, or float64 for float64 logits. With
        ``return_statistics`` a tuple of loss and ``LossStatistics``. All ranks get the same bits.

    Raises:
        TypeError: unsupported dtypes. ValueError: wrong shapes, devices or options, ranks that disagree on the number
            of rows or on the options, and, on CPU, a target outside the vocabulary: on every rank. On CUDA, where a
            check would synchronise with the device, rows with such a target have NaN loss and gradient.

    Sharding: logits S(-1) over group, class_weight S(0), target, loss and statistics replicated, gradient of logits
    S(-1). The incoming gradient must be the same on every rank.

    Examples:
        >>> import torch
        >>> from parallel_ops import vocab_parallel_cross_entropy
        >>> logits, target = torch.randn(32, 1000), torch.randint(1000, (32,))
        >>> loss = vocab_parallel_cross_entropy(logits, target)  # group=mesh["tp"].get_group() for shards of the logits
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(logits, target))
        True
    """
    name = group_name(_NAME, group)
    if name is None:
        return cross_entropy_impl(
            _NAME, logits, target, class_weight, label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range,
            reduction, inplace_backward, gradient_in_forward, return_statistics,
        )  # fmt: skip
    with propagate_errors(_NAME, group, logits, target, checked=True):
        check_logits(_NAME, logits, target, class_weight)
        check_reduction(_NAME, reduction)
        if gradient_in_forward:
            raise ValueError(f"{_NAME}: gradient_in_forward needs logits that are not sharded")
        options = LossOptions.checked(_NAME, label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range)
    loss, column, saved = _op(logits, target, class_weight, name, *options, inplace_backward)
    loss, _ = reduced(loss, reduction, column, ce_kernels.target_weights(saved))
    return (loss, ce_kernels.statistics_of(column, saved, target.shape)) if return_statistics else loss


@communicates
def _forward(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, group: str, label_smoothing: float, z_loss: float,
    softcap: float, ignore_index: int, ignore_out_of_range: bool, inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    process_group, wide, weighted = resolve_group(group), logits.dtype is torch.float64, class_weight is not None
    options = (label_smoothing, z_loss, softcap, wide, weighted, ignore_out_of_range)
    # With ignore_out_of_range no target is an error, and ignore_index always passes the check.
    checked = torch.full_like(target, ignore_index) if ignore_out_of_range else target
    layout = agreed_layout(_NAME, process_group, logits.shape[-1], checked, ignore_index, options)
    part, column = ce_kernels.statistics(
        logits, target.contiguous(), class_weight, layout.start, layout.vocab, ignore_index, ignore_out_of_range,
        softcap, label_smoothing != 0,
    )  # fmt: skip
    loss, saved = ce_kernels.combine(gathered(_NAME, part, process_group), column, label_smoothing, z_loss)
    return loss.view(target.shape), column, saved


def _fake(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, group: str, label_smoothing: float, *_: Any
) -> tuple[Tensor, ...]:
    accumulate, rows = ce_kernels.accumulation_dtype(logits.dtype), target.numel()
    width = ce_kernels.saved_per_row(label_smoothing != 0, class_weight is not None)
    return (
        logits.new_empty(target.shape, dtype=accumulate),
        target.new_empty(rows, dtype=torch.int64),
        logits.new_empty((width, rows), dtype=accumulate),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, class_weight, _, *options, ctx.inplace = inputs
    _, column, saved = output
    ctx.mark_non_differentiable(column, saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, class_weight, column, saved)
    ctx.options, ctx.arguments = LossOptions(*options), len(inputs)


def _autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * ctx.arguments
    logits, class_weight, column, saved = ctx.saved_tensors
    dlogits = ce_kernels.gradient(grad, logits, class_weight, column, saved, None, ctx.options, inplace=ctx.inplace)
    return dlogits, *(None,) * (ctx.arguments - 1)


_op = register(_NAME, fake=_fake, cpu=_forward, cuda=_forward, setup_context=_setup_context, backward=_autograd)
