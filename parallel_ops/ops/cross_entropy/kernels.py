"""The kernels behind every cross-entropy, on one shard of the vocabulary; the formulas are in ``cross_entropy.py``.

    statistics   per row: max, sum of exp(z - max), target logit[, sum and count of logits[, w_t, sum of w]]
    combine      the statistics of all shards, in shard order, to loss and what the gradient needs
    backward     the gradient of this shard's logits, in a new tensor or over the logits

``column`` holds each row's target as a column of this shard, or a constant of ``options.py``. Saved for backward are,
per row, max, log of the sum of exponentials and target logit[, count of logits[, w_t, sum of w]].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.registration import register
from parallel_ops.ops.cross_entropy.options import ON_ANOTHER_SHARD, LossOptions


class LossStatistics(NamedTuple):
    """Values of each row of logits beside its loss. No gradient flows through them.

    logsumexp: ``[...]``, of the logits after softcap, in the dtype of the loss.
    correct: ``[...]``, bool: the target has the largest logit. False where the target is ignored.
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


def target_weights(saved: Tensor) -> Tensor | None:
    """The class weight of each row's target."""
    return saved[4] if saved.shape[0] == saved_per_row(True, True) else None


def statistics_of(column: Tensor, saved: Tensor, shape: torch.Size) -> LossStatistics:
    largest, log_exps, at_target = saved.detach()[:3]
    correct = (at_target == largest) & (column >= ON_ANOTHER_SHARD)
    return LossStatistics((largest + log_exps).view(shape), correct.view(shape))


def gradient(
    grad: Tensor, logits: Tensor, class_weight: Tensor | None, column: Tensor, saved: Tensor, divisor: Tensor | None,
    options: LossOptions, *, inplace: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the logits, written over them if requested and possible.

    ``grad`` is one for each row, or with a divisor one for all, to be divided by it.
    """
    if not (inplace and logits.is_contiguous() and is_memory(logits)):
        dlogits: Tensor = backward(
            grad, logits, class_weight, column, saved, divisor, options.label_smoothing, options.z_loss, options.softcap
        )
        return dlogits
    dlogits = logits.detach()
    gradient_inplace(grad, dlogits, class_weight, column, saved, divisor, options)
    torch.autograd.graph.increment_version(logits)
    return dlogits


def gradient_inplace(
    grad: Tensor, logits: Tensor, class_weight: Tensor | None, column: Tensor, saved: Tensor, divisor: Tensor | None,
    options: LossOptions,
) -> None:  # fmt: skip
    """Writes the gradient of the logits over them; ``grad`` and ``divisor`` as in ``gradient``."""
    backward_inplace(
        grad, logits, class_weight, column, saved, divisor, options.label_smoothing, options.z_loss, options.softcap
    )


def is_memory(t: Tensor) -> bool:
    """Not while a compiler traces, which decides about memory itself and refuses writes to a leaf.

    Its tensors are of a subclass; torch.compiler.is_compiling() is no sign of it in an autograd formula in torch 2.11.
    """
    return type(t) in (Tensor, torch.nn.Parameter)


def _fake_statistics(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, start: int, vocab: int, ignore_index: int,
    ignore_out_of_range: bool, softcap: float, smoothing: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    width = statistics_per_row(smoothing, class_weight is not None)
    out = logits.new_empty((width, target.numel()), dtype=accumulation_dtype(logits.dtype))
    return out, target.new_empty(target.numel(), dtype=torch.int64)


def statistics_on_cuda(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, start: int, vocab: int, ignore_index: int,
    ignore_out_of_range: bool, softcap: float, smoothing: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from parallel_ops.triton_kernels.cross_entropy import cross_entropy as kernels

    outputs = _fake_statistics(
        logits, target, class_weight, start, vocab, ignore_index, ignore_out_of_range, softcap, smoothing
    )
    kernels.statistics(
        logits, target, class_weight, *outputs,
        start=start, vocab=vocab, ignore_index=ignore_index, ignore_out_of_range=ignore_out_of_range, softcap=softcap,
    )  # fmt: skip
    return outputs


def _fake_combine(statistics: Tensor, column: Tensor, label_smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    rows, width = column.shape[0], statistics.shape[1]
    return statistics.new_empty(rows), statistics.new_empty((saved_per_row(width > 3, width > 5), rows))


def combine_on_cuda(statistics: Tensor, column: Tensor, label_smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    from parallel_ops.triton_kernels.cross_entropy import cross_entropy as kernels

    loss, saved = _fake_combine(statistics, column, label_smoothing, z_loss)
    kernels.combine(statistics, column, loss, saved, label_smoothing=label_smoothing, z_loss=z_loss)
    return loss, saved


def _fake_gradient(grad: Tensor, logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


def _cuda_gradient(
    grad: Tensor, logits: Tensor, class_weight: Tensor | None, column: Tensor, saved: Tensor, divisor: Tensor | None,
    label_smoothing: float, z_loss: float, softcap: float,
) -> Tensor:  # fmt: skip
    from parallel_ops.triton_kernels.cross_entropy import cross_entropy as kernels

    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap}
    kernels.backward(_by_row(grad, divisor, column), logits, class_weight, column, saved, out, **options)
    return out


def _cuda_gradient_inplace(
    grad: Tensor, logits: Tensor, class_weight: Tensor | None, column: Tensor, saved: Tensor, divisor: Tensor | None,
    label_smoothing: float, z_loss: float, softcap: float,
) -> None:  # fmt: skip
    from parallel_ops.triton_kernels.cross_entropy import cross_entropy as kernels

    options = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap}
    kernels.backward(_by_row(grad, divisor, column), logits, class_weight, column, saved, logits, **options)


def _by_row(grad: Tensor, divisor: Tensor | None, column: Tensor) -> Tensor:
    return grad if divisor is None else (grad / divisor).expand(column.shape)


statistics = register("cross_entropy_statistics", fake=_fake_statistics, cuda=statistics_on_cuda)
combine = register("cross_entropy_combine", fake=_fake_combine, cuda=combine_on_cuda)
backward = register("cross_entropy_backward", fake=_fake_gradient, cuda=_cuda_gradient)
backward_inplace = register("cross_entropy_backward_", cuda=_cuda_gradient_inplace)
