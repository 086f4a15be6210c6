"""A column-parallel linear on sequence-sharded input, with the gather hidden behind the product.

    y_i     = X W_i^T + b_i                          X = all_gather(x) along the first dimension
    dx      = reduce_scatter(sum over i of dy_i W_i)
    dW_i    = dy_i^T X,     db_i = sum over rows of dy_i

Forward: own rows are multiplied first, while the next ones arrive (``_overlap``). Backward, "bulk": X is gathered again
(it was not kept: only x is saved) while dx is multiplied, and dx is scattered while dW is. Whole collectives behind
whole products cost the products nothing, so the backward is never cut into pieces.

Several weights share one gather: queries, keys and values, or the two halves of a gated MLP. Partial sums of dx travel
once, in the dtype of x, and are added in rank order in fp32: the result does not depend on ``overlap`` but for how
products of other shapes round, and has the same bits on every run. Sources: Korthikanti et al., arXiv:2205.05198
(sequence parallelism); Wang et al., ASPLOS 2023, doi:10.1145/3567955.3567959 (decomposed collectives).
"""

from collections.abc import Callable, Sequence
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.group_checks import check_sizes
from parallel_ops.comm import all_gather
from parallel_ops.comm.consistency import communicates
from parallel_ops.comm.primitives import sum_in_rank_order
from parallel_ops.comm.transport.base import Transport
from parallel_ops.tensor_parallel.linear.autograd import (
    Factors,
    GroupCall,
    LinearOp,
    as_list,
    matrix,
    multiply,
    rows_of,
)
from parallel_ops.tensor_parallel.linear.overlap import Span, gather, start_gather, start_scatter
from parallel_ops.tensor_parallel.linear.overlap_plan import OFF, Overlap
from parallel_ops.tensor_parallel.linear.weight_gradients import DeferredWeightGradients, Target

_NAME = "all_gather_linear"


@overload
def all_gather_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup | None,
    overlap: Overlap = ...,
    sizes: Sequence[int] | None = None,
    main_grad: Target = None,
    deferred: DeferredWeightGradients | None = None,
) -> Tensor: ...


@overload
def all_gather_linear(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] | None = None,
    *,
    group: ProcessGroup | None,
    overlap: Overlap = ...,
    sizes: Sequence[int] | None = None,
    main_grad: Sequence[Target] | None = None,
    deferred: DeferredWeightGradients | None = None,
) -> tuple[Tensor, ...]: ...


