"""Shared by ``layer_norm`` and ``rms_norm``: argument checks, outputs, the autograd formula, and the autocast rule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_floating, check_rows, check_same_device
from parallel_ops._internal.gradients.split_backward import requested


def check_norm(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
    """``weight`` and ``bias`` are ``[H]`` for ``x`` of ``[..., H]``; ``residual`` is like ``x``."""
    check_rows(op, x)
    for name, tensor in (("weight", weight), ("bias", bias), ("residual", residual)):
        if tensor is None:
            continue
        check_floating(op, name, tensor)
        check_same_device(op, name, tensor, "x", x)
        if name == "residual":
            if tensor.shape != x.shape:
                raise ValueError(f"{op}: residual must have the shape of x, {list(x.shape)}, got {list(tensor.shape)}")
        elif tensor.dim() != 1 or tensor.shape[0] != x.shape[-1]:
            raise ValueError(
                f"{op}: {name} must have shape [{x.shape[-1]}], the last dimension of x, got {list(tensor.shape)}"
            )
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # which raises for devices without autocast
        _check_dtypes(op, x, weight, bias, residual)


def check_eps(op: str, eps: float) -> None:
    """``eps`` is a number that can be added to a variance."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"{op}: eps must be a number, got {type(eps).__name__}")
    if not eps >= 0:
        raise ValueError(f"{op}: eps must not be negative, got {eps}")


def _check_dtypes(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.dtype is torch.float64) != (x.dtype is torch.float64):
            raise TypeError(
                f"{op}: {name} is {tensor.dtype}, but x is {x.dtype}; float64 goes with float64 alone, cast one of them"
            )
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise TypeError(f"{op}: bias is {bias.dtype}, but weight is {weight.dtype}; cast one of them")
    if residual is not None and not _streams_match(x, residual):
        raise TypeError(
            f"{op}: residual is {residual.dtype}, but x is {x.dtype}; it may be of the dtype of x, or float32 beside "
            "16-bit x: cast one of them, or run under torch.autocast"
        )


def _streams_match(x: Tensor, residual: Tensor) -> bool:
    return residual.dtype == x.dtype or (residual.dtype is torch.float32 and x.dtype.itemsize == 2)


def empty_statistic(x: Tensor) -> Tensor:
    """One value for each row of ``x``, in the dtype of the arithmetic."""
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32))


def empty_sum(x: Tensor, residual: Tensor | None) -> Tensor:
    """The output for ``x + residual``, in the dtype of the residual; empty without one."""
    return x.new_empty(0) if residual is None else residual.new_empty(x.shape)


def empty_gradients(grad: Tensor, x: Tensor, needed: bool) -> tuple[Tensor, Tensor]:
    """The outputs for the gradient of ``x``, which was normalised: in its dtype and, if different, in that of ``grad``.
    Empty if there is none."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needed else x.new_empty(0)
    return dx, grad.new_empty(x.shape) if needed and grad.dtype != x.dtype else x.new_empty(0)


def empty_like_parameter(parameter: Tensor | None, x: Tensor, needed: bool) -> Tensor:
    """The output for the gradient of a parameter; empty if there is none."""
    if parameter is None or not needed:
        return x.new_empty(0)
    return torch.empty_like(parameter, memory_format=torch.contiguous_format)


def launch_backward(
    out: tuple[Tensor, ...], grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None,
    bias: Tensor | None, mean: Tensor | None, rstd: Tensor, zero_centered: bool, needs_x: bool = True,
    needs_parameters: bool = True,
) -> None:  # fmt: skip
    """The launcher takes ``None`` where the op has an empty tensor."""
    from parallel_ops.triton_kernels.norms import backward as kernels

    dx, narrow, dweight, *dbias = out
    dxs = dx if needs_x else None, narrow if needs_x and grad.dtype != x.dtype else None
    of_weight = dweight if needs_parameters and weight is not None else None
    of_bias = dbias[0] if needs_parameters and bias is not None else None
    kernels.backward(grad, grad_sum, x, weight, mean, rstd, *dxs, of_weight, of_bias, zero_centered=zero_centered)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *parameters, residual, _, ctx.zero_centered = inputs
    _, total, *statistics = output
    ctx.dtype, ctx.has_residual = x.dtype, residual is not None
    ctx.mark_non_differentiable(*statistics)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else total, *parameters, *statistics)


def gradients(
    op: Callable[..., tuple[Tensor, ...]], ctx: Any, grad: Tensor | None, grad_sum: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Formula of both norms: the gradients of x, parameters and residual, by the op that computes them."""
    x, *tensors = ctx.saved_tensors
    if grad is None:  # an unused output's is zero, without memory of its own
        grad = x.new_zeros((), dtype=ctx.dtype).expand(x.shape)
    grad_sum = grad_sum if ctx.has_residual else None
    for_x, *for_parameters, for_residual = requested(ctx)[:-2]
    needs = for_x or for_residual, any(for_parameters)
    dx, narrow, *dparameters = op(grad, grad_sum, x, *tensors, ctx.zero_centered, *needs)
    return (
        (dx if x.dtype == ctx.dtype else narrow) if for_x else None,
        *(d if wanted else None for d, wanted in zip(dparameters, for_parameters, strict=True)),
        dx if for_residual else None,
        None,
        None,
    )


def in_dtype_of_stream(residual: int, parameters: tuple[int, ...]) -> Callable[[torch.dtype, tuple[Any, ...]], Any]:
    """Autocast rule of the norms: dtypes stay as they are, save combinations that the kernels do not have.

    PyTorch casts a norm's input up to fp32 under autocast on CUDA, because its statistics need it. Here they are fp32
    whatever the input, so a norm keeps the dtype of the stream it sits in, and its parameters theirs. ``residual`` and
    ``parameters`` are argument numbers.
    """

    def rule(_: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
        cast = list(args)
        if cast[residual] is not None and not _streams_match(cast[0], cast[residual]):
            wider = torch.promote_types(cast[0].dtype, cast[residual].dtype)
            cast[0], cast[residual] = cast[0].to(wider), cast[residual].to(wider)
        given = [i for i in parameters if cast[i] is not None]
        dtypes = {cast[i].dtype for i in given}
        if len(dtypes) > 1 or (torch.float64 in dtypes) != (cast[0].dtype is torch.float64):
            for i in given:
                cast[i] = cast[i].to(cast[0].dtype)
        return tuple(cast)

    return rule
