"""What an optimiser's step needs to know of parameters that are sharded over a group."""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_ops.comm import reduce_from_group
from parallel_ops.layers._sharding import sharded_parameters


@torch.no_grad()
def clip_grad_norm(module: nn.Module, max_norm: float, group: ProcessGroup | None) -> Tensor:
    """Scales all gradients of ``module`` so that their norm together is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, of the whole model: parts of sharded parameters count on their rank, and
    parameters that are whole on every rank count once. Every rank of ``group`` must call it; all scale alike. What is
    in a ``main_grad`` or still deferred is neither counted nor scaled.

    Returns:
        The norm before, a float32 scalar (float64 for float64 gradients), the same on every rank.

    Raises:
        ValueError: ``max_norm`` that is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm: max_norm must be positive, got {max_norm}")
    parts = {id(p) for p in sharded_parameters(module)}
    split: list[Tensor] = []
    whole: list[Tensor] = []
    for parameter in module.parameters():
        if parameter.grad is not None:
            (split if id(parameter) in parts else whole).append(parameter.grad)
    device = next(module.parameters()).device
    norm = (reduce_from_group(_square(split, device), group) + _square(whole, device)).sqrt()
    if split or whole:  # the constant is torch's own
        torch._foreach_mul_([*split, *whole], (max_norm / (norm + 1e-6)).clamp(max=1.0).to(device))
    return norm


def _square(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The sum of all squares."""
    wide = torch.float64 if any(g.dtype is torch.float64 for g in gradients) else torch.float32
    if not gradients:
        return torch.zeros((), dtype=wide, device=device)
    # In 16 bits the norm of one parameter alone would overflow or lose its digits.
    return torch.stack([n.to(wide) for n in torch._foreach_norm(gradients, 2, wide)]).square().sum()
