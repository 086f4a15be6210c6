"""Products of matrices that are added to a wider sum."""

import torch
from torch import Tensor

# CPUs have no product of 16-bit matrices with a 32-bit result, so the factors are made wider there, so many bytes of
# each at a time: large enough for a product to run at full speed, small next to weights and activations.
_WIDE_BYTES = 16 << 20
_COLS = 8192


def add_product(total: Tensor, dz: Tensor, h: Tensor, *, rounded: bool = False) -> None:
    """``total += dz^T h``, accumulated in the dtype of ``total``.

    Args:
        total: ``[N, K]``, the dtype of the factors or float32.
        dz, h: ``[rows, N]`` and ``[rows, K]``, of one dtype.
        rounded: on a CPU the product of bfloat16 factors may be rounded to bfloat16 before it is added: twice as fast
            where the CPU has units for it. Otherwise nothing is rounded on the way.
    """
    if total.dtype == dz.dtype:
        total.addmm_(dz.t(), h)
    elif dz.is_cuda:
        torch.addmm(total, dz.t(), h, out_dtype=total.dtype, out=total)
    elif rounded and dz.dtype is torch.bfloat16:
        for part, columns in zip(total.split(_COLS), dz.split(_COLS, dim=1), strict=True):
            part.add_(columns.t() @ h)
    else:
        widest = max(1, h.shape[1], min(dz.shape[1], _COLS))
        rows = max(1, _WIDE_BYTES // (widest * total.itemsize))
        for some_dz, some_h in zip(dz.split(rows), h.split(rows), strict=True):
            wide_h = some_h.to(total.dtype)
            for part, columns in zip(total.split(_COLS), some_dz.split(_COLS, dim=1), strict=True):
                part.addmm_(columns.to(total.dtype).t(), wide_h)
