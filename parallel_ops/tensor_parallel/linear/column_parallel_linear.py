"""A column-parallel linear on replicated input, whose backward overlaps the all-reduce of its gradient.

    y_i     = X W_i^T + b_i
    dX      = all_reduce(sum over i of dy_i W_i)
    dW_i    = dy_i^T X,     db_i = sum over rows of dy_i

Forward: no communication. Backward: the all-reduce is a reduce-scatter and an all-gather of rows. With chunks, the rows
of dX that another rank sums are sent as soon as they are computed, this rank's own rows are computed last
(``chunked.py``). Each rank adds the partials of its rows in rank order in fp32 and rounds once; the sums are gathered
while dW is computed. Without chunks dX is computed first, and its partials are exchanged while dW is computed: of
several weights that of the first ones, with the others beside the gather. One weight's is not cut: two halves may have
other bits than the whole. With ``grad_reduce="backend"`` and no chunks it is the backend's one all-reduce, which runs
while dW is computed.

Sources: Shoeybi et al., arXiv:1909.08053 (their f, and Megatron-LM's asynchronous all-reduce); Wang et al., ASPLOS
2023, doi:10.1145/3567955.3567959 (decomposed collectives).
"""

from collections.abc import Callable, Sequence
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.groups import GradReduce
from parallel_ops._internal.gradients.weight_gradients import DeferredWeightGradients, Target
from parallel_ops.comm import copy_to_group
from parallel_ops.comm.consistency import communicates
from parallel_ops.comm.sum_partials import sum_partials
from parallel_ops.comm.transport.base import Handle, Transport
from parallel_ops.tensor_parallel.linear.all_gather_linear import column_forward
from parallel_ops.tensor_parallel.linear.autograd import LinearOp
from parallel_ops.tensor_parallel.linear.call import GroupCall, LinearOptions, Overlap, WeightGradients, rows_of
from parallel_ops.tensor_parallel.linear.choose import OFF
from parallel_ops.tensor_parallel.linear.chunked import Span, matrix, scatter, split, start_gather, start_scatter

_NAME = "column_parallel_linear"


