"""The linears of the experts of a layer: rows that are sorted by expert, each expert's times its own weight.

    y[rows of e]   = x[rows of e] W[e]^T + b[e]
    dx[rows of e]  = dy[rows of e] W[e]
    dW[e]          = dy[rows of e]^T x[rows of e]          to autograd, to a main_grad, or into a queue
    db[e]          = sum over rows of e of dy

Rows past the last expert's are padding: y and dx are 0 there, and dy is not read. Saved for backward: x for dW, W for
dx, each only if that gradient is needed. The weight half of a split backward reads x and dy alone.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_ops._internal.dispatch.autograd import once_differentiable
from parallel_ops._internal.dispatch.checks import check_floating, check_same_device, check_same_dtype
from parallel_ops._internal.dispatch.registration import cast_to_autocast_dtype, register
from parallel_ops._internal.gradients.grouped_matmul import check_ends, multiply, outer_products, sums
from parallel_ops._internal.gradients.split_backward import check_memory, requested
from parallel_ops._internal.gradients.weight_gradients import (
    DeferredWeightGradients,
    Target,
    add_to,
    after_backward,
    targets_of,
)

_OP = "grouped_linear"


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    *,
    bias: Tensor | None = None,
    main_grad: Target = None,
    deferred: DeferredWeightGradients | None = None,
) -> Tensor:
    """``x W[e]^T + b[e]`` for the rows of each expert e.

    On a GPU the host never waits for ``offs`` where torch has a grouped matmul: for bfloat16 on compute capabilities 9
    and 10, with widths that are multiples of 8. Elsewhere it waits once in the forward and once for each gradient.

    Args:
        x: ``[r, in]``, rows sorted by expert; float32, float16, bfloat16 or float64, any strides.
        weight: ``[n, out, in]`` for n experts, dtype of x, any strides. For weights stored as ``[n, in, out]`` pass the
            transposed view, which is not copied.
        offs: ``[n]``, int32 or int64: where the rows of each expert end. They ascend and lie within 0 and r; on a GPU
            this is not checked. An expert may have no rows, and rows past the last end are padding.
        bias: ``[n, out]``, dtype of x, or ``None``.
        main_grad: ``[n, out, in]``, float32 or the dtype of the weight: the weight's gradient is added to it, and
            autograd gets none. torch's grouped matmul on a GPU rounds each gradient to bfloat16 before it is added;
            otherwise nothing is rounded on the way.
        deferred: a queue that computes the weight's gradient later, for pipeline schedules.

    Returns:
        ``[r, out]``, contiguous, dtype of x; 0 in rows past the last end. Under autocast x, weight and bias are cast to
        the autocast dtype.

    Raises:
        TypeError: unsupported or differing dtypes. ValueError: wrong shapes or devices; ``offs`` that descend or leave
            the rows of x; ``main_grad`` or ``deferred`` under torch.compile or inside DistributedDataParallel.

    Source: Gale et al., arXiv:2211.15841.

    Sharding: experts, with the rows of x that are theirs, may be split over ranks; so may ``out``, of weight, bias and
    y. With ``in`` split, of x and weight, y is partial.

    Examples:
        >>> import torch
        >>> from parallel_ops import grouped_linear
        >>> x, weight = torch.randn(6, 8), torch.randn(2, 16, 8)  # six rows, two experts
        >>> offs = torch.tensor([4, 6])  # four rows for expert 0, two for expert 1
        >>> expected = torch.cat([x[:4] @ weight[0].T, x[4:] @ weight[1].T])
        >>> torch.allclose(grouped_linear(x, weight, offs), expected, atol=1e-5)
        True
    """
    _check(x, weight, offs, bias)
    if main_grad is not None or deferred is not None:
        (target,) = targets_of(_OP, [weight], None if main_grad is None else [main_grad], deferred)
        if target is not None and weight.requires_grad and torch.is_grad_enabled():
            y: Tensor = _Accumulating.apply(target, deferred, x, weight, offs, bias)
            return y
    return _forward(x, weight, offs, bias)


def grouped_linear_reference(x: Tensor, weight: Tensor, offs: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """The same in plain PyTorch."""
    bounds = [0, *offs.tolist()]
    parts = [
        F.linear(x[bounds[e] : bounds[e + 1]], weight[e], None if bias is None else bias[e]) for e in range(len(weight))
    ]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - bounds[-1], weight.shape[1], dtype=parts[0].dtype)])


def _check(x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None) -> None:
    check_floating(_OP, "x", x)
    check_floating(_OP, "weight", weight)
    if x.dim() != 2:
        raise ValueError(f"{_OP}: x must have shape [rows, in], got {list(x.shape)}")
    if weight.dim() != 3 or weight.shape[2] != x.shape[1] or not weight.shape[0]:
        raise ValueError(
            f"{_OP}: weight must have shape [experts, out, {x.shape[1]}] for x of {list(x.shape)}, got "
            f"{list(weight.shape)}"
        )
    if not isinstance(offs, Tensor) or offs.dtype not in (torch.int32, torch.int64):
        got = offs.dtype if isinstance(offs, Tensor) else type(offs).__name__
        raise TypeError(f"{_OP}: offs must be a tensor of int32 or int64, got {got}")
    if offs.shape != weight.shape[:1]:
        raise ValueError(
            f"{_OP}: offs must have shape [{weight.shape[0]}], one for each expert, got {list(offs.shape)}"
        )
    others = [("weight", weight), ("offs", offs)]
    if bias is not None:
        check_floating(_OP, "bias", bias)
        if bias.shape != weight.shape[:2]:
            raise ValueError(f"{_OP}: bias must have shape {list(weight.shape[:2])}, got {list(bias.shape)}")
        others.append(("bias", bias))
    for name, t in others:
        check_same_device(_OP, name, t, "x", x)
        if t is not offs:
            check_same_dtype(_OP, name, t, "x", x)


def _run(x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None) -> Tensor:
    for name, t in (("x", x), ("weight", weight), ("bias", bias)):
        if t is not None:
            check_memory(_OP, name, t)
    return multiply(x, weight.mT, offs, bias)


def _run_cpu(x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None) -> Tensor:
    check_ends(_OP, offs, x.shape[0])
    return _run(x, weight, offs, bias)


def _run_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offs: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    for_x, for_weight, for_bias = needs
    grad, nothing = grad.contiguous(), grad.new_empty(0)
    if for_x:
        check_memory(_OP, "weight", weight)
    return (
        multiply(grad, weight, offs) if for_x else nothing,
        outer_products(grad, x, offs) if for_weight else nothing,
        sums(grad, offs) if for_bias else nothing,
    )


def outputs(x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def backward_outputs(
    grad: Tensor, x: Tensor, weight: Tensor, offs: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    for_x, for_weight, for_bias = needs
    return (
        grad.new_empty((x.shape[0], weight.shape[2]) if for_x else 0),
        grad.new_empty(weight.shape if for_weight else 0),
        grad.new_empty(weight.shape[:2] if for_bias else 0),
    )


def _save(ctx: Any, x: Tensor, weight: Tensor, offs: Tensor, needs: tuple[bool, bool]) -> None:
    """Saves x if the weight needs a gradient, the weight if x does."""
    ctx.shapes, ctx.saves = (x.shape, weight.shape), needs[::-1]
    ctx.save_for_backward(*(t for t, saved in zip((x, weight), ctx.saves, strict=True) if saved), offs)


def _saved(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and offs; for what was not saved, and is not read, an expanded scalar of the same shape."""
    *tensors, offs = ctx.saved_tensors
    x, weight = (
        tensors.pop(0) if saved else grad.new_empty(()).expand(shape)
        for saved, shape in zip(ctx.saves, ctx.shapes, strict=True)
    )
    return x, weight, offs


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, offs, _ = inputs
    _save(ctx, x, weight, offs, ctx.needs_input_grad[:2])


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    for_x, for_weight, _, for_bias = requested(ctx)[:4]
    dx, dweight, dbias = _backward(grad, *_saved(ctx, grad), [for_x, for_weight, for_bias])
    return dx if for_x else None, dweight if for_weight else None, None, dbias if for_bias else None


