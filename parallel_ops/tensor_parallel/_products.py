"""Products of matrices that are added to a wider sum."""

import torch
from torch import Tensor

# CPUs have no product of 16-bit matrices with a 32-bit result, so the factors are made wider there, so many bytes of
# each at a time: large enough for a product to run at full speed, small next to weights and activations.
_WIDE_BYTES = 16 << 20
_WIDE_COLS = 8192


def add_product(total: Tensor, dz: Tensor, h: Tensor) -> None:
    """``total += dz^T h``, accumulated in the dtype of ``total``, nothing rounded on the way.

    Args:
        total: ``[N, K]``, the dtype of the factors or float32.
        dz, h: ``[rows, N]`` and ``[rows, K]``, of one dtype.
    """
    if total.dtype == dz.dtype:
        total.addmm_(dz.t(), h)
    elif dz.is_cuda:
        torch.addmm(total, dz.t(), h, out_dtype=total.dtype, out=total)
    else:
        widest = max(1, h.shape[1], min(dz.shape[1], _WIDE_COLS))
        rows = max(1, _WIDE_BYTES // (widest * total.itemsize))
        for some_dz, some_h in zip(dz.split(rows), h.split(rows), strict=True):
            wide_h = some_h.to(total.dtype)
            for part, columns in zip(total.split(_WIDE_COLS), some_dz.split(_WIDE_COLS, dim=1), strict=True):
                part.addmm_(columns.to(total.dtype).t(), wide_h)
