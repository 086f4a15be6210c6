"""The linears over a group, forward and backward, for any transport: matrices in, matrices out, no autograd.

Everything is 2-D here: ``rows`` are the rows of each rank's shard. ``pieces`` is ``OFF`` (first all communication,
then one product) or the number of messages for each shard (see ``_overlap``).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallel_ops.comm.transport import Transport
from parallel_ops.tensor_parallel._overlap import (
    Span,
    gather,
    scatter,
    start_gather,
    start_scatter,
    sum_in_rank_order,
)
from parallel_ops.tensor_parallel._overlap_plan import OFF

# Called with all rows of what was gathered: computes weight gradients while other messages are on their way.
Products = Callable[[Tensor], None]


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``x W^T + b``."""
    if bias is None:
        return torch.mm(x, weight.t()) if out is None else torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t()) if out is None else torch.addmm(bias, x, weight.t(), out=out)


def column_forward(
    op: str,
    transport: Transport,
    x: Tensor,
    rows: Sequence[int],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    pieces: int,
) -> list[Tensor]:
    """``y_i = all_gather(x) W_i^T + b_i``."""
    outputs = [x.new_empty((sum(rows), weight.shape[0])) for weight in weights]

    def consume(span: Span, h: Tensor) -> None:
        if not h.shape[0]:
            return
        for weight, bias, y in zip(weights, biases, outputs, strict=True):
            multiply(h, weight, bias, y[slice(*span)])

    if pieces == OFF:
        whole, arriving = start_gather(op, transport, x, rows)
        arriving.wait()
        consume((0, sum(rows)), whole)
    else:
        gather(op, transport, x, rows, pieces, consume)
    return outputs


def column_backward(
    op: str,
    transport: Transport | None,
    grads: Sequence[Tensor],
    x: Tensor,
    rows: Sequence[int],
    weights: Sequence[Tensor],
    *,
    bulk: bool,
    needs_x: bool,
    products: Products | None,
) -> Tensor | None:
    """``dx = reduce_scatter(sum of dy_i W_i)``, and ``products(all_gather(x))``.

    In bulk, x is gathered again while dx is multiplied, and dx is scattered while the products are made.
    """
    if transport is None:
        if products is not None:
            products(x)
        return _input_gradient(grads, weights) if needs_x else None
    gathering = scattering = None
    if products is not None:
        gathering = start_gather(op, transport, x, rows)
        if not bulk:
            gathering[1].wait()
    if needs_x:
        scattering = start_scatter(op, transport, _input_gradient(grads, weights), rows)
        if not bulk:
            scattering[1].wait()
    if gathering is not None and products is not None:
        gathering[1].wait()
        products(gathering[0])
    if scattering is None:
        return None
    scattering[1].wait()
    return sum_in_rank_order(scattering[0])


def _input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total.addmm_(grad, weight)
    return total


def row_forward(
    op: str,
    transport: Transport,
    x: Tensor,
    rows: Sequence[int],
    weight: Tensor,
    bias: Tensor | None,
    pieces: int,
) -> Tensor:
    """``y = reduce_scatter(x W^T) + b``."""
    if pieces == OFF:
        parts, leaving = start_scatter(op, transport, multiply(x, weight, None), rows)
        leaving.wait()
    else:
        like = x.new_empty((0, weight.shape[0]))
        parts = scatter(op, transport, rows, pieces, like, lambda s, out: multiply(x[slice(*s)], weight, None, out))
    return sum_in_rank_order(parts, bias)


def row_backward(
    op: str,
    transport: Transport | None,
    grad: Tensor,
    rows: Sequence[int],
    weight: Tensor,
    pieces: int,
    *,
    needs_x: bool,
) -> tuple[Tensor | None, Tensor]:
    """``(dY W, dY)`` with ``dY = all_gather(dy)``; the first only where it is wanted."""
    dx = grad.new_empty((sum(rows), weight.shape[1])) if needs_x else None

    def consume(span: Span, dy: Tensor) -> None:
        if dx is not None and dy.shape[0]:
            torch.mm(dy, weight, out=dx[slice(*span)])

    if transport is None:
        consume((0, sum(rows)), grad)
        return dx, grad
    if pieces == OFF or dx is None:
        whole, arriving = start_gather(op, transport, grad, rows)
        arriving.wait()
        consume((0, sum(rows)), whole)
    else:
        whole = gather(op, transport, grad, rows, pieces, consume)
    return dx, whole
