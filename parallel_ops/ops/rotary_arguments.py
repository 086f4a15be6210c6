"""Arguments of the rotary embeddings: tables of angles as kernels read them, and the checks.

Each check raises before any kernel starts and names op and argument.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_floating, check_same_device, has_values
from parallel_ops._internal.tensor_format import FORMATS, described, from_sbhd
from parallel_ops._internal.token_range import rises


def tables_of(
    op: str, cos: Tensor, sin: Tensor | None, interleaved: bool, doubled: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine with each angle once; computed from angles if ``sin`` is ``None``."""
    if doubled:
        cos, sin = _halved(op, "cos", cos, interleaved), sin if sin is None else _halved(op, "sin", sin, interleaved)
    if sin is not None:
        return cos, sin
    check_floating(op, "cos", cos)
    angles = cos[:, 0, 0] if cos.dim() == 4 and cos.shape[1:3] == (1, 1) else cos
    angles = angles.to(torch.promote_types(angles.dtype, torch.float32))
    table = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(table), angles.sin().to(table)


def _halved(op: str, name: str, angles: Tensor, interleaved: bool) -> Tensor:
    """A table that has each angle once, as a view of one that has it twice."""
    check_floating(op, name, angles)
    if angles.dim() == 0 or angles.shape[-1] % 2:
        raise ValueError(f"{op}: {name} must have an even last dimension where it is doubled, got {list(angles.shape)}")
    return angles[..., ::2] if interleaved else angles[..., : angles.shape[-1] // 2]


def sequence_first(t: Any, dims: int) -> Any:
    """A tensor with a value for each token of each batch, sequence first as the kernels need it."""
    return t.transpose(0, 1) if isinstance(t, Tensor) and t.dim() == dims else t


def check_rotary(
    op: str, names: tuple[str, ...], x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None,
    cu_seqlens: Tensor | None, tensor_format: str = "sbhd",
) -> None:  # fmt: skip
    """Tensors are ``[s, b, h, d]`` or ``[t, h, d]``; errors speak of ``tensor_format``."""
    if k is not None:
        check_same_device(op, "k", k, "q", x)
        if k.dtype != x.dtype:
            raise TypeError(f"{op}: k is {k.dtype}, but q is {x.dtype}; cast one of them")
        if k.dim() != x.dim() or (*k.shape[:-2], k.shape[-1]) != (*x.shape[:-2], x.shape[-1]):
            raise ValueError(f"{op}: k must be like q but for its heads, got {list(k.shape)} and {list(x.shape)}")
    _check_angles(op, names[0], x, cos, sin)
    if positions is not None and (cu_seqlens is not None or cos.dim() == 3):
        raise ValueError(f"{op}: positions, cu_seqlens and angles for each token exclude each other")
    if cu_seqlens is not None:
        _check_sequences(op, x, cos, cu_seqlens)
    elif positions is None:
        if x.shape[0] > cos.shape[0]:
            fit = [
                f for f in FORMATS if x.dim() == 4 and from_sbhd(x, tensor_format).shape[f.index("s")] <= cos.shape[0]
            ]
            advice = f"; the shape fits tensor_format={fit[0]!r}, {described(fit[0])}" if fit else ""
            raise ValueError(
                f"{op}: cos has {cos.shape[0]} rows, but {names[0]} has {x.shape[0]} positions in "
                f"{described(tensor_format)}{advice}"
            )
    else:
        _check_positions(op, x, cos, positions)


def check_writable(op: str, names: tuple[str, ...], *tensors: Tensor | None) -> None:
    for name, t in zip(names, tensors, strict=False):
        assert t is not None
        if any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True)):
            raise ValueError(f"{op}: {name} is expanded, so it cannot be written in place; clone it")
        if t.requires_grad and t.is_leaf and torch.is_grad_enabled():
            raise ValueError(f"{op}: {name} is a leaf that requires a gradient, so it cannot be written in place")


def _check_angles(op: str, x_name: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, angles in (("cos", cos), ("sin", sin)):
        check_floating(op, name, angles)
        check_same_device(op, name, angles, x_name, x)
        if angles.dtype not in (torch.float32, x.dtype):
            raise TypeError(f"{op}: {name} must be float32 or the dtype of {x_name}, {x.dtype}, got {angles.dtype}")
        if angles.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: {name} requires a gradient, which is not implemented; detach it")
        per_token = angles.dim() == 3 and x.dim() == 4 and angles.shape[:2] == x.shape[:2]
        if not (angles.dim() == 2 or per_token) or 2 * angles.shape[-1] > x.shape[-1]:
            raise ValueError(
                f"{op}: {name} must be [positions, R / 2] with R at most {x.shape[-1]}, the last dimension of "
                f"{x_name}, or have one row for each token, got {list(angles.shape)}"
            )
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"{op}: sin must be like cos, {list(cos.shape)} of {cos.dtype}, got {list(sin.shape)} of {sin.dtype}"
        )


def _check_sequences(op: str, x: Tensor, cos: Tensor, cu_seqlens: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{op}: cu_seqlens must be an int32 or int64 tensor, got {got}")
    check_same_device(op, "cu_seqlens", cu_seqlens, "x", x)
    if x.dim() != 3 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{op}: cu_seqlens must be [sequences + 1], for packed [t, h, d], got {list(cu_seqlens.shape)}"
        )
    if has_values(cu_seqlens):
        starts = cu_seqlens.tolist()
        longest = max(b - a for a, b in itertools.pairwise(starts))
        if not rises(starts, x.shape[0]):
            raise ValueError(f"{op}: cu_seqlens must rise from 0 to {x.shape[0]}, got {starts}")
        if longest > cos.shape[0]:
            raise ValueError(f"{op}: cos has {cos.shape[0]} rows, but a sequence has {longest} tokens")


def _check_positions(op: str, x: Tensor, cos: Tensor, positions: Tensor) -> None:
    if not isinstance(positions, Tensor) or positions.dtype is not torch.int64:
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"{op}: positions must be an int64 tensor, got {got}")
    check_same_device(op, "positions", positions, "x", x)
    if positions.shape not in (x.shape[:1], x.shape[:-2]):
        allowed = " or ".join(str(list(shape)) for shape in dict.fromkeys((x.shape[:1], x.shape[:-2])))
        raise ValueError(f"{op}: positions must have shape {allowed}, got {list(positions.shape)}")
    # Compiled, the kernel's own check remains, a RuntimeError: values are not known while tracing.
    if positions.numel() and has_values(positions):
        low, high = (int(v) for v in positions.aminmax())
        if low < 0 or high >= cos.shape[0]:
            raise ValueError(f"{op}: positions run from {low} to {high}, but cos has {cos.shape[0]} rows")
