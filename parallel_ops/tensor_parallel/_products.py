"""Products of matrices that are added to a wider sum."""

import torch
from torch import Tensor

# Columns of a 16-bit weight gradient that are computed at a time before they are added to the fp32 sum (CPU).
_WGRAD_COLS = 8192


def add_product(total: Tensor, dz: Tensor, h: Tensor) -> None:
    """``total += dz^T h``, accumulated in the dtype of ``total``."""
    if total.dtype == dz.dtype:
        total.addmm_(dz.t(), h)
    elif dz.is_cuda:
        torch.addmm(total, dz.t(), h, out_dtype=total.dtype, out=total)
    else:
        for first in range(0, dz.shape[1], _WGRAD_COLS):
            total[first : first + _WGRAD_COLS] += dz[:, first : first + _WGRAD_COLS].t() @ h
