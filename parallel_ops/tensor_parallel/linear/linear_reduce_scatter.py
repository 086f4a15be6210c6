"""A row-parallel linear with sequence-sharded output, whose reduce-scatter overlaps with the matmul.

    y       = reduce_scatter(x W^T) + b              along the first dimension
    dx      = dY W                                   dY = all_gather(dy)
    dW      = dY^T x,       db = sum over rows of dY

Forward: with chunks, the rows of the output that another rank owns are sent as soon as they are computed; this rank's
own rows are computed last, while the others are sent (``chunked.py``). Each rank receives the partial sums of its rows,
in the dtype of x, adds them in rank order in fp32, then the bias, and rounds once. With ``grad_reduce="backend"`` the
backend adds. Backward: with chunks, this rank's rows of dY are multiplied first, while the next ones arrive; dY is then
complete, as dW needs it.

Sources: Korthikanti et al., arXiv:2205.05198 (sequence parallelism); Wang et al., ASPLOS 2023,
doi:10.1145/3567955.3567959 (decomposed collectives).
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.compat import resolve_group
from parallel_ops._internal.distributed.groups import GradReduce, check_sizes, group_rank
from parallel_ops._internal.gradients.weight_gradients import DeferredWeightGradients, Target
from parallel_ops.comm import reduce_scatter
from parallel_ops.comm.consistency import communicates, propagate_errors
from parallel_ops.comm.sum_partials import sum_partials
from parallel_ops.comm.transport.base import Transport
from parallel_ops.tensor_parallel.linear import symmetric
from parallel_ops.tensor_parallel.linear.autograd import LinearOp
from parallel_ops.tensor_parallel.linear.call import GroupCall, LinearOptions, Overlap, WeightGradients, rows_of
from parallel_ops.tensor_parallel.linear.choose import OFF
from parallel_ops.tensor_parallel.linear.chunked import (
    Span,
    gather,
    matrix,
    multiply,
    scatter,
    start_gather,
    start_scatter,
)

_NAME = "linear_reduce_scatter"


def linear_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup | None,
    overlap: Overlap = "auto",
    grad_reduce: GradReduce = "fp32",
    sizes: Sequence[int] | None = None,
    main_grad: Target = None,
    deferred: DeferredWeightGradients | None = None,
    bias_gradient: Literal["complete", "partial"] = "complete",
) -> Tensor:
    """``reduce_scatter(F.linear(x, weight)) + bias``, the reduction overlapped with the matmul.

    Args:
        x: ``[s, K]`` or ``[s, ..., K]``, all rows of this rank's input features; float32, float16, bfloat16 or float64.
        weight: ``[N, K]``, this rank's input features, dtype and device of ``x``.
        bias: ``[N]``, the same on every rank; added once, after the sum.
        group: the ranks that share the input features; ``None`` for one rank.
        overlap: how communication overlaps with the matmuls.
            ``"off"``: multiply, then reduce (no second matmul could run beside the collective); gather, then multiply
            in the backward.
            A number: each rank's rows are sent in that many chunks, forward as soon as they are computed, backward
            multiplied as they arrive.
            ``"symmetric"``: on GPUs of one node that read each other's memory, torch's ``fused_matmul_reduce_scatter``,
            whose sum has one rounding in its own order, with the bias added to it; the backward gathers as
            ``all_gather_linear`` does; 16 bits, equal shards.
            ``"auto"``: ``"off"`` or 1, 2 or 4 chunks. On a GPU they are timed at the first call of a kind, 16 runs of
            the forward and 16 of the backward's gather, and ``"off"`` is taken where nothing gains 2 %; the weight must
            then have the same shape on every rank. In deterministic mode a rule decides (``choose.py``), on a CPU
            ``"off"``.
        grad_reduce: how the partial sums of the ranks are added.
            ``"fp32"``: each is sent once, as it is, and added in rank order in fp32 with one rounding: the same bits
            on every run and over every backend.
            ``"backend"``: by the reduce-scatter of the group's backend, in the dtype of ``x`` and in its order, as
            Megatron-LM does; the bias is added to the rounded sum. In chunks, and where ``sizes`` differ, the exact
            sum.
        sizes: the rows of y on every rank, the same on every rank; ``None`` for equal parts of ``s``.
        main_grad: a tensor to which the weight's gradient is added (autograd gets none for the weight): ``[N, K]``,
            float32 (float64 for float64) or the weight's dtype. Not under ``torch.compile`` or in DDP.
        deferred: a queue that computes the weight's gradient later, and gathers the gradient of y for it; same limits
            as ``main_grad``.
        bias_gradient: ``"complete"``, or ``"partial"`` for the gradient of this rank's rows only, if the caller sums it
            over the ranks with those of other parameters, as Megatron-LM does.

    Returns:
        ``[s_r, ..., N]``, this rank's rows. Under autocast the inputs are cast to the autocast dtype.

    Raises:
        TypeError, ValueError: on every rank and before communication starts, also if ranks disagree on shapes, dtypes
            or options. On CPU every call is compared, on CUDA the first one of its kind.

    Sharding: x S(-1) over group and weight S(1); bias replicated; y S(0). The gradients of x and weight are complete
    for this rank's features, that of bias is complete and the same on every rank, unless ``"partial"``.

    Examples:
        >>> import torch
        >>> from parallel_ops import linear_reduce_scatter
        >>> x, weight = torch.randn(128, 2, 256), torch.randn(64, 256)  # all tokens, this rank's input features
        >>> linear_reduce_scatter(x, weight, group=None).shape  # group=mesh["tp"].get_group() under torchrun
        torch.Size([128, 2, 64])
    """
    if bias_gradient not in ("complete", "partial"):
        with propagate_errors(_NAME, group, x, weight, checked=True):
            raise ValueError(f"{_NAME}: bias_gradient must be 'complete' or 'partial', got {bias_gradient!r}")
    partial = bias_gradient == "partial"
    options = LinearOptions(group, overlap, grad_reduce, sizes, main_grad, deferred, partial_bias=partial)
    return _op(x, weight, bias, options)


def linear_reduce_scatter_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup | None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """``linear_reduce_scatter`` in plain PyTorch, with a partial gradient of bias: a matmul, then a collective."""
    y = reduce_scatter(F.linear(x, weight), group, sizes=sizes)
    return y if bias is None else y + bias


def row_forward(
    transport: Transport | None, x: Tensor, sizes: Sequence[int], weight: Tensor, bias: Tensor | None, chunks: int,
    *, exact: bool = True,
) -> Tensor:  # fmt: skip
    """``y = reduce_scatter(x W^T) + b``; shards are sent in ``chunks`` chunks, with ``OFF`` all after the matmul."""
    h, rows, inner = matrix(x), rows_of(sizes, x), x.shape[1:-1]
    if transport is None:
        y = x.new_empty((*x.shape[:-1], weight.shape[0]))
        multiply(h, weight, bias, y.flatten(0, -2))
        return y
    shape = (sizes[transport.rank], *inner, weight.shape[0])
    if chunks == OFF:
        return start_scatter(_NAME, transport, multiply(h, weight, None), rows, shape, exact=exact).total(bias)

    def produce(span: Span, out: Tensor | None) -> Tensor:
        return multiply(h[slice(*span)], weight, None, out)

    parts = scatter(_NAME, transport, rows, chunks, x.new_empty((0, weight.shape[0])), produce)
    return sum_partials(parts.view(transport.size, *shape), bias)


def row_backward(
    transport: Transport | None, grad: Tensor, sizes: Sequence[int], weight: Tensor, chunks: int, *, needs_x: bool
) -> tuple[Tensor | None, Tensor]:
    """``(dY W, dY)`` with ``dY = all_gather(dy)`` as a matrix; the first is ``None`` unless ``needs_x``."""
    dx = grad.new_empty((sum(sizes), *grad.shape[1:-1], weight.shape[1])) if needs_x else None
    dy, rows = matrix(grad), rows_of(sizes, grad)

    def consume(span: Span, dy: Tensor) -> None:
        if dx is not None and dy.shape[0]:
            torch.mm(dy, weight, out=dx.flatten(0, -2)[slice(*span)])

    if transport is None:
        consume((0, sum(rows)), dy)
        return dx, dy
    if chunks == OFF or dx is None:
        whole, arriving = start_gather(_NAME, transport, dy, rows)
        arriving.wait()
        consume((0, sum(rows)), whole)
        return dx, whole
    return dx, gather(_NAME, transport, dy, rows, chunks, consume)


class _LinearReduceScatter(LinearOp):
    gathers_gradient = True

    def split(self, x: Tensor, sizes: Sequence[int] | None, group: ProcessGroup | None) -> list[int]:
        return check_sizes(_NAME, "sizes", sizes, group, 0, whole=x)

    def rows(self, call: GroupCall) -> int:
        return call.sizes[0 if call.group is None else group_rank(resolve_group(call.group))]

    @communicates
    def forward(self, call: GroupCall, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        (weight,), bias, transport = weights, biases[0] if biases else None, call.transport(x.device)

        def run(chunks: int) -> Tensor:
            return row_forward(transport, x, call.sizes, weight, bias, chunks, exact=call.exact)

        if transport is None:
            return [run(OFF)]
        same = (x.shape[:-1], weight.shape[0], len(biases))
        call.check_consistency(
            transport, x, same, lambda: f"x of {list(x.shape)}, weight of {list(weight.shape)}", weights
        )
        if call.symmetric:
            symmetric.check(_NAME, resolve_group(call.group), x.new_empty((0, weight.shape[0])), call.sizes)
            total = symmetric.multiply_and_scatter(resolve_group(call.group), matrix(x), weight)
            y = symmetric.owned(total, (call.sizes[transport.rank], *x.shape[1:-1], weight.shape[0]))
            return [y if bias is None else y.add_(bias)]
        return [run(call.chunks("scatter", transport, x, weight.shape[0], weight.shape[1], run))]

    def input_gradient(
        self, call: GroupCall, grads: list[Tensor], x: Tensor, weights: list[Tensor], products: WeightGradients
    ) -> tuple[Tensor | None, list[Tensor]]:
        (grad,), (weight,), transport = grads, weights, call.transport(x.device)
        if not any(call.needs[:2] if call.partial_bias else call.needs):
            return None, []
        if transport is not None:
            call.check_backward(grads)

        def run(chunks: int) -> tuple[Tensor | None, Tensor]:
            return row_backward(transport, grad, call.sizes, weight, chunks, needs_x=call.needs[0])

        if transport is None or not call.needs[0]:
            dx, whole = run(OFF)
        elif call.symmetric:
            whole, (dx,) = symmetric.gather_and_multiply(resolve_group(call.group), matrix(grad), [weight.t()], [None])
            dx = dx.view(x.shape)
        else:
            dx, whole = run(call.chunks("gather", transport, grad, weight.shape[1], weight.shape[0], run))
        if call.needs[1]:
            products([whole], matrix(x))
        return dx, [whole]


_op = _LinearReduceScatter(_NAME)
