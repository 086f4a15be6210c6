"""The kernels behind every cross-entropy, on one shard of the vocabulary; the formulas are in ``cross_entropy.py``.

    statistics   per row: max, sum of exp(z - max), target logit[, sum and count of logits[, w_t, sum of w]]
    combine      the statistics of all shards, in shard order, to loss and what the gradient needs
    gradient     the gradient of this shard's logits, in a new tensor or over the logits

The ops of logits, whole or sharded, share ``outputs``, ``setup_context`` and ``logits_backward``.

``column`` holds each row's target as a column of this shard, or a constant of ``options.py``. Saved for backward are,
per row, max, log of the sum of exponentials and target logit[, count of logits[, w_t, sum of w]].
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.registration import register
from parallel_ops.ops.cross_entropy.options import COLUMN_IGNORED, ON_ANOTHER_SHARD, REDUCTIONS, LossOptions

# torch sums a longer CPU tensor in as many pieces as it has threads, which would set the bits of the result.
_ONE_PIECE = 32768


class LossStatistics(NamedTuple):
    """Values of each row of logits beside its loss. No gradient flows through them.

    logsumexp: ``[...]``, of the logits after softcap, in the dtype of the loss.
    correct: ``[...]``, bool: the target has the largest logit. False where the target is ignored.

    Examples:
        >>> import torch
        >>> from parallel_ops import cross_entropy
        >>> logits, target = torch.eye(4), torch.tensor([0, 1, 2, 0])
        >>> loss, statistics = cross_entropy(logits, target, return_statistics=True)
        >>> statistics.correct
        tensor([ True,  True,  True, False])
    """

    logsumexp: Tensor
    correct: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and loss: float32, or float64 for float64 logits."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def statistics_per_row(smoothing: bool, weighted: bool = False) -> int:
    return 7 if weighted else 5 if smoothing else 3


def saved_per_row(smoothing: bool, weighted: bool = False) -> int:
    """Maximum, log of the sum of exponentials and target logit[, count of logits[, weight of the target, of all]]."""
    return 6 if weighted else 4 if smoothing else 3


def empty_outputs(
    like: Tensor, target: Tensor, class_weight: Tensor | None, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised (loss, column, saved, divisor) of logits that are like ``like``."""
    dtype, rows = accumulation_dtype(like.dtype), target.numel()
    width = saved_per_row(options.label_smoothing != 0.0, class_weight is not None)
    return (
        like.new_empty(target.shape if options.per_row else (), dtype=dtype),
        target.new_empty(rows, dtype=torch.int64),
        like.new_empty((width, rows), dtype=dtype),
        like.new_empty((), dtype=dtype),
    )


def statistics_of(column: Tensor, saved: Tensor, shape: torch.Size) -> LossStatistics:
    largest, log_exps, at_target = saved.detach()[:3]
    correct = (at_target == largest) & (column >= ON_ANOTHER_SHARD)
    return LossStatistics((largest + log_exps).view(shape), correct.view(shape))


