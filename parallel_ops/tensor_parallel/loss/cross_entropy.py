"""Cross-entropy of logits that are sharded over the vocabulary, without a copy of the logits.

The formulas are those of ``parallel_ops/ops/cross_entropy/cross_entropy.py``, with V the global vocabulary; calls
without a group run that op.

Forward: each rank reads its logits once and computes, per row, max, sum of exp(z - max) and target logit (with
smoothing also the sum and the count of logits, with class weights also those of the target and their sum). One
all-gather sends these 12, 20 or 28 bytes a row. Every rank then combines them in rank order, so all have the same bits.
Backward: no collective; the logits are read once and the gradient is written once, rounded once.

A rank needs the start of its shard to find its targets. So the consistency check of the call (rows and options) also
exchanges the sizes of the shards and, on CPU, the target that is furthest outside any vocabulary. On CUDA, where a call
of a known kind is not compared again, the layout is cached by the size of this rank's shard. If a shard changes its
size later on some ranks of the group only, the others do not notice: use another group for it.

Source: Shoeybi et al., arXiv:1909.08053 (vocabulary parallelism).
"""

import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from parallel_ops._internal.dispatch.registration import register
from parallel_ops._internal.distributed.compat import resolve_group
from parallel_ops._internal.distributed.groups import group_name
from parallel_ops.comm.consistency import CallSignature, check_consistency, communicates, propagate_errors, shared_error
from parallel_ops.comm.primitives import gathered
from parallel_ops.ops.cross_entropy import kernels
from parallel_ops.ops.cross_entropy.cross_entropy import (
    CrossEntropyArguments,
    cross_entropy_impl,
    cross_entropy_op,
)
from parallel_ops.ops.cross_entropy.options import NONE, LossOptions, check_logits

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
) -> tuple[Tensor, kernels.LossStatistics]: ...
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
    return_statistics: bool = False,
) -> Tensor | tuple[Tensor, kernels.LossStatistics]:
    """Cross-entropy of logits whose last dimension is sharded over ``group``.

    Args:
        logits: ``[..., V_r]``, float32, float16, bfloat16 or float64, any strides: this rank's part of the vocabulary,
            in rank order; shards may differ in size. Columns of -inf count as absent (padding).
        target: ``[...]``, int64 or int32: indices into the whole vocabulary, the same on every rank.
        group: the ranks that share the vocabulary; ``None`` for unsharded logits.
        class_weight: ``[V_r]``, this rank's part.
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
    with propagate_errors(_NAME, None if name is None else group, logits, target, checked=True):
        options = LossOptions.checked(
            _NAME, label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range, reduction
        )
        if name is None:
            return cross_entropy_impl(
                _NAME, logits, target, class_weight, options, inplace_backward, return_statistics
            )  # fmt: skip
        check_logits(_NAME, logits, target, class_weight)
    call = _op.dispatched if return_statistics else _op
    loss, column, saved, _ = call(logits, target, class_weight, *options, inplace_backward, name)
    return (loss, kernels.statistics_of(column, saved, target.shape)) if return_statistics else loss


@communicates
def forward(logits: Tensor, target: Tensor, class_weight: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    options, group = LossOptions(*arguments[:6]), resolve_group(arguments[7])
    kind = (logits.dtype is torch.float64, class_weight is not None)
    layout = agreed_layout(_NAME, group, logits.shape[-1], target, options, kind)
    loss, column, saved = row_losses(_NAME, logits, target.contiguous(), class_weight, options, group, layout)
    loss, divisor = kernels.reduced(loss, options, column, saved)
    if options.per_row:  # autograd lets nobody write to a view that a function returns
        loss = torch.ops.aten._unsafe_view.default(loss, target.shape)
    return loss, column, saved, divisor


_op = register(
    _NAME, outputs=kernels.outputs, cpu=forward, cuda=forward, setup_context=kernels.setup_context,
    backward=kernels.logits_backward, differentiable=1,
)  # fmt: skip


def row_losses(
    op: str, logits: Tensor, target: Tensor, class_weight: Tensor | None, options: LossOptions,
    group: ProcessGroup | None, layout: "Layout | None",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, column, saved) of each row, without gradients; over a group one all-gather, else of whole logits."""
    if group is None or layout is None:
        options = options._replace(reduction=NONE)
        loss, column, saved, _ = cross_entropy_op(logits, target, class_weight, *options, False)
        return loss, column, saved
    part, column = kernels.statistics(logits, target, class_weight, layout.start, layout.vocab, *options)
    loss, saved = kernels.combine(gathered(op, part, group), column, *options)
    return loss, column, saved


class Layout(NamedTuple):
    """How a group shards a vocabulary."""

    start: int  # first column of this rank's shard
    vocab: int  # size of the whole vocabulary
    widest: int  # size of the largest shard


_NONE = (-1, 0)

# By group and size of this rank's shard: a model may have several vocabularies.
_layouts: weakref.WeakKeyDictionary[ProcessGroup, dict[int, Layout]] = weakref.WeakKeyDictionary()


def known_layout(group: ProcessGroup, cols: int) -> Layout:
    """The layout found by the forward for this rank's shard of ``cols`` columns."""
    return _layouts[group][cols]


def agreed_layout(
    op: str, group: ProcessGroup, cols: int, target: Tensor, options: LossOptions, kind: tuple[object, ...]
) -> Layout:
    """The layout of the group for this rank's shard of ``cols`` columns.

    Args:
        kind: compared between the ranks, like the options and the number of rows.

    Raises:
        ValueError: on every rank, where they make different calls or, on CPU, a target is outside the vocabulary (on
            CUDA the loss of such a row is NaN instead).
    """
    checked = target.device.type == "cpu" and not options.ignore_out_of_range
    furthest = _furthest(target, options.ignore_index) if checked else _NONE
    layouts, same = _layouts.setdefault(group, {}), (target.numel(), *options, *kind)
    call = CallSignature(op, same, f"{same[0]} rows, options {same[1:]}", (cols, *furthest))
    answers = check_consistency(group, call, target.device, known=cols in layouts)
    if answers is not None:
        sizes = [size for size, *_ in answers]
        vocab = sum(sizes)
        layouts[cols] = Layout(sum(sizes[: group.rank()]), vocab, max(sizes))
        for rank, (_, row, value) in enumerate(answers):
            if row >= 0 and not 0 <= value < vocab:
                bad = f"target {value} in row {row} (on rank {rank}) is outside the vocabulary [0, {vocab})"
                raise shared_error(group, f"{op}: {bad} and is not ignore_index")
    return layouts[cols]


def _furthest(target: Tensor, ignore_index: int) -> Sequence[int]:
    """``(row, target)`` of a negative target, or else of the largest one; ``_NONE`` if all are ignored."""
    flat = target.flatten().long()
    # Negative targets rank above all others.
    size = torch.where(flat < 0, torch.iinfo(torch.int64).max, flat).masked_fill(flat == ignore_index, -1)
    row = int(size.argmax()) if size.numel() else -1
    return _NONE if row < 0 or size[row] < 0 else (row, int(flat[row]))
