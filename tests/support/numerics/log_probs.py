"""What each rank does in the tests of log-probabilities and distillation over a sharded vocabulary."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_ops import vocab_parallel_linear_kl_divergence, vocab_parallel_linear_log_probs


def split(t: Tensor | None, sizes: list[int], rank: int, dim: int = 0) -> Any:
    return None if t is None else t.detach().split(sizes, dim=dim)[rank].clone()


def log_probs(
    rank: int, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, grads: list[Tensor | None],
    sizes: list[int], options: dict[str, Any],
) -> list[Any]:  # fmt: skip
    """(log_probs, entropy, gradients of hidden, of this rank's weight and bias)."""
    w, b = split(weight, sizes, rank).requires_grad_(), split(bias, sizes, rank)
    if b is not None:
        b.requires_grad_()
    h = hidden.detach()
    if options.get("sequence_parallel"):
        h = h.chunk(len(sizes))[rank]
    h = h.clone().requires_grad_()
    result = vocab_parallel_linear_log_probs(h, w, tokens, bias=b, group=dist.group.WORLD, **options)
    terms = [(value * g).sum() for value, g in zip(result, grads, strict=True) if g is not None and value is not None]
    sum(terms).backward()
    return [*(None if v is None else v.detach() for v in result), h.grad, w.grad, None if b is None else b.grad]


def kl_divergence(
    rank: int, hidden: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor | None, grad: Tensor,
    sizes: list[int], options: dict[str, Any],
) -> list[Tensor]:  # fmt: skip
    """(loss, gradients of hidden and of this rank's weight)."""
    h, w = hidden.detach().clone().requires_grad_(), split(weight, sizes, rank).requires_grad_()
    of_teacher = split(teacher, sizes, rank, -1) if teacher_weight is None else teacher
    loss = vocab_parallel_linear_kl_divergence(
        h, w, of_teacher, teacher_weight=split(teacher_weight, sizes, rank), group=dist.group.WORLD, **options
    )
    loss.backward(grad)
    return [loss.detach(), h.grad, w.grad]


def differing(rank: int, op: str) -> Tensor:
    """Ranks that disagree on the temperature."""
    hidden, weight, options = torch.randn(3, 4), torch.randn(5, 4), {"temperature": 1.0 + rank}
    if op == "log_probs":
        tokens = torch.zeros(3, dtype=torch.long)
        return vocab_parallel_linear_log_probs(hidden, weight, tokens, group=dist.group.WORLD, **options).log_probs
    return vocab_parallel_linear_kl_divergence(hidden, weight, torch.randn(3, 5), group=dist.group.WORLD, **options)


def wrong_token(rank: int, bad_rank: int) -> Tensor:
    tokens = torch.tensor([0, 1, 10 if rank == bad_rank else 2])
    return vocab_parallel_linear_log_probs(
        torch.randn(3, 4), torch.randn(5, 4), tokens, group=dist.group.WORLD
    ).log_probs  # fmt: skip
