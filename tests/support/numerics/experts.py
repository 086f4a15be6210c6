"""Logits without ties, and orders of tokens by expert."""

import torch
from torch import Tensor


def spread_logits(t: int, n: int, *, dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> Tensor:
    """Logits whose experts are chosen alike in any precision: each row is a permutation of n numbers far apart.

    The numbers are exact in ``dtype``, for up to 256 experts in bfloat16.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(n, generator=generator) for _ in range(t)]
    steps = torch.stack(rows) if rows else torch.zeros(0, n)
    return ((steps - n // 2) * min(0.25, 16 / n)).to(device, dtype).requires_grad_()


def random_experts(t: int, k: int, n: int, *, seed: int = 0, absent: bool = False, device: str = "cpu") -> Tensor:
    """The experts that tokens chose, not all different; with ``absent`` also -1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1 if absent else 0, n, (t, k), generator=generator).to(device)
