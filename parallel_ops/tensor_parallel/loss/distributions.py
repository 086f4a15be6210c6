"""The parts that losses of distributions share: rows of logits, their log-probabilities, entropy and gradients."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.gradients.split_backward import check_memory, requested
from parallel_ops.comm.primitives import gathered
from parallel_ops.ops.cross_entropy import kernels
from parallel_ops.ops.cross_entropy.options import COLUMN_IGNORED
from parallel_ops.tensor_parallel.loss.logit_chunks import blocks_of


def check_temperature(op: str, temperature: float) -> None:
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"{op}: temperature must be a finite number above 0, got {temperature}")


def row_entropy(z: Tensor, saved: Tensor) -> Tensor:
    """``- sum_j p_j log p_j`` of each row over the columns of this shard."""
    out = saved.new_empty(z.shape[0])
    for rows in blocks_of(z):
        p = log_softmax(z[rows], saved[:, rows])
        out[rows] = row_sums(torch.special.entr(p.exp_(), out=p))
    return out


def log_softmax(z: Tensor, saved: Tensor) -> Tensor:
    """The log-probabilities of rows, in the dtype of ``saved``: their maximum, log of the sum of exponentials, ..."""
    return z.to(saved.dtype).sub(saved[0].unsqueeze(1)).sub_(saved[1].unsqueeze(1))


def row_sums(t: Tensor) -> Tensor:
    """Sums of rows with the same bits at any thread count: torch cuts a single row into pieces, one a thread."""
    if t.is_cpu and t.shape[0] == 1:
        return kernels.sum_in_pieces(t).view(1)
    return t.sum(1)


def sum_of_shards(op: str, part: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sums over the columns of all ranks, of the sums over this rank's, in rank order."""
    return part if group is None else gathered(op, part, group).sum(0)


def write_gradient_(z: Tensor, column: Tensor, saved: Tensor, grad: Tensor, grad_entropy: Tensor) -> None:
    """Writes the gradient of log-probability and entropy over the logits, rounded once."""
    here, used = column >= 0, column != COLUMN_IGNORED
    for rows in blocks_of(z):
        log_p = log_softmax(z[rows], saved[:, rows])
        p = log_p.exp()
        # Absent columns have p = 0 and log p = -inf, whose product must be 0.
        log_p.clamp_(min=-1e4).add_(saved[3, rows].unsqueeze(1)).mul_(grad_entropy[rows].unsqueeze(1))
        dz = log_p.add_(grad[rows].unsqueeze(1)).mul_(p).neg_()
        at = column[rows].clamp(min=0).unsqueeze(1)
        if dz.shape[1]:
            dz.scatter_(1, at, dz.gather(1, at) + torch.where(here[rows], grad[rows], 0.0).unsqueeze(1))
        z[rows] = torch.where(used[rows].unsqueeze(1), dz, 0.0).to(z.dtype)


def rounded_gradients(
    op: str, ctx: Any, weight: Tensor, compute: Callable[[list[bool]], tuple[Tensor, ...]]
) -> list[Tensor | None]:
    """The gradients of hidden, weight and bias that the running backward needs, of those that ``compute`` returns."""
    needs = requested(ctx)[:3]
    if not needs[0]:
        check_memory(op, "weight", weight)
    return [g.to(weight.dtype) if need else None for g, need in zip(compute(needs), needs, strict=True)]


def flops_of_backward(grad: Tensor, hidden: Tensor, weight: Tensor, *arguments: Any) -> int:
    """FLOPs of the logits again, and of the gradients that ``arguments`` ends with."""
    return (1 + sum(arguments[-1][:2])) * 2 * grad.numel() * weight.numel()
