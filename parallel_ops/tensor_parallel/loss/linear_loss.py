"""Forward and backward of the linear cross-entropy, chunk by chunk; the formulas are in ``linear_cross_entropy.py``."""

import math
from typing import Any

import torch
from torch import Tensor

from parallel_ops._internal.distributed.groups import resolve_group
from parallel_ops.comm.consistency import CallSignature, check_consistency, communicates
from parallel_ops.comm.primitives import gathered
from parallel_ops.ops.cross_entropy import kernels as ce_kernels
from parallel_ops.ops.cross_entropy.options import NONE, REDUCTIONS, reduced
from parallel_ops.ops.cross_entropy.whole_logits import forward as cross_entropy_forward
from parallel_ops.ops.cross_entropy.whole_logits import loss_and_grad_inplace
from parallel_ops.tensor_parallel.loss.logit_chunks import Chunks, LinearCall, weight_gradient_dtype
from parallel_ops.tensor_parallel.loss.vocab_shards import agreed_layout, known_layout

NAME = "vocab_parallel_linear_cross_entropy"


def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    class_weight, *rest = arguments
    call = LinearCall(*rest)
    run = _on_one_rank if call.group is None else _over_group
    return run(hidden, weight, bias, target, class_weight, call)


def _on_one_rank(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, call: LinearCall
) -> tuple[Tensor, ...]:
    chunks = Chunks(hidden, weight, bias, call, weight.shape[0])
    options = call.loss_options
    reduction = call.reduction if chunks.count == 1 else NONE
    flat = (target if target.dim() == 1 else target.reshape(-1)).contiguous()
    results = []
    for i, t in enumerate((flat,) if chunks.count == 1 else flat.split(chunks.rows)):
        h, z = chunks.logits(i, None)
        if call.in_forward:
            results.append(loss_and_grad_inplace(z, t, class_weight, *options, reduction, True))
            chunks.add_gradients(i, h, z, None)
        else:
            results.append(cross_entropy_forward(z, t, class_weight, *options, reduction, False))
    if chunks.count == 1:
        ((loss, column, saved, divisor),) = results
    else:
        losses, columns, kept, _ = zip(*results, strict=True)
        column, saved = torch.cat(columns), torch.cat(kept, dim=1)
        loss, divisor = reduced(torch.cat(losses), REDUCTIONS[call.reduction], column, ce_kernels.target_weights(saved))
    return loss.view(target.shape) if call.reduction == NONE else loss, column, saved, divisor, *chunks.gradients()


@communicates
def _over_group(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, call: LinearCall
) -> tuple[Tensor, ...]:
    group = resolve_group(call.group)
    options = (*call.signature(), hidden.shape[-1], weight.itemsize, bias is None, class_weight is None)
    # With ignore_out_of_range no target is an error, and ignore_index always passes the check.
    checked = torch.full_like(target, call.ignore_index) if call.ignore_out_of_range else target
    layout = agreed_layout(NAME, group, weight.shape[0], checked, call.ignore_index, options)
    chunks = Chunks(hidden, weight, bias, call, max(layout.sizes))
    loss, column, saved = _per_row_outputs(weight, target, class_weight, call)
    targets, losses, columns = (chunks.split(t) for t in (target, loss, column))
    kept = [chunks.split(row) for row in saved]
    for i, t in enumerate(targets):
        h, z = chunks.logits(i, group)
        part, where = ce_kernels.statistics(
            z,
            t.flatten().contiguous(),
            class_weight,
            layout.start,
            layout.vocab,
            call.ignore_index,
            call.ignore_out_of_range,
            call.softcap,
            call.label_smoothing != 0,
        )
        row_loss, row_saved = ce_kernels.combine(gathered(NAME, part, group), where, call.label_smoothing, call.z_loss)
        losses[i].copy_(row_loss.view(t.shape))
        columns[i].copy_(where.view(t.shape))
        for k, row in zip(kept, row_saved, strict=True):
            k[i].copy_(row.view(t.shape))
        if call.in_forward:
            ones = row_loss.new_ones(()).expand(row_loss.shape)
            ce_kernels.gradient_inplace(ones, z, class_weight, where, row_saved, None, call.loss_options)
            chunks.add_gradients(i, h, z, group)
    loss, divisor = reduced(loss, REDUCTIONS[call.reduction], column, ce_kernels.target_weights(saved))
    return loss, column, saved, divisor, *chunks.gradients()


