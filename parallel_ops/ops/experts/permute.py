"""Rows of tokens in the order by expert, and the weighted sums of what the experts return.

    permute:    y[r]  = x[token of r]                        0 for padding
                dx[t] = sum_j dy[places[t, j]]
    unpermute:  x[t]  = sum_j w[t, j] y[places[t, j]]        dropped slots add nothing
                dy[r] = w[slot of r] dx[token of r]          0 for padding
                dw[t, j] = <dx[t], y[places[t, j]]>          0 for dropped slots

Sums run over j in order, in fp32, and are rounded once. Saved for backward: the order; by unpermute also y and the
weights, where the weights take a gradient.
"""

from typing import Any

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_floating, check_same_device, has_values
from parallel_ops._internal.dispatch.registration import register
from parallel_ops._internal.gradients.split_backward import requested
from parallel_ops.ops.experts.order import ExpertOrder


def permute(x: Tensor, order: ExpertOrder) -> Tensor:
    """The rows of ``x`` in the order by expert, each token's as often as it has experts.

    Args:
        x: ``[t, h]``, float32, float16, bfloat16 or float64, any strides.
        order: of ``sort_by_expert`` for the same tokens.

    Returns:
        ``[r, h]``, contiguous, dtype of ``x``: the rows of expert 0 come first, tokens in order within an expert;
        padding is zero. Autocast changes nothing.

    Raises:
        TypeError: unsupported dtypes. ValueError: wrong shapes or devices; an order that ``sort_by_expert`` did not
            make is an error on the CPU, and on CUDA writes nothing outside the result.

    Sharding: x may be sharded over h, and the result is sharded alike; rows are those of the rank's own tokens.

    Examples:
        >>> import torch
        >>> from parallel_ops import permute, sort_by_expert
        >>> order = sort_by_expert(torch.tensor([[1], [0], [1]]), num_experts=2)
        >>> permute(torch.tensor([[0.0], [1.0], [2.0]]), order).flatten()  # token 1, then tokens 0 and 2
        tensor([1., 0., 2.])
    """
    return _permute.checked(lambda: _check("permute", "x", x, order, None, 0), x, *_tensors("permute", order)[:2])


def unpermute(y: Tensor, order: ExpertOrder, weights: Tensor | None = None) -> Tensor:
    """The sum over a token's experts of what they returned, each times its weight: the inverse of ``permute``.

    Args:
        y: ``[r, h]``, float32, float16, bfloat16 or float64, any strides: rows in the order by expert.
        order: of ``sort_by_expert``.
        weights: ``[t, k]``, of any of these dtypes: of ``route``. ``None``: all are 1.

    Returns:
        ``[t, h]``, contiguous, dtype of ``y``. A token whose slots were all dropped is zero. Autocast changes nothing.

    Raises:
        TypeError, ValueError: as ``permute``.

    Sharding: y may be sharded over h, and the result is sharded alike; the gradient of weights is then partial over
    those ranks.

    Examples:
        >>> import torch
        >>> from parallel_ops import permute, sort_by_expert, unpermute
        >>> x = torch.randn(3, 8)
        >>> order = sort_by_expert(torch.tensor([[1], [0], [1]]), num_experts=2)
        >>> torch.equal(unpermute(permute(x, order), order), x)
        True
    """
    rows, places, _ = _tensors("unpermute", order)
    return _unpermute.checked(lambda: _check("unpermute", "y", y, order, weights, 1), y, rows, places, weights)


def permute_reference(x: Tensor, order: ExpertOrder) -> Tensor:
    """The same in plain PyTorch."""
    tokens = order.rows.long().div(order.places.shape[1], rounding_mode="floor")
    return torch.cat([x, x.new_zeros(1, x.shape[1])])[tokens]  # -1 is the last row


def unpermute_reference(y: Tensor, order: ExpertOrder, weights: Tensor | None = None) -> Tensor:
    """The same in plain PyTorch."""
    places = order.places.long()
    chosen = torch.cat([y, y.new_zeros(1, y.shape[1])])[places]  # -1 is the last row
    if weights is not None:
        chosen = chosen * weights.masked_fill(places < 0, 0).unsqueeze(-1)
    return chosen.sum(1).to(y.dtype)


def _tensors(op: str, order: ExpertOrder) -> ExpertOrder:
    if not isinstance(order, tuple) or len(order) != 3:
        raise TypeError(f"{op}: order must be an ExpertOrder, got {type(order).__name__}")
    return ExpertOrder(*order)


