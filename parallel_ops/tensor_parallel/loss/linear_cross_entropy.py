"""The last linear and its cross-entropy in one op, which computes the logits one chunk of rows at a time.

    for each chunk of rows h of hidden:
        z       = h W^T + b                     this rank's columns, in a buffer that all chunks share
        loss    = cross-entropy of z            statistics, one all-gather, combination: see cross_entropy.py
        dz                                      the local gradient kernel, written over z
        dh      = dz W                          summed over the ranks
        dW, db += dz^T h, sum of dz             in fp32: in bf16 late chunks would be lost

For ``"mean"`` and ``"sum"`` every row's loss has the same factor. So the gradients of the sum are computed in the
forward pass, and backward scales them by the incoming gradient over the divisor (both tensors, so the host does not
wait; the gradients of the mean itself would underflow in fp16, whose loss scale comes with the incoming gradient). That
takes three GEMMs, as many as the unfused composite. For ``"none"`` the factors are known in backward only: forward
saves each row's maximum and log sum of exponentials, and backward computes each chunk of logits again, a fourth GEMM.

With sequence-parallel input each rank holds a part of the rows: a chunk is gathered from all ranks, and its dh is
reduce-scattered.

Memory beyond inputs and gradients: the chunk, and dW in fp32. Chunk sizes and their order depend on shapes only, so
results do not change from run to run. Sources: Wijmans et al., arXiv:2411.09009; Hsu et al., arXiv:2410.10989 (chunks).
"""

from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from parallel_ops._internal.dispatch.registration import cast_first, register
from parallel_ops._internal.distributed.groups import group_name
from parallel_ops._internal.gradients.split_backward import check_memory, requested
from parallel_ops.comm.consistency import propagate_errors
from parallel_ops.ops.cross_entropy.cross_entropy import cross_entropy_reference
from parallel_ops.ops.cross_entropy.kernels import LossStatistics, statistics_of
from parallel_ops.ops.cross_entropy.options import (
    LossArguments,
    LossOptions,
    check_target_values,
)
from parallel_ops.tensor_parallel.loss.distributions import flops_of_backward
from parallel_ops.tensor_parallel.loss.linear_loss import (
    NAME,
    backward_outputs,
    backward_per_row,
    check_linear,
    flops,
    forward,
    options_of,
    outputs,
)


class LinearCrossEntropyArguments(LossArguments, total=False):
    """Keyword arguments of ``linear_cross_entropy``."""

    bias: Tensor | None
    chunk_bytes: int | None


class VocabParallelLinearArguments(LinearCrossEntropyArguments, total=False):
    """Keyword arguments of ``vocab_parallel_linear_cross_entropy``."""

    group: ProcessGroup | None
    sequence_parallel: bool


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    return_statistics: Literal[False] = False,
    **options: Unpack[LinearCrossEntropyArguments],
) -> Tensor: ...
@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    return_statistics: Literal[True],
    **options: Unpack[LinearCrossEntropyArguments],
) -> tuple[Tensor, LossStatistics]: ...
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    ignore_out_of_range: bool = False,
    reduction: str = "mean",
    chunk_bytes: int | None = None,
    return_statistics: bool = False,
) -> Tensor | tuple[Tensor, LossStatistics]:
    """``cross_entropy(F.linear(hidden, weight, bias), target, ...)`` without the logits.

    ``vocab_parallel_linear_cross_entropy`` takes a weight that ranks share.

    Args:
        hidden: ``[..., H]``, float32, float16, bfloat16 or float64.
        weight: ``[V, H]``, the output embedding, dtype of ``hidden``.
        target: ``[...]``, int64 or int32 class indices.
        bias: ``[V]``, dtype of ``hidden``. Columns of -inf count as absent (padding of the vocabulary).
        class_weight, label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range, reduction, return_statistics:
            see ``cross_entropy``.
        chunk_bytes: bytes of logits that exist at a time; ``None`` for 256 MiB on CUDA and 64 MiB on CPU.

    Returns:
        The loss, a scalar, or one for each target for ``reduction="none"``; float32, or float64 for float64 tensors.
        With ``return_statistics`` a tuple of loss and ``LossStatistics``. Under autocast hidden, weight and bias are
        cast to the autocast dtype.

    Raises:
        TypeError: unsupported dtypes. ValueError: wrong shapes, devices or options and, on CPU, a target outside the
            vocabulary. On CUDA rows with such a target have NaN loss and gradient.

    Sharding: every row is independent; hidden, target and loss may be sharded on their rows.

    Examples:
        >>> import torch
        >>> from parallel_ops import linear_cross_entropy
        >>> hidden, weight, target = torch.randn(32, 64), torch.randn(1000, 64), torch.randint(1000, (32,))
        >>> loss = linear_cross_entropy(hidden, weight, target)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, target), rtol=1e-4)
        True
    """
    options = (label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range, reduction)
    chunks = (None, False, chunk_bytes)
    return _call("linear_cross_entropy", hidden, weight, target, bias, class_weight, options, chunks, return_statistics)


