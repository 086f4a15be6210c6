"""The last linear and its cross-entropy in one op: the logits never exist, but for a chunk of rows at a time.

    for each chunk of rows h of hidden:
        z       = h W^T + b                     this rank's columns, in the buffer that all chunks share
        loss    = cross-entropy of z            statistics, one all-gather, combination: see cross_entropy.py
        dz      over z                          the local gradient kernel, in place
        dh      = dz W                          summed over the ranks
        dW, db += dz^T h, sum of dz             in fp32: chunk after chunk in bf16 would lose the late ones

For ``"mean"`` and ``"sum"`` every row's loss has the same weight, so the gradients of the sum are computed here, in the
forward pass, while the chunk is at hand, and backward only scales them by the incoming gradient (a tensor, like the
mean's divisor: nothing waits for a device). That is three products of matrices, as many as the unfused composite needs.
For ``"none"`` the weights are known in backward only: forward keeps the row's maximum and log sum of exponentials, and
backward makes each chunk of logits again, a fourth product.

With sequence-parallel input each rank holds a part of the rows: a chunk is gathered from all ranks, and its dh goes
back to them by a reduce-scatter.

Memory beyond inputs and gradients: the chunk, and dW in fp32. Chunk sizes and their order are set by the shapes, so
results do not change from run to run. Sources: Wijmans et al., arXiv:2411.09009; Hsu et al., arXiv:2410.10989 (chunks).
"""

from dataclasses import astuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm._agreement import Call, agree, announcing, sends
from parallel_ops.comm._group import group_name, resolve_group
from parallel_ops.comm._primitives import gathered
from parallel_ops.ops import _cross_entropy as local
from parallel_ops.ops._check import check_floating, check_same_device, check_same_dtype
from parallel_ops.ops._loss_options import LossOptions, check_reduction, check_target, divisor_of, reduce
from parallel_ops.ops._registration import cast_to_autocast_dtype, register
from parallel_ops.ops.cross_entropy import cross_entropy_reference
from parallel_ops.tensor_parallel._logit_chunks import Chunks, LinearCall
from parallel_ops.tensor_parallel._vocab_shards import agreed_layout, known_layout

_NAME = "vocab_parallel_linear_cross_entropy"