class _Accumulating(torch.autograd.Function):
    """The op whose weight gradient goes to a target, at once or later."""

    @staticmethod
    def forward(
        ctx: Any,
        target: Target,
        deferred: DeferredWeightGradients | None,
        x: Tensor,
        weight: Tensor,
        offs: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.target, ctx.deferred = target, deferred
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x, weight, offs, bias = cast_to_autocast_dtype(torch.get_autocast_dtype(device), (x, weight, offs, bias))
        _save(ctx, x, weight, offs, ctx.needs_input_grad[2:4])
        return _forward(x, weight, offs, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return once_differentiable(_OP, _accumulate)(ctx, grad)


def _accumulate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _, _, for_x, for_weight, _, for_bias = requested(ctx)
    x, weight, offs = _saved(ctx, grad)
    grad = grad.contiguous()
    dx, _, dbias = _backward(grad, x, weight, offs, [for_x, False, for_bias])
    dweight = None
    if for_weight:
        compute = functools.partial(add_to, ctx.target, grad, x, offs)
        if ctx.deferred is None:
            dweight = compute()
        else:
            ctx.deferred.push(after_backward(compute, grad, x, offs))
    of_x, of_weight, of_bias = ctx.dtypes
    dweight = None if dweight is None else dweight.to(of_weight)
    return None, None, dx.to(of_x) if for_x else None, dweight, None, dbias.to(of_bias) if for_bias else None


def _flops(x: Tensor, weight: Tensor, *_: object) -> int:
    return 2 * x.shape[0] * weight.shape[1] * weight.shape[2]


def _flops_of_backward(grad: Tensor, x: Tensor, weight: Tensor, offs: Tensor, needs: Sequence[bool]) -> int:
    return sum(needs[:2]) * _flops(x, weight)


_backward = register(
    "grouped_linear_backward",
    outputs=backward_outputs,
    cpu=_run_backward,
    cuda=_run_backward,
    flops=_flops_of_backward,
)
_forward = register(
    _OP,
    outputs=outputs,
    cpu=_run_cpu,
    cuda=_run,
    setup_context=_setup_context,
    backward=_autograd,
    autocast=cast_to_autocast_dtype,
    flops=_flops,
    reference=lambda x, weight, offs, bias: grouped_linear_reference(x, weight, offs, bias=bias),
)