@communicates
def backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, column: Tensor,
    saved: Tensor, *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients for reduction "none", whose forward keeps no chunk: each chunk of logits is computed again."""
    call, widest, group = LinearCall(*arguments), weight.shape[0], None
    if call.group is not None:
        group = resolve_group(call.group)
        widest = max(known_layout(group, weight.shape[0]).sizes)
        rows = grad.numel()
        check_consistency(
            group, CallSignature(f"backward of {NAME}", (rows, *call.signature()), f"{rows} rows"), grad.device
        )
    chunks = Chunks(hidden, weight, bias, call, widest)
    grads, columns = chunks.split(grad), chunks.split(column)
    kept = [chunks.split(row) for row in saved]
    for i, g in enumerate(grads):
        h, z = chunks.logits(i, group)
        row_saved = torch.stack([k[i].reshape(-1) for k in kept])
        where = columns[i].flatten().contiguous()
        ce_kernels.gradient_inplace(g.reshape(-1), z, class_weight, where, row_saved, None, call.loss_options)
        chunks.add_gradients(i, h, z, group)
    return chunks.gradients()


def _per_row_outputs(
    weight: Tensor, target: Tensor, class_weight: Tensor | None, call: LinearCall
) -> tuple[Tensor, Tensor, Tensor]:
    accumulate, rows = ce_kernels.accumulation_dtype(weight.dtype), target.numel()
    width = ce_kernels.saved_per_row(call.label_smoothing != 0, class_weight is not None)
    return (
        weight.new_empty(target.shape, dtype=accumulate),
        target.new_empty(rows, dtype=torch.int64),
        weight.new_empty((width, rows), dtype=accumulate),
    )


def fake(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    class_weight, *rest = arguments
    call = LinearCall(*rest)
    loss, column, saved = _per_row_outputs(weight, target, class_weight, call)
    per_row = call.reduction == NONE
    return (
        loss if per_row else loss.new_empty(()),
        column,
        saved,
        loss.new_empty(()),
        *_fake_gradients(hidden, weight, call, [False] * 3 if per_row else call.needs),
    )


def _fake_gradients(hidden: Tensor, weight: Tensor, call: LinearCall, needs: list[bool]) -> tuple[Tensor, ...]:
    accumulate = ce_kernels.accumulation_dtype(weight.dtype)
    sizes = (hidden.shape, weight.shape, weight.shape[:1])
    rows = math.prod(hidden.shape[:-1])
    dtypes = (weight.dtype, weight_gradient_dtype(call, rows, weight), accumulate)
    return tuple(
        weight.new_empty(size if needed else 0, dtype=dtype)
        for size, dtype, needed in zip(sizes, dtypes, needs, strict=True)
    )


def fake_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, column: Tensor,
    saved: Tensor, *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = LinearCall(*arguments)
    return _fake_gradients(hidden, weight, call, call.needs)


def flops(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, *arguments: Any
) -> int:
    """Products of the forward, and those of the gradients if it computes them."""
    call = LinearCall(*arguments)
    return (1 + call.in_forward * sum(call.needs[:2])) * 2 * target.numel() * weight.numel()


def flops_of_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, column: Tensor,
    saved: Tensor, *arguments: Any,
) -> int:  # fmt: skip
    return (1 + sum(LinearCall(*arguments).needs[:2])) * 2 * grad.numel() * weight.numel()
