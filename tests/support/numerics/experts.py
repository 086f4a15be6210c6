"""Logits without ties, orders of tokens by expert, and inputs of a linear of experts."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from support.numerics.suite import randn

COUNTS = st.lists(st.one_of(st.just(0), st.integers(1, 5), st.sampled_from([40, 130])), min_size=1, max_size=9)


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


def positional(f):
    """``f`` with the bias as its fourth argument, so that the checks differentiate it."""
    return lambda x, weight, offs, bias=None: f(x, weight, offs, bias=bias)


def inputs(counts, padding=0, width=8, out=16, *, dtype=torch.float32, device="cpu", bias=True, seed=0):
    """Rows past the last expert's are NaN: nothing may read them."""
    n, rows = len(counts), sum(counts)
    x = randn(rows + padding, width, dtype=dtype, device=device, seed=seed).detach()
    x[rows:] = torch.nan
    weight = randn(n, out, width, dtype=dtype, device=device, seed=seed + 1, scale=0.5)
    of_rows = randn(n, out, dtype=dtype, device=device, seed=seed + 2) if bias else None
    return [x.requires_grad_(), weight, torch.tensor(counts, device=device).cumsum(0).int(), of_rows]


def grad_for(args, seed=9):
    grad = randn(args[0].shape[0], args[1].shape[1], dtype=args[0].dtype, device=args[0].device, seed=seed).detach()
    grad[args[2][-1] :] = torch.nan
    return grad