def reduced(loss: Tensor, options: LossOptions, column: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
    """Per-row losses reduced, and the divisor of their sum, a scalar that is not 0; nothing waits for a device.

    A mean divides by the number of rows that count, or by the sum of their targets' class weights.
    """
    if REDUCTIONS[options.reduction] != "mean":
        return loss if options.per_row else sum_in_pieces(loss), loss.new_ones(())
    if saved.shape[0] == saved_per_row(True, True):
        weights = sum_in_pieces(saved[4])
        divisor = torch.where(weights == 0, 1.0, weights)
    else:
        divisor = (column != COLUMN_IGNORED).sum().clamp(min=1).to(loss.dtype)
    return sum_in_pieces(loss) / divisor, divisor


def sum_in_pieces(t: Tensor) -> Tensor:
    """The sum of all elements with the same bits at any thread count."""
    while t.is_cpu and t.numel() > _ONE_PIECE:
        t = torch.nn.functional.pad(t.flatten(), (0, -t.numel() % 1024)).view(-1, 1024).sum(1)
    return t.sum()


def gradient(
    grad: Tensor, logits: Tensor, class_weight: Tensor | None, column: Tensor, saved: Tensor, divisor: Tensor | None,
    options: LossOptions, *, inplace: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the logits, written over them if requested and possible.

    ``grad`` is one for each row, or with a divisor one for all, to be divided by it.
    """
    over = inplace and logits.is_contiguous() and _is_memory(logits)
    out = logits.detach() if over else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    backward(grad, logits, class_weight, column, saved, divisor, *options, out)
    if over:
        torch.autograd.graph.increment_version(logits)
    return out


def _is_memory(t: Tensor) -> bool:
    """False while a compiler traces, which decides about memory itself and refuses writes to a leaf.

    Its tensors are of a subclass; torch.compiler.is_compiling() is no sign of it in an autograd formula in torch 2.11.
    """
    return type(t) in (Tensor, torch.nn.Parameter)


def outputs(logits: Tensor, target: Tensor, class_weight: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    return empty_outputs(logits, target, class_weight, LossOptions(*arguments[:6]))


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Formula of every op of logits: inputs begin with logits, target, class_weight, the options, inplace_backward."""
    logits, _, class_weight, *arguments = inputs
    _, column, saved, divisor = output
    ctx.mark_non_differentiable(column, saved, divisor)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, class_weight, column, saved, divisor)
    ctx.options, ctx.inplace, ctx.arguments = LossOptions(*arguments[:6]), arguments[6], len(inputs)


def logits_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * ctx.arguments
    logits, class_weight, column, saved, divisor = ctx.saved_tensors
    divisor = None if ctx.options.per_row else divisor
    dlogits = gradient(grad, logits, class_weight, column, saved, divisor, ctx.options, inplace=ctx.inplace)
    return dlogits, *(None,) * (ctx.arguments - 1)


def statistics_outputs(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, start: int, vocab: int, *options: Any
) -> tuple[Tensor, Tensor]:
    width = statistics_per_row(LossOptions(*options).label_smoothing != 0.0, class_weight is not None)
    out = logits.new_empty((width, target.numel()), dtype=accumulation_dtype(logits.dtype))
    return out, target.new_empty(target.numel(), dtype=torch.int64)


def launch_statistics(
    outputs: tuple[Tensor, Tensor], logits: Tensor, target: Tensor, class_weight: Tensor | None, start: int,
    vocab: int, *arguments: Any,
) -> None:  # fmt: skip
    from parallel_ops.triton_kernels.cross_entropy import cross_entropy as kernels

    options = LossOptions(*arguments)
    kernels.statistics(
        logits, target, class_weight, *outputs, start=start, vocab=vocab, ignore_index=options.ignore_index,
        ignore_out_of_range=options.ignore_out_of_range, softcap=options.softcap,
    )  # fmt: skip


def combine_outputs(statistics: Tensor, column: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    rows, width = column.shape[0], statistics.shape[1]
    return statistics.new_empty(rows), statistics.new_empty((saved_per_row(width > 3, width > 5), rows))


def launch_combine(outputs: tuple[Tensor, Tensor], statistics: Tensor, column: Tensor, *arguments: Any) -> None:
    from parallel_ops.triton_kernels.cross_entropy import cross_entropy as kernels

    options = LossOptions(*arguments)
    kernels.combine(statistics, column, *outputs, label_smoothing=options.label_smoothing, z_loss=options.z_loss)


def launch_backward(
    grad: Tensor, logits: Tensor, class_weight: Tensor | None, column: Tensor, saved: Tensor, divisor: Tensor | None,
    *arguments: Any,
) -> None:  # fmt: skip
    from parallel_ops.triton_kernels.cross_entropy import cross_entropy as kernels

    *given, out = arguments
    options = LossOptions(*given)
    by_row = grad if divisor is None else (grad / divisor).expand(column.shape)
    kernels.backward(
        by_row, logits, class_weight, column, saved, out,
        label_smoothing=options.label_smoothing, z_loss=options.z_loss, softcap=options.softcap,
    )  # fmt: skip


statistics = register("cross_entropy_statistics", outputs=statistics_outputs, launch=launch_statistics)
combine = register("cross_entropy_combine", outputs=combine_outputs, launch=launch_combine)
backward = register("cross_entropy_backward", cuda=launch_backward)
