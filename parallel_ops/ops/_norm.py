"""What ``layer_norm`` and ``rms_norm`` share: argument checks, shapes of the outputs, and the autocast rule."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel_ops.ops._check import check_floating, check_rows, check_same_device, check_same_dtype


def check_norm(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float) -> None:
    """``weight`` and ``bias`` are ``[H]`` for ``x`` of ``[..., H]``; ``residual`` is like ``x``; ``eps`` is usable."""
    check_rows(op, x)
    for name, tensor in (("weight", weight), ("bias", bias), ("residual", residual)):
        if tensor is None:
            if name != "weight":
                continue
            raise TypeError(f"{op}: weight must be a tensor, got NoneType")
        check_floating(op, name, tensor)
        check_same_device(op, name, tensor, "x", x)
        check_same_dtype(op, name, tensor, "x", x)
        if name == "residual":
            if tensor.shape != x.shape:
                raise ValueError(f"{op}: residual must have the shape of x, {list(x.shape)}, got {list(tensor.shape)}")
        elif tensor.dim() != 1 or tensor.shape[0] != x.shape[-1]:
            raise ValueError(
                f"{op}: {name} must have shape [{x.shape[-1]}], the last dimension of x, got {list(tensor.shape)}"
            )
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"{op}: eps must be a number, got {type(eps).__name__}")
    if not eps >= 0:
        raise ValueError(f"{op}: eps must not be negative, got {eps}")


def empty_statistic(x: Tensor) -> Tensor:
    """One value for each row of ``x``, in the dtype of the arithmetic."""
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32))


def empty_sum(x: Tensor, residual: Tensor | None) -> Tensor:
    """Where ``x + residual`` goes; empty without a residual."""
    return x.new_empty(0 if residual is None else x.shape)


def zeros_like_expanded(x: Tensor) -> Tensor:
    """The gradient of an output that nobody used, without memory of its own."""
    return x.new_zeros(()).expand(x.shape)


def in_dtype_of_stream(residual: int) -> Callable[[torch.dtype, tuple[Any, ...]], tuple[Any, ...]]:
    """Autocast rule of the norms: the wider of x and the residual (argument number ``residual``), for every argument.

    PyTorch casts a norm's input up to fp32 under autocast on CUDA, because its statistics need it. Here they are fp32
    whatever the input, so a norm keeps the dtype of the stream it sits in, and its parameters follow.
    """

    def rule(_: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
        stream = [a.dtype for a in (args[0], args[residual]) if a is not None]
        dtype = functools.reduce(torch.promote_types, stream)
        return tuple(a.to(dtype) if isinstance(a, Tensor) else a for a in args)

    return rule
