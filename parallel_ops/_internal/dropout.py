"""Shared by ops with dropout: the check of the probability, the seed in the form that the kernels take, generators."""

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_same_device
from parallel_ops._internal.philox import SMALLEST_P


def dropout_seed(
    op: str, p_name: str, p: float, seed: int | Tensor | None, x_name: str, x: Tensor, *, training: bool = True
) -> Tensor | None:
    """The seed as one int64 element on the device of ``x``, or ``None`` if nothing will be dropped."""
    if not isinstance(p, (float, int)) or isinstance(p, bool):
        raise TypeError(f"{op}: {p_name} must be a number from 0 to 1, got {type(p).__name__}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: {p_name} must be from 0 to 1, got {p}")
    if seed is not None:
        seed = _as_tensor(op, seed, x_name, x)
    if not training or p < SMALLEST_P:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=x.device)
    return seed


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds the default generators from which dropout on a device draws."""
    # torch.manual_seed costs a millisecond, and keeps every call, where CUDA is not in use.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _as_tensor(op: str, seed: int | Tensor, x_name: str, x: Tensor) -> Tensor:
    if isinstance(seed, Tensor):
        if seed.dtype is not torch.int64:
            raise TypeError(f"{op}: seed must be an int64 tensor, got {seed.dtype}")
        if seed.numel() != 1:
            raise ValueError(f"{op}: seed must have one element, got shape {list(seed.shape)}")
        check_same_device(op, "seed", seed, x_name, x)
        return seed
    if not isinstance(seed, (int, torch.SymInt)) or isinstance(seed, bool):
        raise TypeError(f"{op}: seed must be None, an int or an int64 tensor, got {type(seed).__name__}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"{op}: seed must fit 64 bits, got {seed}")
    # A fill, unlike a copy from the host, neither synchronises nor breaks the capture of a CUDA graph.
    return torch.full((1,), seed if seed < 2**63 else seed - 2**64, dtype=torch.int64, device=x.device)
