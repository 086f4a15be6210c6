"""A column-parallel linear on sequence-sharded input, whose all-gather overlaps with the matmul.

    y_i     = X W_i^T + b_i                          X = all_gather(x) along the first dimension
    dx      = reduce_scatter(sum over i of dy_i W_i)
    dW_i    = dy_i^T X,     db_i = sum over rows of dy_i

Forward: with chunks, this rank's rows are multiplied first, while the next ones arrive (``chunked.py``). Backward: X is
gathered again, since only x is saved, while dx is computed, and dx is scattered while dW is computed. Whole collectives
beside whole matmuls do not slow the matmuls, so the backward is never cut into chunks.

Several weights share one gather: queries, keys and values, or the two halves of a gated MLP. Partial sums of dx are
sent once, in the dtype of x, and added in rank order in fp32 (unless ``grad_reduce="backend"``). So the result has the
same bits on every run, and depends on ``overlap`` only by how matmuls of other shapes round. Sources: Korthikanti et
al., arXiv:2205.05198 (sequence parallelism); Wang et al., ASPLOS 2023, doi:10.1145/3567955.3567959 (decomposed
collectives).
"""

from collections.abc import Callable, Sequence
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.compat import resolve_group
from parallel_ops._internal.distributed.groups import GradReduce, check_sizes
from parallel_ops._internal.gradients.weight_gradients import DeferredWeightGradients, Target
from parallel_ops.comm import all_gather
from parallel_ops.comm.consistency import communicates
from parallel_ops.comm.transport.base import Transport
from parallel_ops.tensor_parallel.linear import symmetric
from parallel_ops.tensor_parallel.linear.autograd import LinearOp
from parallel_ops.tensor_parallel.linear.call import GroupCall, LinearOptions, Overlap, WeightGradients, rows_of
from parallel_ops.tensor_parallel.linear.choose import OFF
from parallel_ops.tensor_parallel.linear.chunked import Span, gather, matrix, multiply, start_gather, start_scatter

_NAME = "all_gather_linear"


@overload
def all_gather_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup | None,
    overlap: Overlap = ...,
    grad_reduce: GradReduce = ...,
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
    grad_reduce: GradReduce = ...,
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
    grad_reduce: GradReduce = "fp32",
    sizes: Sequence[int] | None = None,
    main_grad: Target | Sequence[Target] = None,
    deferred: DeferredWeightGradients | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``F.linear(all_gather(x), weight, bias)``, the all-gather overlapped with the matmul.

    Args:
        x: ``[s_r, H]`` or ``[s_r, ..., H]``, this rank's rows; float32, float16, bfloat16 or float64.
        weight: ``[N, H]``, this rank's output features, dtype and device of ``x``; or several, which share the gather.
        bias: ``[N]``, or one for each weight; ``None`` for none.
        group: the ranks that share the sequence and the output features; ``None`` for one rank.
        overlap: how communication overlaps with the matmuls.
            ``"off"``: whole collectives; the backward runs them beside whole matmuls, as Megatron-LM does.
            A number: each rank's shard is sent in that many chunks in the forward, multiplied as they arrive; the
            backward is as with ``"off"``.
            ``"symmetric"``: on GPUs of one node that read each other's memory, torch's ``fused_all_gather_matmul``,
            with the bias added to its result; 16 bits, equal shards; the backward is as with ``"off"``.
            ``"auto"``: ``"off"`` or 1, 2 or 4 chunks. On a GPU they are timed at the first call of a kind, 16 runs of
            the forward, and ``"off"`` is taken where nothing gains 2 %; the weights must then have the same shapes on
            every rank. In deterministic mode a rule decides (``choose.py``), on a CPU ``"off"``.
        grad_reduce: how the partial sums of the ranks are added.
            ``"fp32"``: each is sent once, as it is, and added in rank order in fp32 with one rounding: the same bits
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
    options = LinearOptions(group, overlap, grad_reduce, sizes, main_grad, deferred)
    return _op(x, weight, bias, options)


