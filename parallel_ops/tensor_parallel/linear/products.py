"""Matrices of the linears and their product."""

import torch
from torch import Tensor


def matrix(t: Tensor) -> Tensor:
    """``[..., N]`` as a contiguous matrix."""
    return t.flatten(0, -2).contiguous()


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``x W^T + b``."""
    if bias is None:
        return torch.mm(x, weight.t()) if out is None else torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t()) if out is None else torch.addmm(bias, x, weight.t(), out=out)
