"""A column-parallel linear on sequence-sharded input, whose all-gather overlaps with the product.

    y_i     = X W_i^T + b_i                          X = all_gather(x) along the first dimension
    dx      = reduce_scatter(sum over i of dy_i W_i)
    dW_i    = dy_i^T X,     db_i = sum over rows of dy_i

Forward: this rank's rows are multiplied first, while the next ones arrive (``overlap.py``). Backward ("bulk"): X is
gathered again, since only x is saved, while dx is computed, and dx is scattered while dW is computed. Whole collectives
beside whole products do not slow the products, so the backward is never cut into pieces.

Several weights share one gather: queries, keys and values, or the two halves of a gated MLP. Partial sums of dx are
sent once, in the dtype of x, and added in rank order in fp32 (unless ``reduction="backend"``). So the result has the
same bits on every run, and depends on ``overlap`` only by how products of other shapes round. Sources: Korthikanti et
al., arXiv:2205.05198 (sequence parallelism); Wang et al., ASPLOS 2023, doi:10.1145/3567955.3567959 (decomposed
collectives).
"""

from collections.abc import Callable, Sequence
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.group_checks import check_sizes
from parallel_ops._internal.overlap_schedule import FUSED, GATED, OFF
from parallel_ops._internal.weight_gradients import DeferredWeightGradients, Target
from parallel_ops.comm import all_gather
from parallel_ops.comm.consistency import communicates
from parallel_ops.comm.transport.base import Transport
from parallel_ops.tensor_parallel.linear.autograd import Factors, LinearOp, as_list
from parallel_ops.tensor_parallel.linear.group_call import GroupCall, rows_of
from parallel_ops.tensor_parallel.linear.overlap import Span, gather, start_gather, start_scatter
from parallel_ops.tensor_parallel.linear.overlap_plan import Overlap, Reduction
from parallel_ops.tensor_parallel.linear.products import matrix, multiply
from parallel_ops.tensor_parallel.linear.pulled import gather_and_multiply

_NAME = "all_gather_linear"