@overload
def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup | None,
    overlap: Overlap = "auto",
    grad_reduce: GradReduce = "fp32",
    main_grad: Target = None,
    deferred: DeferredWeightGradients | None = None,
) -> Tensor: ...
@overload
def column_parallel_linear(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] | None = None,
    *,
    group: ProcessGroup | None,
    overlap: Overlap = "auto",
    grad_reduce: GradReduce = "fp32",
    main_grad: Sequence[Target] | None = None,
    deferred: DeferredWeightGradients | None = None,
) -> tuple[Tensor, ...]: ...
def column_parallel_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None = None,
    *,
    group: ProcessGroup | None,
    overlap: Overlap = "auto",
    grad_reduce: GradReduce = "fp32",
    main_grad: Target | Sequence[Target] = None,
    deferred: DeferredWeightGradients | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``F.linear(copy_to_group(x), weight, bias)``, the all-reduce of its gradient overlapped with the matmuls.

    Args:
        x: ``[s, H]`` or ``[s, ..., H]``, the same on every rank; float32, float16, bfloat16 or float64.
        weight: ``[N, H]``, this rank's output features, dtype and device of ``x``; or several of one ``x``.
        bias: ``[N]``, or one for each weight; ``None`` for none.
        group: the ranks that share the output features; ``None`` for one rank.
        overlap: how the backward overlaps communication with the matmuls.
            ``"off"``: partial sums are exchanged while dW is computed, of several weights that of the first ones, and
            the sums are gathered beside the others; or the backend's all-reduce runs while dW is computed.
            A number: each rank's rows of dX are sent in that many chunks while dX is computed, and the sums are
            gathered while dW is.
            ``"symmetric"``: as ``"off"``.
            ``"auto"``: ``"off"`` or 1, 2 or 4 chunks. On a GPU, with ``"fp32"``, they are timed at the first backward
            of a kind, 16 runs of dX and its sum, and ``"off"`` is taken where nothing gains 2 %; the weights must then
            have the same shapes on every rank. In deterministic mode a rule decides (``choose.py``); on a CPU it is
            ``"off"``.
        grad_reduce: how the partial sums of the gradient of x are added.
            ``"fp32"``: each is sent once, as it is, and added in rank order in fp32 with one rounding: the same bits
            on every run and over every backend.
            ``"backend"``: by the all-reduce of the group's backend, in the dtype of ``x`` and in its order, as
            Megatron-LM does. In chunks the exact sum.
        main_grad: a tensor to which the weight's gradient is added (autograd gets none for the weight): ``[N, H]``,
            float32 (float64 for float64) or the weight's dtype; or one for each weight. Not under ``torch.compile`` or
            in DDP.
        deferred: a queue that computes the weight's gradient later; same limits as ``main_grad``.

    Returns:
        ``[s, ..., N]``; a tuple for several weights. Under autocast the inputs are cast to the autocast dtype.

    Raises:
        TypeError, ValueError: on every rank and before communication starts, also if ranks disagree on shapes, dtypes
            or options. On CPU every call with a gradient of x is compared, on CUDA the first one of its kind.

    Sharding: x replicated over group; weight, bias and y S(-1) of the output features (S(0) of weight). The gradient of
    x is complete and the same on every rank; those of weight and bias are complete for this rank's features.

    Examples:
        >>> import torch
        >>> from parallel_ops import column_parallel_linear
        >>> x, weight = torch.randn(128, 2, 64), torch.randn(256, 64)  # all tokens, this rank's output features
        >>> column_parallel_linear(x, weight, group=None).shape  # group=mesh["tp"].get_group() under torchrun
        torch.Size([128, 2, 256])
    """
    options = LinearOptions(group, overlap, grad_reduce, main_grad=main_grad, deferred=deferred)
    return _op(x, weight, bias, options)


def column_parallel_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: ProcessGroup | None
) -> Tensor:
    """``column_parallel_linear`` in plain PyTorch: a matmul; in the backward, a collective after the matmuls."""
    return F.linear(copy_to_group(x, group), weight, bias)


def _start_sum(
    call: GroupCall, transport: Transport, x: Tensor, chunks: int, partial: Callable[[Span, Tensor | None], Tensor],
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Handle]:  # fmt: skip
    """The sum of ``partial`` of all ranks as a matrix, complete after ``handle.wait()``.

    ``meanwhile`` is called once whole partials are on their way to the ranks that add them; not with chunks, whose
    messages the matmuls of ``partial`` hide, nor where the backend has an all-reduce.
    """
    rows = rows_of(call.sizes, x)
    if chunks != OFF:
        own = sum_partials(scatter(_NAME, transport, rows, chunks, x.new_empty((0, x.shape[-1])), partial))
        return start_gather(_NAME, transport, own, rows)
    dx = partial((0, sum(rows)), None)
    if not call.exact and (handle := transport.all_reduce(_NAME, dx)) is not None:
        return dx, handle
    shape = (rows[transport.rank], x.shape[-1])
    exchange = start_scatter(_NAME, transport, dx, rows, shape, exact=call.exact)
    meanwhile()
    return start_gather(_NAME, transport, exchange.total(), rows)


def _beside_exchange(work: list[int]) -> int:
    """The number of weights, from the first, whose gradients are computed beside the exchange, for the work of each.

    Half of the work, as near as whole weights come: exchange and gather send the same number of bytes. One weight goes
    beside the exchange, which a rank that is late delays for all others.
    """
    return min(range(1, len(work) + 1), key=lambda n: (abs(2 * sum(work[:n]) - sum(work)), -n))


class _ColumnParallelLinear(LinearOp):
    def split(self, x: Tensor, sizes: Sequence[int] | None, group: ProcessGroup | None) -> list[int]:
        """Number of rows of the gradient that each rank sums; some are 0 if there are fewer rows than ranks."""
        return [end - start for start, end in split((0, x.shape[0]), 1 if group is None else group.size())]

    @communicates
    def forward(self, call: GroupCall, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        transport = call.transport(x.device)
        if transport is not None and call.needs[0]:  # else the backward sends nothing
            same = x.shape, len(weights), len(biases)
            call.check_consistency(transport, x, same, lambda: f"x of {list(x.shape)}", weights)
        each: list[Tensor | None] = [*biases] if biases else [None] * len(weights)
        return column_forward(None, x, [x.shape[0]], weights, each, OFF)

    def input_gradient(
        self, call: GroupCall, grads: list[Tensor], x: Tensor, weights: list[Tensor], products: WeightGradients
    ) -> tuple[Tensor | None, list[Tensor]]:
        dys, transport = [matrix(g) for g in grads], call.transport(x.device)
        needed, done = call.needs_weights(len(weights)), 0
        arriving = dx = None

        def partial(span: Span, out: Tensor | None) -> Tensor:
            total = x.new_empty((span[1] - span[0], x.shape[-1])) if out is None else out
            torch.mm(dys[0][slice(*span)], weights[0], out=total)
            for dy, weight in zip(dys[1:], weights[1:], strict=True):
                total.addmm_(dy[slice(*span)], weight)
            return total

        def first_products() -> None:
            nonlocal done
            if any(needed):
                done = _beside_exchange([w.shape[0] if need else 0 for w, need in zip(weights, needed, strict=True)])
                products(dys, matrix(x), slice(done))

        if call.needs[0] and transport is None:
            dx = partial((0, dys[0].shape[0]), None)
        elif call.needs[0] and transport is not None:
            call.check_backward(grads)

            def run(chunks: int) -> None:
                _start_sum(call, transport, x, chunks, partial)[1].wait()

            chunks = call.overlap if call.overlap > OFF else OFF
            if call.exact and not call.symmetric:
                # Else the backend's all-reduce runs beside dW, which chunks cannot beat by much.
                chunks = call.chunks("scatter", transport, x, x.shape[-1], sum(w.shape[0] for w in weights), run)
            dx, arriving = _start_sum(call, transport, x, chunks, partial, first_products)
        if any(needed[done:]):
            products(dys, matrix(x), slice(done, None))
        if arriving is not None:
            arriving.wait()
        return None if dx is None else dx.view(x.shape), dys


_op = _ColumnParallelLinear(_NAME)