def all_gather_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None = None,
    *,
    group: ProcessGroup | None,
    overlap: Overlap = "auto",
    sizes: Sequence[int] | None = None,
    main_grad: Target | Sequence[Target] = None,
    deferred: DeferredWeightGradients | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``F.linear(all_gather(x), weight, bias)``, the gather overlapped with the product.

    Args:
        x: ``[s_r, H]`` or ``[s_r, ..., H]``, this rank's rows; float32, float16, bfloat16 or float64.
        weight: ``[N, H]``, this rank's output features, dtype and device of ``x``; or several, which share the gather.
        bias: ``[N]``, or one for each weight; ``None`` for none.
        group: the ranks that share the sequence and the output features; ``None`` for one rank.
        overlap: ``"off"``: gather, then multiply; ``"bulk"``: so in the forward, and whole collectives behind whole
            products in the backward; a number: so many messages for each shard in the forward, bulk in the backward;
            ``"auto"``: what an analytic model and, on a GPU, a measurement find fastest (see ``_overlap_plan``); there
            the weights must have the same shapes on every rank.
        sizes: ``s_r`` of every rank, the same on every rank; ``None`` where all are equal.
        main_grad: ``[N, H]``, float32 (float64 for float64) or the weight's dtype, or one for each weight: the weight's
            gradient is added to it, and autograd gets none for the weight. Not under ``torch.compile`` or in DDP.
        deferred: the weight's gradient is computed, and x gathered for it, when this queue is told to. Likewise.

    Returns:
        ``[s, ..., N]``, s the sum of all ``s_r``; a tuple for several weights. Under autocast the inputs are cast to
        the autocast dtype.

    Raises:
        TypeError, ValueError: on every rank and before data moves, also where the ranks disagree on shapes, dtypes or
            options. On CPU every call is compared, on CUDA the first one of its kind.

    Sharding: x S(0) over group; weight, bias and y S(-1) of the output features (S(0) of weight). The gradient of x is
    complete and sharded like x; those of weight and bias are complete for this rank's features.
    """
    outputs = _op(
        x,
        as_list(weight),
        [] if bias is None else as_list(bias),
        None if main_grad is None else as_list(main_grad),
        deferred,
        group,
        overlap,
        lambda: check_sizes(_NAME, "sizes", sizes, group, 0, shard=x),
    )
    return outputs[0] if isinstance(weight, Tensor) else tuple(outputs)


def all_gather_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup | None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """The same in plain PyTorch: a collective, then a product."""
    return F.linear(all_gather(x, group, sizes=sizes), weight, bias)


def column_forward(
    transport: Transport | None,
    x: Tensor,
    sizes: Sequence[int],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    pieces: int,
) -> list[Tensor]:
    """``y_i = all_gather(x) W_i^T + b_i``, the gather in so many pieces or, with ``OFF``, before the products."""
    outputs = [x.new_empty((sum(sizes), *x.shape[1:-1], weight.shape[0])) for weight in weights]
    matrices, h, rows = [y.flatten(0, -2) for y in outputs], matrix(x), rows_of(sizes, x)

    def consume(span: Span, h: Tensor) -> None:
        if h.shape[0]:
            for weight, bias, y in zip(weights, biases, matrices, strict=True):
                multiply(h, weight, bias, y[slice(*span)])

    if transport is None:
        consume((0, h.shape[0]), h)
    elif pieces == OFF:
        whole, arriving = start_gather(_NAME, transport, h, rows)
        arriving.wait()
        consume((0, sum(rows)), whole)
    else:
        gather(_NAME, transport, h, rows, pieces, consume)
    return outputs


def column_backward(
    transport: Transport | None,
    grads: Sequence[Tensor],
    x: Tensor,
    sizes: Sequence[int],
    weights: Sequence[Tensor],
    *,
    bulk: bool,
    needs_x: bool,
    products: Callable[[Tensor], None] | None,
) -> Tensor | None:
    """``dx = reduce_scatter(sum of dy_i W_i)``, and ``products(all_gather(x))``; each only where it is wanted.

    In bulk, x is gathered again while dx is multiplied, and dx is scattered while the products are made.
    """
    if transport is None:
        if products is not None:
            products(matrix(x))
        return _input_gradient(grads, weights, x.shape) if needs_x else None
    gathering = scattering = None
    rows = rows_of(sizes, x)
    if products is not None:
        gathering = start_gather(_NAME, transport, matrix(x), rows)
        if not bulk:
            gathering[1].wait()
    if needs_x:
        dx = _input_gradient(grads, weights, (sum(rows), x.shape[-1]))
        scattering = start_scatter(_NAME, transport, dx, rows)
        if not bulk:
            scattering[1].wait()
    if gathering is not None and products is not None:
        gathering[1].wait()
        products(gathering[0])
    if scattering is None:
        return None
    scattering[1].wait()
    return sum_in_rank_order([part.view(x.shape) for part in scattering[0]])


def _input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    total = grads[0].new_empty(shape)
    rows = total.flatten(0, -2)
    torch.mm(grads[0], weights[0], out=rows)
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        rows.addmm_(grad, weight)
    return total


@communicates
def _forward(call: GroupCall, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    each: list[Tensor | None] = [*biases] if biases else [None] * len(weights)
    transport = call.transport()

    def run(pieces: int) -> list[Tensor]:
        return column_forward(transport, x, call.sizes, weights, each, pieces)

    if transport is None:
        return run(OFF)
    call.check_consistency(
        transport, x, (x.shape[1:], len(weights), len(biases)), lambda: f"x of {list(x.shape)}", weights
    )
    columns = sum(w.shape[0] for w in weights)
    return run(call.pieces("gather", transport, x, columns, x.shape[-1], run))


def _gradients(
    call: GroupCall, grads: list[Tensor], x: Tensor, weights: list[Tensor], factors: Factors
) -> tuple[Tensor | None, list[Tensor]]:
    dys = [matrix(g) for g in grads]
    dx = column_backward(
        call.transport(),
        dys,
        x,
        call.sizes,
        weights,
        bulk=call.bulk(x.device),
        needs_x=call.needs[0],
        products=(lambda whole: factors(dys, whole)) if any(call.needs_weights(len(weights))) else None,
    )
    return dx, dys


_op = LinearOp(_NAME, forward=_forward, gradients=_gradients, rows=lambda call: sum(call.sizes))
