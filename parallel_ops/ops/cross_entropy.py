"""Cross-entropy over one shard of the vocabulary: the local kernels of ``vocab_parallel_cross_entropy``.

    statistics   per row: max, sum of exp(z - max), target logit[, sum of logits, count of logits]
    combine      the statistics of all shards, in shard order, to loss and what the gradient needs
    backward     the gradient of this shard's logits, in a new tensor or over the logits

``column`` says where each row's target is: a column of this shard, or one of the constants below. The formulas are in
``parallel_ops/tensor_parallel/cross_entropy.py``, which calls these; they know nothing of process groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_ops.ops._registration import register

ON_ANOTHER_SHARD, IGNORED, INVALID = -1, -2, -3


def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """``vocab_parallel_cross_entropy`` on unsharded logits in plain PyTorch."""
    z = logits.flatten(0, -2) if logits.dim() > 1 else logits.unsqueeze(0)
    z = z.float() if logits.dtype in (torch.bfloat16, torch.float16) else z
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    target = target.flatten().long()
    loss = F.cross_entropy(z, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    kept = target != ignore_index
    if z_loss:
        loss = loss + torch.where(kept, z_loss * z.logsumexp(-1).square(), 0.0)
    if reduction == "none":
        return loss.view(logits.shape[:-1])
    return loss.sum() / kept.sum().clamp(min=1) if reduction == "mean" else loss.sum()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and loss: float32, or float64 for float64 logits."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def statistics_per_row(smoothing: bool) -> int:
    return 5 if smoothing else 3


def _fake_statistics(
    logits: Tensor, target: Tensor, start: int, vocab: int, ignore_index: int, softcap: float, smoothing: bool
) -> tuple[Tensor, Tensor]:
    rows = target.numel()
    statistics = logits.new_empty((statistics_per_row(smoothing), rows), dtype=accumulation_dtype(logits.dtype))
    return statistics, target.new_empty(rows, dtype=torch.int64)


def _fake_combine(statistics: Tensor, column: Tensor, label_smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    rows = column.shape[0]
    return statistics.new_empty(rows), statistics.new_empty((3 if label_smoothing else 2, rows))


def _fake_backward(grad: Tensor, logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


def _fake_backward_inplace(grad: Tensor, logits: Tensor, *_: object) -> None:
    return None


def _cuda_statistics(
    logits: Tensor, target: Tensor, start: int, vocab: int, ignore_index: int, softcap: float, smoothing: bool
) -> tuple[Tensor, Tensor]:
    from parallel_ops.triton_kernels import cross_entropy as kernels

    outputs = _fake_statistics(logits, target, start, vocab, ignore_index, softcap, smoothing)
    kernels.statistics(logits, target, *outputs, start=start, vocab=vocab, ignore_index=ignore_index, softcap=softcap)
    return outputs


def _cuda_combine(statistics: Tensor, column: Tensor, label_smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    from parallel_ops.triton_kernels import cross_entropy as kernels

    loss, saved = _fake_combine(statistics, column, label_smoothing, z_loss)
    kernels.combine(statistics, column, loss, saved, label_smoothing=label_smoothing, z_loss=z_loss)
    return loss, saved


def _cuda_backward(
    grad: Tensor,
    logits: Tensor,
    column: Tensor,
    saved: Tensor,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    from parallel_ops.triton_kernels import cross_entropy as kernels

    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap}
    kernels.backward(grad, logits, column, saved, out, **options)
    return out


def _cuda_backward_inplace(
    grad: Tensor,
    logits: Tensor,
    column: Tensor,
    saved: Tensor,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> None:
    from parallel_ops.triton_kernels import cross_entropy as kernels

    options = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap}
    kernels.backward(grad, logits, column, saved, logits, **options)


statistics = register("cross_entropy_statistics", fake=_fake_statistics, cuda=_cuda_statistics)
combine = register("cross_entropy_combine", fake=_fake_combine, cuda=_cuda_combine)
backward = register("cross_entropy_backward", fake=_fake_backward, cuda=_cuda_backward)
backward_inplace = register("cross_entropy_backward_", fake=_fake_backward_inplace, cuda=_cuda_backward_inplace)