# Each chunk reads the weight twice and reads and writes its gradient, and must have rows enough to hide that behind the
# products: on a GPU 1,024 rows of 131,072 bf16 logits, on a CPU 524 rows of 32,000 fp32 ones (2026-11, two cores of a
# Xeon, 2,048 rows, hidden size 512: 64 MiB as fast as the whole logits at once, 16 MiB 25% slower, in bf16 2x).
_CHUNK_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    group: ProcessGroup | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    ignore_out_of_range: bool = False,
    reduction: str = "mean",
    sequence_parallel: bool = False,
    chunk_bytes: int | None = None,
) -> Tensor:
    """``vocab_parallel_cross_entropy(F.linear(hidden, weight, bias), target, ...)`` without the logits.

    Args:
        hidden: ``[..., H]``, float32, float16, bfloat16 or float64; with ``sequence_parallel`` this rank's part
            ``[s / P, ..., H]``, equal parts in rank order.
        weight: ``[V_r, H]``, this rank's rows of the output embedding, dtype of ``hidden``.
        target: ``[...]``, or the whole ``[s, ...]`` with ``sequence_parallel``; int64 or int32, the same on every rank.
        bias: ``[V_r]``. -inf marks a column that is not there (padding of the vocabulary).
        group, label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range, reduction: as in
            ``vocab_parallel_cross_entropy``.
        sequence_parallel: ``hidden`` is sharded on its first dimension over ``group``.
        chunk_bytes: the size of the chunk of logits on the rank with the most columns (at least one row, or one row of
            each rank); by default 256 MiB on CUDA and 64 MiB on CPU.

    Returns:
        A scalar, or a loss for each target for ``reduction="none"``; float32, or float64 for float64 tensors. All ranks
        get the same bits. Under autocast hidden, weight and bias are cast to the autocast dtype.

    Raises: as ``vocab_parallel_cross_entropy``.

    Sharding: hidden replicated over group, or S(0) with ``sequence_parallel``; weight and bias S(0); target and loss
    replicated. The gradient of hidden is complete on every rank, sharded as hidden is; the incoming gradient must be
    the same on every rank.
    """
    name = group_name(_NAME, group)
    with announcing(_NAME, group, hidden, weight, target, asks=True):
        _check_tensors(hidden, weight, bias)
        parts = group.size() if group is not None and sequence_parallel else 1
        if sequence_parallel and hidden.dim() < 2:
            raise ValueError(
                f"{_NAME}: hidden must be [s / P, ..., H] with sequence_parallel, got {list(hidden.shape)}"
            )
        shape = torch.Size((parts * hidden.shape[0], *hidden.shape[1:-1])) if parts > 1 else hidden.shape[:-1]
        check_target(_NAME, target, shape, "that of the whole hidden without its last dimension")
        check_same_device(_NAME, "target", target, "hidden", hidden)
        check_reduction(_NAME, reduction)
        o = LossOptions.checked(_NAME, label_smoothing, z_loss, softcap, ignore_index)
        size = _CHUNK_BYTES["cpu" if hidden.device.type == "cpu" else "cuda"] if chunk_bytes is None else chunk_bytes
        if size < 1:
            raise ValueError(f"{_NAME}: chunk_bytes must be at least 1, got {chunk_bytes}")
    grad = torch.is_grad_enabled()
    needs = [grad and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    options = (o.label_smoothing, o.z_loss, o.softcap, o.ignore_index, ignore_out_of_range)
    loss, column, *_ = _op(hidden, weight, bias, target, name, *options, reduction == "none", parts, size, needs)
    return loss / divisor_of(reduction, column, None, loss.dtype) if reduction == "mean" else loss


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """The same on one rank in plain PyTorch."""
    return cross_entropy_reference(F.linear(hidden, weight, bias), target, **options)


def _check_tensors(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_floating(_NAME, "hidden", hidden)
    if hidden.dim() == 0:
        raise ValueError(f"{_NAME}: hidden must have at least one dimension, got a scalar")
    check_floating(_NAME, "weight", weight)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{_NAME}: weight must have shape [V, {hidden.shape[-1]}], the last dimension of hidden, "
            f"got {list(weight.shape)}"
        )
    check_same_device(_NAME, "weight", weight, "hidden", hidden)
    check_same_dtype(_NAME, "weight", weight, "hidden", hidden)
    if bias is not None:
        check_floating(_NAME, "bias", bias)
        if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
            raise ValueError(
                f"{_NAME}: bias must have shape [{weight.shape[0]}], one element for each row of weight, "
                f"got {list(bias.shape)}"
            )
        check_same_device(_NAME, "bias", bias, "hidden", hidden)
        check_same_dtype(_NAME, "bias", bias, "hidden", hidden)


@sends
def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    call = LinearCall(*arguments)
    group = None if call.group is None else resolve_group(call.group)
    options = (*astuple(call)[1:-1], *call.needs, hidden.shape[-1], weight.itemsize, bias is None)
    # A target of ignore_index is never wrong.
    checked = torch.full_like(target, call.ignore_index) if call.ignore_invalid else target
    layout = agreed_layout(_NAME, group, weight.shape[0], checked, call.ignore_index, options)
    chunks = Chunks(hidden, weight, bias, call, max(layout.sizes), gradients=not call.per_row)
    loss, column, saved = _per_row_outputs(weight, target, call)
    targets, losses, columns = (chunks.of(t) for t in (target, loss, column))
    kept = [chunks.of(row) for row in saved]
    for i, t in enumerate(targets):
        h, z = chunks.logits(i, group)
        part, where = local.statistics(
            z,
            t.flatten().contiguous(),
            None,
            layout.start,
            layout.vocab,
            call.ignore_index,
            call.ignore_invalid,
            call.softcap,
            call.label_smoothing != 0,
        )
        parts = part.unsqueeze(0) if group is None else gathered(_NAME, part, group)
        row_loss, row_saved = local.combine(parts, where, call.label_smoothing, call.z_loss)
        losses[i].copy_(row_loss.view(t.shape))
        columns[i].copy_(where.view(t.shape))
        if call.per_row:
            for k, row in zip(kept, row_saved, strict=True):
                k[i].copy_(row.view(t.shape))
        elif any(call.needs):
            ones = row_loss.new_ones(()).expand(row_loss.shape)
            local.backward_inplace(ones, z, None, where, row_saved, call.label_smoothing, call.z_loss, call.softcap)
            chunks.add_gradients(i, h, z, group)
    if call.per_row:
        return loss, column, saved, *(weight.new_empty(0) for _ in range(3))
    return reduce(loss, "sum", column), column, saved[:, :0].clone(), *chunks.gradients()


@sends
def _backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, column: Tensor, saved: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """The gradients for reduction "none", whose forward kept no chunk: each is made again."""
    call = LinearCall(*arguments)
    group = None if call.group is None else resolve_group(call.group)
    layout = known_layout(group, weight.shape[0])
    if group is not None:
        rows = grad.numel()
        agree(group, Call(f"backward of {_NAME}", (rows, *astuple(call)[1:]), f"{rows} rows"), grad.device)
    chunks = Chunks(hidden, weight, bias, call, max(layout.sizes), gradients=True)
    grads, columns = chunks.of(grad), chunks.of(column)
    kept = [chunks.of(row) for row in saved]
    for i, g in enumerate(grads):
        h, z = chunks.logits(i, group)
        row_saved = torch.stack([k[i].reshape(-1) for k in kept])
        where = columns[i].flatten().contiguous()
        local.backward_inplace(
            g.reshape(-1), z, None, where, row_saved, call.label_smoothing, call.z_loss, call.softcap
        )
        chunks.add_gradients(i, h, z, group)
    return chunks.gradients()


def _per_row_outputs(weight: Tensor, target: Tensor, call: LinearCall) -> tuple[Tensor, Tensor, Tensor]:
    accumulate, rows = local.accumulation_dtype(weight.dtype), target.numel()
    return (
        weight.new_empty(target.shape, dtype=accumulate),
        target.new_empty(rows, dtype=torch.int64),
        weight.new_empty((local.saved_per_row(call.label_smoothing != 0), rows), dtype=accumulate),
    )


def _fake(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    call = LinearCall(*arguments)
    loss, column, saved = _per_row_outputs(weight, target, call)
    if call.per_row:
        return loss, column, saved, *(weight.new_empty(0) for _ in range(3))
    return (
        loss.new_empty(()),
        column,
        saved.new_empty((saved.shape[0], 0)),
        *_fake_gradients(hidden, weight, call),
    )


def _fake_gradients(hidden: Tensor, weight: Tensor, call: LinearCall) -> tuple[Tensor, ...]:
    accumulate = local.accumulation_dtype(weight.dtype)
    sizes = (hidden.shape, weight.shape, weight.shape[:1])
    dtypes = (weight.dtype, accumulate, accumulate)
    return tuple(
        weight.new_empty(size if needed else 0, dtype=dtype)
        for size, dtype, needed in zip(sizes, dtypes, call.needs, strict=True)
    )


def _fake_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, column: Tensor, saved: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    return _fake_gradients(hidden, weight, LinearCall(*arguments))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, _, *ctx.arguments = inputs
    _, column, saved, *gradients = output
    ctx.mark_non_differentiable(column, saved, *gradients)
    ctx.set_materialize_grads(False)  # else zeros of the size of the weight gradient, for nobody
    ctx.call = LinearCall(*ctx.arguments)
    ctx.dtype = weight.dtype
    ctx.save_for_backward(*((hidden, weight, bias, column, saved) if ctx.call.per_row else gradients))


def _autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * (4 + len(ctx.arguments))
    if ctx.call.per_row:
        gradients, scale = _backward_op(grad, *ctx.saved_tensors, *ctx.arguments), None
    else:
        gradients, scale = ctx.saved_tensors, grad
    scaled = [
        _finished(g, scale, ctx.dtype) if needed else None for g, needed in zip(gradients, ctx.call.needs, strict=True)
    ]
    return (*scaled, *(None,) * (1 + len(ctx.arguments)))


def _finished(gradient: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``scale * gradient``, rounded once to ``dtype``."""
    if scale is None:
        return gradient.to(dtype)
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


_backward_op = register(f"{_NAME}_backward", fake=_fake_backward, cpu=_backward, cuda=_backward)
_op = register(
    _NAME,
    fake=_fake,
    cpu=_forward,
    cuda=_forward,
    setup_context=_setup_context,
    backward=_autograd,
    autocast=cast_to_autocast_dtype,
)
