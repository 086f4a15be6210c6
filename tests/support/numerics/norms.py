"""Cases that layer_norm and rms_norm share."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from support.numerics.suite import randn


def with_residual(f: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """``f`` with the residual as its second positional argument, where the suite differentiates it; None is none."""

    @functools.wraps(f)
    def call(x: Tensor, residual: Tensor | None, *params: Tensor | None) -> Any:
        return f(x, *params, residual=residual, **kwargs)

    return call


def stream(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0, scale: float = 1.0, mean: float = 0.0):
    """A residual stream's values: every row has its own mean and scale, as activations have."""
    x = randn(*shape, dtype=torch.float32, device=device, seed=seed, scale=scale).detach()
    rows = randn(*shape[:-1], 1, dtype=torch.float32, device=device, seed=seed + 100).detach()
    return (x * (1 + rows.abs()) + mean * rows).to(dtype).requires_grad_()


def grads(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 2) -> list[Tensor]:
    """Different gradients for y and for the sum, so that one taken for the other is seen."""
    return [randn(*shape, dtype=dtype, device=device, seed=seed + i).detach() for i in range(2)]
