"""Cases that layer_norm and rms_norm share."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_ops import layer_norm
from support.numerics import suite
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


def check_kernels(op: Callable[..., Any], reference: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype):
    """With and without a residual, of dtypes that differ, and of a transposed ``x``."""

    def check(args: list[Tensor | None], gradients: list[Tensor] | None, *, zero_centered: bool = False) -> None:
        ours, theirs = (with_residual(f, zero_centered=zero_centered) for f in (op, reference))
        suite.check_numerics(ours, theirs, args, gradients, slack_ulps=2)

    x, r = (stream(*shape, dtype=dtype, seed=i) for i in (0, 1))
    weight, *bias = [randn(shape[-1], dtype=dtype, seed=2 + i) for i in range(2 if op is layer_norm else 1)]
    g = grads(*shape, dtype=dtype, seed=4)
    no_bias = [None for _ in bias]
    check([x, r, weight, *bias], g, zero_centered=True)
    check([x, None, weight, *no_bias], g[:1])
    if dtype.itemsize == 2:  # float32 parameters and residual stream beside 16-bit activations
        wide = [t.detach().float().requires_grad_() for t in (r, weight, *bias)]
        check([x, *wide], [g[0], g[1].float()])
        check([x, None, None, *no_bias], g[:1])
    transposed = x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    check([transposed, r, weight, *bias], None)


def aot_cases(*, all_widths: bool) -> list:
    """(dtype, cols, capability): a width for each way that the launchers go, and rows of odd alignment."""
    cases = [(torch.bfloat16, cols, 90) for cols in (1024, 8192, 16384, 32768)]
    if all_widths:
        cases += [(torch.bfloat16, 4096, 90), (torch.bfloat16, 4104, 90), (torch.bfloat16, 12288, 90)]
        cases += [(torch.float16, 8192, 100), (torch.bfloat16, 1001, 90)]
        cases += [(torch.float32, cols, 80) for cols in (8192, 65536)]
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}-sm_{case[2]}".replace("torch.", "")) for case in cases]