@overload
def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    return_statistics: Literal[False] = False,
    **options: Unpack[VocabParallelLinearArguments],
) -> Tensor: ...
@overload
def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    return_statistics: Literal[True],
    **options: Unpack[VocabParallelLinearArguments],
) -> tuple[Tensor, LossStatistics]: ...
def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    group: ProcessGroup | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    ignore_out_of_range: bool = False,
    reduction: str = "mean",
    sequence_parallel: bool = False,
    chunk_bytes: int | None = None,
    return_statistics: bool = False,
) -> Tensor | tuple[Tensor, LossStatistics]:
    """``vocab_parallel_cross_entropy(F.linear(hidden, weight, bias), target, ...)`` without the logits.

    Args:
        hidden: ``[..., H]``, float32, float16, bfloat16 or float64; with ``sequence_parallel`` this rank's part
            ``[s / P, ..., H]``, equal parts in rank order.
        weight: ``[V_r, H]``, this rank's rows of the output embedding, dtype of ``hidden``.
        target: ``[...]``, or the whole ``[s, ...]`` with ``sequence_parallel``; int64 or int32, the same on every rank.
        bias: ``[V_r]``. Columns of -inf count as absent (padding of the vocabulary).
        class_weight: ``[V_r]``, this rank's part, of any of these dtypes.
        group: the ranks that share the vocabulary; ``None`` for one rank.
        label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range, reduction, return_statistics: see
            ``cross_entropy``; smoothing is over the whole vocabulary.
        sequence_parallel: ``hidden`` is sharded on its first dimension over ``group``.
        chunk_bytes: size of a chunk of logits on the rank with the most columns (at least one row, or one row of each
            rank); ``None`` for 256 MiB on CUDA and 64 MiB on CPU.

    Returns:
        The loss, a scalar, or one for each target for ``reduction="none"``; float32, or float64 for float64 tensors.
        With ``return_statistics`` a tuple of loss and ``LossStatistics``. All ranks get the same bits. Under autocast
        hidden, weight and bias are cast to the autocast dtype.

    Raises:
        TypeError: unsupported dtypes. ValueError: wrong shapes, devices or options, ranks that disagree on the number
            of rows or on the options, and, on CPU, a target outside the vocabulary: on every rank. On CUDA rows with
            such a target have NaN loss and gradient.

    Sharding: hidden replicated over group, or S(0) with ``sequence_parallel``; weight, bias and class_weight S(0);
    target, loss and statistics replicated. The gradient of hidden is complete on every rank, sharded as hidden is; the
    incoming gradient must be the same on every rank.

    Examples:
        >>> import torch
        >>> from parallel_ops import vocab_parallel_linear_cross_entropy
        >>> hidden, weight, target = torch.randn(32, 64), torch.randn(1000, 64), torch.randint(1000, (32,))
        >>> loss = vocab_parallel_linear_cross_entropy(hidden, weight, target)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, target), rtol=1e-4)
        True
    """
    options = (label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range, reduction)
    chunks = (group, sequence_parallel, chunk_bytes)
    return _call(NAME, hidden, weight, target, bias, class_weight, options, chunks, return_statistics)


def _call(
    name: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    given: tuple[Any, ...], chunks: tuple[ProcessGroup | None, bool, int | None], return_statistics: bool,
) -> Tensor | tuple[Tensor, LossStatistics]:  # fmt: skip
    alone = group_name(name, chunks[0]) is None
    with propagate_errors(name, None if alone else chunks[0], hidden, weight, target, checked=True):
        options = LossOptions.checked(name, *given)
        chunking = check_linear(name, hidden, weight, target, bias, class_weight, *chunks)
    call = _op.dispatched if return_statistics else _op
    try:
        loss, column, saved, *_ = call(hidden, weight, bias, target, class_weight, *options, *chunking)
    except RuntimeError:
        # As in cross_entropy: on CPU the kernel checks the targets; the next line names a bad one with its row.
        if alone and not options.ignore_out_of_range:
            check_target_values(name, target, weight.shape[0], options.ignore_index)
        raise
    return (loss, statistics_of(column, saved, target.shape)) if return_statistics else loss


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """``linear_cross_entropy`` in plain PyTorch."""
    return cross_entropy_reference(F.linear(hidden, weight, bias), target, **options)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, _, class_weight, *ctx.arguments = inputs
    _, column, saved, divisor, *gradients = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else unused zeros of the size of the weight gradient
    ctx.per_row, ctx.dtype = options_of(ctx.arguments)[0].per_row, weight.dtype
    kept = (hidden, weight, bias, class_weight, column, saved) if ctx.per_row else (divisor, *gradients)
    ctx.save_for_backward(*kept)


def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * (5 + len(ctx.arguments))
    needs, scale = requested(ctx)[:3], None
    if ctx.per_row:
        hidden, weight, *others = ctx.saved_tensors
        if not needs[0]:
            check_memory(NAME, "weight", weight)
        gradients = _backward_op(grad, hidden, weight, *others, *ctx.arguments[:-1], needs)
    else:
        divisor, *gradients = ctx.saved_tensors
        scale = grad / divisor
    scaled = [_finished(g, scale, ctx.dtype) if needed else None for g, needed in zip(gradients, needs, strict=True)]
    return (*scaled, *(None,) * (2 + len(ctx.arguments)))


def _finished(gradient: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``scale * gradient``, rounded once to ``dtype``."""
    if scale is None:
        return gradient.to(dtype)
    if gradient.dtype is dtype:
        return gradient * scale
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


_backward_op = register(
    f"{NAME}_backward", outputs=backward_outputs, cpu=backward_per_row, cuda=backward_per_row, flops=flops_of_backward
)
_op = register(
    NAME, outputs=outputs, cpu=forward, cuda=forward, setup_context=setup_context, backward=backward, differentiable=1,
    autocast=cast_first(3), flops=flops,
)  # fmt: skip
