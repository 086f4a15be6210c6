"""Angles for rotary embeddings."""

import torch
from torch import Tensor


def angles(positions: int, half: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """cos and sin as models have them: base 10,000, computed in fp64."""
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / max(1, half))
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return [t.to(device, dtype) for t in (angle.cos(), angle.sin())]