def _check(op: str, name: str, x: Tensor, order: ExpertOrder, weights: Tensor | None, dim: int) -> None:
    """``dim``: 0 where the rows of ``x`` are tokens, 1 where they are those of the order."""
    check_floating(op, name, x)
    for part, t, dims in (("rows", order.rows, 1), ("places", order.places, 2)):
        if not isinstance(t, Tensor) or t.dtype is not torch.int32 or t.layout is not torch.strided:
            raise TypeError(f"{op}: order.{part} must be a dense int32 tensor, as sort_by_expert returns it")
        check_same_device(op, f"order.{part}", t, name, x)
        if t.dim() != dims or not t.is_contiguous():
            raise ValueError(f"{op}: order.{part} must be as sort_by_expert returns it, got shape {list(t.shape)}")
    tokens, choices = order.places.shape
    if choices == 0:
        raise ValueError(f"{op}: order.places must have at least one choice a token, got {list(order.places.shape)}")
    expected, what = (order.rows.shape[0], "rows") if dim else (tokens, "tokens")
    if x.dim() != 2 or x.shape[0] != expected:
        raise ValueError(f"{op}: {name} must be [{expected}, h], the {what} of order, got {list(x.shape)}")
    if weights is not None:
        check_floating(op, "weights", weights)
        check_same_device(op, "weights", weights, name, x)
        if weights.shape != order.places.shape:
            raise ValueError(f"{op}: weights must be {[tokens, choices]}, one a slot, got {list(weights.shape)}")
    if has_values(order.rows):
        _check_numbers(op, order)


def _check_numbers(op: str, order: ExpertOrder) -> None:
    for part, t, end in (("rows", order.rows, order.places.numel()), ("places", order.places, order.rows.numel())):
        if t.numel() and (t.min() < -1 or t.max() >= end):
            raise ValueError(f"{op}: order.{part} must hold numbers from -1 to {end - 1}: it is of other tokens")


def permute_outputs(x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return x.new_empty((rows.shape[0], x.shape[1]))


def unpermute_outputs(y: Tensor, rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    return y.new_empty((places.shape[0], y.shape[1]))


def unpermute_backward_outputs(
    grad: Tensor, y: Tensor | None, rows: Tensor, places: Tensor, weights: Tensor | None, needs_y: bool
) -> tuple[Tensor, Tensor]:
    dy = grad.new_empty((rows.shape[0], grad.shape[1]) if needs_y else 0)
    return dy, grad.new_empty(0) if y is None or weights is None else weights.new_empty(weights.shape)


def launch_permute(out: Tensor, x: Tensor, rows: Tensor, places: Tensor) -> None:
    from parallel_ops.triton_kernels.experts import permute as kernels

    kernels.scatter(x, None, rows, places, None, out, None)


def launch_unpermute(out: Tensor, y: Tensor, rows: Tensor, places: Tensor, weights: Tensor | None) -> None:
    from parallel_ops.triton_kernels.experts import permute as kernels

    kernels.gather(y, places, weights, out)


def launch_unpermute_backward(
    out: tuple[Tensor, Tensor], grad: Tensor, y: Tensor | None, rows: Tensor, places: Tensor, weights: Tensor | None,
    needs_y: bool,
) -> None:  # fmt: skip
    from parallel_ops.triton_kernels.experts import permute as kernels

    dy, dweights = out
    needs_weights = y is not None and weights is not None
    kernels.scatter(
        grad, y if needs_weights else None, rows, places, weights, dy if needs_y else None,
        dweights if needs_weights else None,
    )  # fmt: skip


def setup_permute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rows, places = inputs
    ctx.save_for_backward(rows, places)


def permute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, places = ctx.saved_tensors
    return _unpermute(grad, rows, places, None), None, None


def setup_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, rows, places, weights = inputs
    ctx.save_for_backward(y if ctx.needs_input_grad[3] else None, rows, places, weights)


def unpermute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, rows, places, weights = ctx.saved_tensors
    needs_y, _, _, needs_weights = requested(ctx)
    dy, dweights = _unpermute_backward(grad, y if needs_weights else None, rows, places, weights, needs_y)
    return dy if needs_y else None, None, None, dweights if needs_weights else None


_permute = register(
    "permute", outputs=permute_outputs, launch=launch_permute, setup_context=setup_permute, backward=permute_backward
)
_unpermute_backward = register(
    "unpermute_backward", outputs=unpermute_backward_outputs, launch=launch_unpermute_backward
)
_unpermute = register(
    "unpermute", outputs=unpermute_outputs, launch=launch_unpermute, setup_context=setup_unpermute,
    backward=unpermute_backward,
)  # fmt: skip