@overload
def all_gather_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup | None,
    overlap: Overlap = ...,
    reduction: Reduction = ...,
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
    reduction: Reduction = ...,
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
    reduction: Reduction = "exact",
    sizes: Sequence[int] | None = None,
    main_grad: Target | Sequence[Target] = None,
    deferred: DeferredWeightGradients | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``F.linear(all_gather(x), weight, bias)``, the all-gather overlapped with the product.

    Args:
        x: ``[s_r, H]`` or ``[s_r, ..., H]``, this rank's rows; float32, float16, bfloat16 or float64.
        weight: ``[N, H]``, this rank's output features, dtype and device of ``x``; or several, which share the gather.
        bias: ``[N]``, or one for each weight; ``None`` for none.
        group: the ranks that share the sequence and the output features; ``None`` for one rank.
        overlap: how communication overlaps with the products.
            ``"off"``: gather, then multiply.
            ``"bulk"``: the same in the forward; in the backward, whole collectives beside whole products.
            A number: each shard is sent in that many pieces in the forward; bulk in the backward.
            ``"tapered"``: shards are sent whole and multiplied 1, 2 and 4 at a time, where messages are faster.
            ``"gated"``: copy engines pull the shards, and one product waits for them tile by tile; ``"fused"``: torch's
            ``fused_all_gather_matmul``, without bias; bulk in the backward. Both for GPUs of one node, 16 bits, equal
            shards.
            ``"auto"``: the fastest of these by an analytic model and, on a GPU, a measurement at the first call
            (``overlap_plan.py``); the weights must then have the same shapes on every rank. ``"gated"`` and ``"fused"``
            are among them in groups that ``allow_pulls`` names.
        reduction: how the partial sums of the ranks are added.
            ``"exact"``: each is sent once, as it is, and added in rank order in fp32 with one rounding: the same bits
            on every run and over every backend.
            ``"backend"``: those of the gradient of x by the reduce-scatter of the group's backend, in the dtype of
            ``x`` and in its order, as Megatron-LM does; where ``sizes`` differ, the exact sum.
        sizes: ``s_r`` of every rank, the same on every rank; ``None`` if all are equal.
        main_grad: a tensor to which the weight's gradient is added (autograd gets none for the weight): ``[N, H]``,
            float32 (float64 for float64) or the weight's dtype; or one for each weight. Not under ``torch.compile`` or
            in DDP.
        deferred: a queue that computes the weight's gradient later, and gathers x for it; same limits as ``main_grad``.

    Returns:
        ``[s, ..., N]``, s the sum of all ``s_r``; a tuple for several weights. Under autocast the inputs are cast to
        the autocast dtype.

    Raises:
        TypeError, ValueError: on every rank and before communication starts, also if ranks disagree on shapes, dtypes
            or options. On CPU every call is compared, on CUDA the first one of its kind.

    Sharding: x S(0) over group; weight, bias and y S(-1) of the output features (S(0) of weight). The gradient of x is
    complete and sharded like x; those of weight and bias are complete for this rank's features.

    Examples:
        >>> import torch
        >>> from parallel_ops import all_gather_linear
        >>> x, weight = torch.randn(128, 2, 64), torch.randn(256, 64)  # this rank's tokens and output features
        >>> all_gather_linear(x, weight, group=None).shape  # group=mesh["tp"].get_group() under torchrun
        torch.Size([128, 2, 256])
    """
    outputs = _op(
        x,
        as_list(weight),
        [] if bias is None else as_list(bias),
        None if main_grad is None else as_list(main_grad),
        deferred,
        group,
        overlap,
        reduction,
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
    """``all_gather_linear`` in plain PyTorch: a collective, then a product."""
    return F.linear(all_gather(x, group, sizes=sizes), weight, bias)


def column_forward(
    transport: Transport | None,
    x: Tensor,
    sizes: Sequence[int],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    pieces: int,
    group: ProcessGroup | None = None,
) -> list[Tensor]:
    """``y_i = all_gather(x) W_i^T + b_i``; shards arrive in ``pieces`` pieces, with ``OFF`` all before the products.

    ``group``: that of ``transport``, for ``GATED`` and ``FUSED``.
    """
    outputs = [x.new_empty((sum(sizes), *x.shape[1:-1], weight.shape[0])) for weight in weights]
    matrices, h, rows = [y.flatten(0, -2) for y in outputs], matrix(x), rows_of(sizes, x)

    def consume(span: Span, h: Tensor) -> None:
        if h.shape[0]:
            for weight, bias, y in zip(weights, biases, matrices, strict=True):
                multiply(h, weight, bias, y[slice(*span)])

    if transport is None:
        consume((0, h.shape[0]), h)
        return outputs
    if pieces in (GATED, FUSED) and group is not None:
        gather_and_multiply(pieces, group, h, weights, biases, matrices)
        return outputs
    with transport.workspace(_NAME) as memory:
        if pieces == OFF:
            whole, arriving = start_gather(_NAME, transport, h, rows, memory)
            arriving.wait()
            consume((0, sum(rows)), whole)
        else:
            gather(_NAME, transport, h, rows, pieces, consume, memory)
    return outputs


def column_backward(
    transport: Transport | None,
    grads: Sequence[Tensor],
    x: Tensor,
    sizes: Sequence[int],
    weights: Sequence[Tensor],
    *,
    bulk: bool,
    exact: bool = True,
    needs_x: bool,
    products: Callable[[Tensor], None] | None,
) -> Tensor | None:
    """Returns ``dx = reduce_scatter(sum of dy_i W_i)`` if ``needs_x``; calls ``products(all_gather(x))`` if given.

    With ``bulk``, x is gathered while dx is computed, and dx is scattered while ``products`` runs.
    """
    if transport is None:
        if products is not None:
            products(matrix(x))
        return _input_gradient(grads, weights, x.new_empty(x.shape)) if needs_x else None
    gathering = scattering = None
    rows = rows_of(sizes, x)
    with transport.workspace(_NAME) as memory:
        if products is not None:
            gathering = start_gather(_NAME, transport, matrix(x), rows, memory)
            if not bulk:
                gathering[1].wait()
        if needs_x:
            dx = memory.empty((sum(rows), x.shape[-1]), x)
            _input_gradient(grads, weights, dx)
            scattering = start_scatter(_NAME, transport, dx, rows, x.shape, exact=exact, memory=memory)
            if not bulk:
                scattering.wait()
        if gathering is not None and products is not None:
            gathering[1].wait()
            products(gathering[0])
        return None if scattering is None else scattering.total()


def _input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor], total: Tensor) -> Tensor:
    rows = total.flatten(0, -2)
    torch.mm(grads[0], weights[0], out=rows)
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        rows.addmm_(grad, weight)
    return total


@communicates
def _forward(call: GroupCall, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    each: list[Tensor | None] = [*biases] if biases else [None] * len(weights)
    transport = call.transport(x.device)

    def run(pieces: int) -> list[Tensor]:
        return column_forward(transport, x, call.sizes, weights, each, pieces, call.process_group())

    if transport is None:
        return run(OFF)
    call.check_consistency(
        transport, x, (x.shape[1:], len(weights), len(biases)), lambda: f"x of {list(x.shape)}", weights
    )
    call.check_pulls(x, bias=bool(biases))
    columns = sum(w.shape[0] for w in weights)
    return run(call.pieces("gather", transport, x, columns, x.shape[-1], run, bias=bool(biases)))


def _gradients(
    call: GroupCall, grads: list[Tensor], x: Tensor, weights: list[Tensor], factors: Factors
) -> tuple[Tensor | None, list[Tensor]]:
    dys, transport = [matrix(g) for g in grads], call.transport(x.device)
    if transport is not None and any(call.needs[: 1 + len(weights)]):
        call.check_backward(grads)
    dx = column_backward(
        transport,
        dys,
        x,
        call.sizes,
        weights,
        bulk=call.bulk(x.device),
        exact=call.exact,
        needs_x=call.needs[0],
        products=(lambda whole: factors(dys, whole)) if any(call.needs_weights(len(weights))) else None,
    )
    return dx, dys


_op = LinearOp(_NAME, forward=_forward, gradients=_gradients, rows=lambda call: sum(call.sizes))
