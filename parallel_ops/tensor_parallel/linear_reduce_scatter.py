"""A row-parallel linear with sequence-sharded output, with the reduce-scatter hidden behind the product.

    y       = reduce_scatter(x W^T) + b              along the first dimension
    dx      = dY W                                   dY = all_gather(dy)
    dW      = dY^T x,       db = sum over rows of dY

Forward: the part of the output that another rank owns leaves as soon as it is computed, and this rank's own part is
computed last, while the others are on their way (``_overlap``). Each rank receives the partial sums of its rows, in the
dtype of x, adds them in rank order in fp32, then the bias, and rounds once. Backward: own rows of dY are multiplied
first, while the next ones arrive; dY is then whole, which dW needs.

Sources: Korthikanti et al., arXiv:2205.05198 (sequence parallelism); Wang et al., ASPLOS 2023,
doi:10.1145/3567955.3567959 (decomposed collectives).
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm import reduce_scatter
from parallel_ops.comm._arguments import check_sizes
from parallel_ops.comm._group import group_rank, resolve_group
from parallel_ops.tensor_parallel._linear_call import LinearCall
from parallel_ops.tensor_parallel._linear_op import Factors, LinearOp, flat
from parallel_ops.tensor_parallel._overlap_plan import Overlap
from parallel_ops.tensor_parallel._sharded_linear import multiply, row_backward, row_forward
from parallel_ops.tensor_parallel.weight_gradients import DeferredWeightGradients

_NAME = "linear_reduce_scatter"


def linear_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup | None,
    overlap: Overlap = "auto",
    sizes: Sequence[int] | None = None,
    main_grad: Tensor | None = None,
    deferred: DeferredWeightGradients | None = None,
) -> Tensor:
    """``reduce_scatter(F.linear(x, weight)) + bias``, the reduction overlapped with the product.

    Args:
        x: ``[s, K]`` or ``[s, ..., K]``, all rows of this rank's input features; float32, float16, bfloat16 or float64.
        weight: ``[N, K]``, this rank's input features, dtype and device of ``x``.
        bias: ``[N]``, the same on every rank; added once, after the sum.
        group: the ranks that share the input features; ``None`` for one rank.
        overlap: ``"off"`` and ``"bulk"``: multiply, then reduce (there is nothing whole to hide); a number: so many
            messages for each shard, forward and backward; ``"auto"``: what an analytic model and, on a GPU, a
            measurement find fastest (see ``_overlap_plan``); there the weight must have one shape on every rank.
        sizes: the rows of y on every rank, the same on every rank; ``None`` for equal parts of ``s``.
        main_grad: ``[N, K]`` float32 (float64 for float64): the weight's gradient is added to it, and autograd gets
            none for the weight. Not under ``torch.compile``.
        deferred: the weight's gradient is computed when this queue is told to. Not under ``torch.compile``.

    Returns:
        ``[s_r, ..., N]``, this rank's rows. Under autocast the inputs are cast to the autocast dtype.

    Raises:
        TypeError, ValueError: on every rank and before data moves, also where the ranks disagree on shapes, dtypes or
        options. On CPU every call is compared, on CUDA the first one of its kind.

    Sharding: x S(-1) over group and weight S(1); bias replicated; y S(0). The gradients of x and weight are complete
    for this rank's features, that of bias is complete and the same on every rank.
    """
    (y,) = _op(
        x,
        [weight],
        [] if bias is None else [bias],
        None if main_grad is None else [main_grad],
        deferred,
        group,
        overlap,
        lambda: check_sizes(_NAME, "sizes", sizes, group, 0, whole=x),
    )
    return y


def linear_reduce_scatter_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup | None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """The same in plain PyTorch: a product, then a collective. The gradient of bias is that of this rank's rows."""
    y = reduce_scatter(F.linear(x, weight), group, sizes=sizes)
    return y if bias is None else y + bias


def _rows(call: LinearCall) -> int:
    return call.sizes[0 if call.group is None else group_rank(resolve_group(call.group))]


def _forward(call: LinearCall, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    (weight,), bias = weights, biases[0] if biases else None
    h, transport = flat(x), call.transport()
    shape = (_rows(call), *x.shape[1:-1], weight.shape[0])
    if transport is None:
        return [multiply(h, weight, bias).view(shape)]
    same = (x.shape[:-1], weight.shape[0], len(biases))
    call.agree(x, same, f"x of {list(x.shape)}, weight of {list(weight.shape)}", weights)
    rows = call.rows(x.shape[1:-1])

    def run(pieces: int) -> Tensor:
        return row_forward(_NAME, transport, h, rows, weight, bias, pieces)

    task = call.task("scatter", transport, rows, weight.shape[0], weight.shape[1], x.dtype)
    return [run(call.pieces(task, x.device, run)).view(shape)]


def _gradients(
    call: LinearCall, grads: list[Tensor], x: Tensor, weights: list[Tensor], factors: Factors | None
) -> tuple[Tensor | None, list[Tensor]]:
    (weight,), dy, transport = weights, flat(grads[0]), call.transport()
    rows = call.rows(x.shape[1:-1])

    def run(pieces: int) -> tuple[Tensor | None, Tensor]:
        return row_backward(_NAME, transport, dy, rows, weight, pieces, needs_x=call.needs[0])

    pieces = 0
    if transport is not None and call.needs[0]:
        task = call.task("gather", transport, rows, weight.shape[1], weight.shape[0], x.dtype)
        pieces = call.pieces(task, x.device, run)
    dx, whole = run(pieces)
    if factors is not None:
        factors([whole], flat(x))
    return None if dx is None else dx.view(x.shape), [whole]


_op = LinearOp(_NAME, forward=_forward, gradients=_gradients, rows=_rows)
