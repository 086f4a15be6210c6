"""Argument checks shared by the ops: each raises before any kernel starts and names op and argument."""

import torch
from torch import Tensor
from torch._guards import active_fake_mode

FLOATING_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_floating(op: str, name: str, tensor: Tensor) -> None:
    """``tensor`` is a strided floating-point tensor that the kernels support."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATING_DTYPES:
        raise TypeError(f"{op}: {name} must be float32, float16, bfloat16 or float64, got {tensor.dtype}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{op}: {name} must be a dense (strided) tensor, got layout {tensor.layout}")


def check_same_device(op: str, name: str, tensor: Tensor, x_name: str, x: Tensor) -> None:
    """``tensor`` lives where ``x`` does."""
    if tensor.device != x.device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, but {x_name} is on {x.device}; move one of them")


def check_same_dtype(op: str, name: str, tensor: Tensor, x_name: str, x: Tensor) -> None:
    """``tensor`` has the dtype of ``x``, unless autocast is about to give both the same."""
    if tensor.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{op}: {name} is {tensor.dtype}, but {x_name} is {x.dtype}; cast one of them, or run under torch.autocast"
        )


def has_values(tensor: Tensor) -> bool:
    """Whether the host can check the values of ``tensor``: they are on the CPU, and torch neither traces nor fakes."""
    if torch.compiler.is_compiling() or not tensor.is_cpu or type(tensor) is not Tensor:
        return False
    return active_fake_mode() is None


def check_bias(op: str, bias: Tensor | None, x: Tensor) -> None:
    """``bias`` is ``[H]`` for ``x`` of ``[..., H]``, on its device; it may have a dtype of its own."""
    if bias is None:
        return
    check_floating(op, "bias", bias)
    check_same_device(op, "bias", bias, "x", x)
    if bias.dim() != 1 or bias.shape[0] != x.shape[-1]:
        raise ValueError(f"{op}: bias must have shape [{x.shape[-1]}], the last dimension of x, got {list(bias.shape)}")


def check_row_weights(op: str, weights: Tensor | None, x_name: str, x: Tensor) -> None:
    """``weights`` has one element for each row of ``x``: ``[...]`` or ``[..., 1]`` for ``[..., H]``."""
    if weights is None:
        return
    check_floating(op, "weights", weights)
    check_same_device(op, "weights", weights, x_name, x)
    if weights.shape not in (x.shape[:-1], (*x.shape[:-1], 1)):
        raise ValueError(
            f"{op}: weights must have shape {list(x.shape[:-1])} or {[*x.shape[:-1], 1]}, one for each row of "
            f"{x_name}, got {list(weights.shape)}"
        )


def check_rows(op: str, x: Tensor) -> None:
    """``x`` is a supported floating-point tensor with at least one dimension."""
    check_floating(op, "x", x)
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")


def empty_like_or_none(t: Tensor | None, x: Tensor) -> Tensor:
    """What a gradient of ``t`` is written to, contiguous; without elements, and like ``x``, if there is no ``t``."""
    return x.new_empty(0) if t is None else t.new_empty(t.shape)