def all_gather_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup | None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """``all_gather_linear`` in plain PyTorch: a collective, then a matmul."""
    return F.linear(all_gather(x, group, sizes=sizes), weight, bias)


def column_forward(
    transport: Transport | None,
    x: Tensor,
    sizes: Sequence[int],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    chunks: int,
) -> list[Tensor]:
    """``y_i = all_gather(x) W_i^T + b_i``; shards arrive in ``chunks`` chunks, with ``OFF`` all before the matmuls."""
    outputs = [x.new_empty((sum(sizes), *x.shape[1:-1], weight.shape[0])) for weight in weights]
    matrices, h, rows = [y.flatten(0, -2) for y in outputs], matrix(x), rows_of(sizes, x)

    def consume(span: Span, h: Tensor) -> None:
        if h.shape[0]:
            for weight, bias, y in zip(weights, biases, matrices, strict=True):
                multiply(h, weight, bias, y[slice(*span)])

    if transport is None:
        consume((0, h.shape[0]), h)
    elif chunks == OFF:
        whole, arriving = start_gather(_NAME, transport, h, rows)
        arriving.wait()
        consume((0, sum(rows)), whole)
    else:
        gather(_NAME, transport, h, rows, chunks, consume)
    return outputs


def column_backward(
    transport: Transport | None,
    grads: Sequence[Tensor],
    x: Tensor,
    sizes: Sequence[int],
    weights: Sequence[Tensor],
    *,
    exact: bool = True,
    needs_x: bool,
    products: Callable[[Tensor], None] | None,
) -> Tensor | None:
    """Returns ``dx = reduce_scatter(sum of dy_i W_i)`` if ``needs_x``; calls ``products(all_gather(x))`` if given.

    x is gathered while dx is computed, and dx is scattered while ``products`` runs.
    """
    if transport is None:
        if products is not None:
            products(matrix(x))
        return _input_gradient(grads, weights, x.new_empty(x.shape)) if needs_x else None
    gathering = scattering = None
    rows = rows_of(sizes, x)
    if products is not None:
        gathering = start_gather(_NAME, transport, matrix(x), rows)
    if needs_x:
        dx = _input_gradient(grads, weights, x.new_empty((sum(rows), x.shape[-1])))
        scattering = start_scatter(_NAME, transport, dx, rows, x.shape, exact=exact)
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


class _AllGatherLinear(LinearOp):
    def split(self, x: Tensor, sizes: Sequence[int] | None, group: ProcessGroup | None) -> list[int]:
        return check_sizes(_NAME, "sizes", sizes, group, 0, shard=x)

    @communicates
    def forward(self, call: GroupCall, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        each: list[Tensor | None] = [*biases] if biases else [None] * len(weights)
        transport = call.transport(x.device)

        def run(chunks: int) -> list[Tensor]:
            return column_forward(transport, x, call.sizes, weights, each, chunks)

        if transport is None:
            return run(OFF)
        same = x.shape[1:], len(weights), len(biases)
        call.check_consistency(transport, x, same, lambda: f"x of {list(x.shape)}", weights)
        if call.symmetric:
            symmetric.check(_NAME, resolve_group(call.group), x, call.sizes)
            _, products = symmetric.gather_and_multiply(resolve_group(call.group), matrix(x), weights, each)
            return [symmetric.owned(y, (sum(call.sizes), *x.shape[1:-1], y.shape[1])) for y in products]
        return run(call.chunks("gather", transport, x, sum(w.shape[0] for w in weights), x.shape[-1], run))

    def input_gradient(
        self, call: GroupCall, grads: list[Tensor], x: Tensor, weights: list[Tensor], products: WeightGradients
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
            exact=call.exact,
            needs_x=call.needs[0],
            products=(lambda whole: products(dys, whole)) if any(call.needs_weights(len(weights))) else None,
        )
        return dx, dys


_op = _AllGatherLinear(_NAME)
