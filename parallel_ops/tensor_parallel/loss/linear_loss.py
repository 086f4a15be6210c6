"""Checks of the losses of hidden states, and forward and backward of the cross-entropy, chunk by chunk.

The formulas are in ``linear_cross_entropy.py``.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.dispatch.checks import check_floating, check_same_device, check_same_dtype
from parallel_ops._internal.distributed.compat import resolve_group
from parallel_ops._internal.distributed.groups import group_name
from parallel_ops.comm.consistency import CallSignature, check_consistency, communicates
from parallel_ops.ops.cross_entropy import kernels
from parallel_ops.ops.cross_entropy.options import NONE, LossOptions, check_class_weight, check_target
from parallel_ops.tensor_parallel.loss.cross_entropy import Layout, agreed_layout, known_layout, row_losses
from parallel_ops.tensor_parallel.loss.logit_chunks import ChunkOptions, Chunks, weight_gradient_dtype

NAME = "vocab_parallel_linear_cross_entropy"
# Each chunk reads the weight twice and reads and writes its gradient; it needs enough rows to hide that behind the
# matmuls: on a GPU 1,024 rows of 131,072 bf16 logits, on a CPU 524 rows of 32,000 fp32 ones (2026-11, two cores of a
# Xeon, 2,048 rows, hidden size 512: 64 MiB as fast as the whole logits at once, 16 MiB 25% slower, in bf16 2x).
CHUNK_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}


def check_linear(
    op: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    group: ProcessGroup | None, sequence_parallel: bool, chunk_bytes: int | None, *, target_name: str = "target",
) -> ChunkOptions:  # fmt: skip
    """How the logits are cut into chunks. Raises TypeError or ValueError for wrong tensors."""
    check_floating(op, "hidden", hidden)
    if hidden.dim() == 0:
        raise ValueError(f"{op}: hidden must have at least one dimension, got a scalar")
    check_floating(op, "weight", weight)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{op}: weight must have shape [V, {hidden.shape[-1]}], the last dimension of hidden, "
            f"got {list(weight.shape)}"
        )
    check_same_device(op, "weight", weight, "hidden", hidden)
    check_same_dtype(op, "weight", weight, "hidden", hidden)
    if bias is not None:
        check_floating(op, "bias", bias)
        if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
            raise ValueError(
                f"{op}: bias must have shape [{weight.shape[0]}], one element for each row of weight, "
                f"got {list(bias.shape)}"
            )
        check_same_device(op, "bias", bias, "hidden", hidden)
        check_same_dtype(op, "bias", bias, "hidden", hidden)
    parts = group.size() if group is not None and sequence_parallel else 1
    if sequence_parallel and hidden.dim() < 2:
        raise ValueError(f"{op}: hidden must be [s / P, ..., H] with sequence_parallel, got {list(hidden.shape)}")
    shape = torch.Size((parts * hidden.shape[0], *hidden.shape[1:-1])) if parts > 1 else hidden.shape[:-1]
    check_target(op, target, shape, "that of the whole hidden without its last dimension", target_name)
    check_same_device(op, target_name, target, "hidden", hidden)
    check_class_weight(op, class_weight, weight.shape[:1], "one element for each row of weight", "hidden", hidden)
    size = CHUNK_BYTES["cpu" if hidden.device.type == "cpu" else "cuda"] if chunk_bytes is None else chunk_bytes
    if size < 1:
        raise ValueError(f"{op}: chunk_bytes must be at least 1, got {chunk_bytes}")
    grad = torch.is_grad_enabled()
    needs = [grad and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    return ChunkOptions(group_name(op, group), parts, size, needs)


def options_of(arguments: Any) -> tuple[LossOptions, ChunkOptions]:
    """The options among the last arguments of the op."""
    return LossOptions(*arguments[:6]), ChunkOptions(*arguments[6:])


def agreed(
    op: str, weight: Tensor, bias: Tensor | None, target: Tensor, options: LossOptions, chunking: ChunkOptions,
    kind: tuple[object, ...] = (),
) -> tuple[ProcessGroup | None, Layout | None, int]:  # fmt: skip
    """The group of a forward, its layout, and the columns of its widest rank; ranks that make different calls raise.

    Args:
        kind: compared between the ranks beside the options, the chunks and the tensors' forms.
    """
    if chunking.group is None:
        return None, None, weight.shape[0]
    group = resolve_group(chunking.group)
    form = (*chunking.same, weight.shape[1], weight.itemsize, bias is None, *kind)
    layout = agreed_layout(op, group, weight.shape[0], target, options, form)
    return group, layout, layout.widest


def agreed_backward(
    op: str, weight: Tensor, grad: Tensor, chunking: ChunkOptions, kind: tuple[object, ...]
) -> tuple[ProcessGroup | None, int]:
    """The group of a backward and the columns of its widest rank; ranks that make different calls raise."""
    if chunking.group is None:
        return None, weight.shape[0]
    group, rows = resolve_group(chunking.group), grad.numel()
    call = CallSignature(f"backward of {op}", (rows, *kind, *chunking.same), f"{rows} rows")
    check_consistency(group, call, grad.device)
    return group, known_layout(group, weight.shape[0]).widest


def in_forward(options: LossOptions, chunking: ChunkOptions) -> bool:
    """True if gradients are computed in the forward pass."""
    return not options.per_row and any(chunking.needs)


@communicates
def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    """(loss, column, saved, divisor, gradients of hidden, weight and bias of the sum of the losses)."""
    options, chunking = options_of(arguments)
    group, layout, widest = agreed(NAME, weight, bias, target, options, chunking, (class_weight is None,))
    chunks = Chunks(hidden, weight, bias, chunking, widest)
    loss, column, saved, _ = kernels.empty_outputs(weight, target, class_weight, options._replace(reduction=NONE))
    losses, columns, kept = chunks.split(loss), chunks.split(column), chunks.split(saved, 1)
    for i, t in enumerate(chunks.split(target)):
        h, z = chunks.logits(i, group)
        row_loss, where, row_saved = row_losses(
            NAME, z, t.flatten().contiguous(), class_weight, options, group, layout
        )  # fmt: skip
        for out, result in ((losses[i], row_loss), (columns[i], where), (kept[i], row_saved)):
            out.copy_(result.view(out.shape))
        if in_forward(options, chunking):
            ones = row_loss.new_ones(()).expand(row_loss.shape)
            kernels.backward(ones, z, class_weight, where, row_saved, None, *options, z)
            chunks.add_gradients(i, h, z, group)
    loss, divisor = kernels.reduced(loss, options, column, saved)
    return loss, column, saved, divisor, *chunks.gradients()


@communicates
def backward_per_row(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, column: Tensor,
    saved: Tensor, *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients for reduction "none", whose forward keeps no chunk: each chunk of logits is computed again."""
    options, chunking = options_of(arguments)
    group, widest = agreed_backward(NAME, weight, grad, chunking, options)
    chunks = Chunks(hidden, weight, bias, chunking, widest)
    columns, kept = chunks.split(column), chunks.split(saved, 1)
    for i, g in enumerate(chunks.split(grad)):
        h, z = chunks.logits(i, group)
        where, row_saved = columns[i].flatten().contiguous(), kept[i].flatten(1).contiguous()
        kernels.backward(g.reshape(-1), z, class_weight, where, row_saved, None, *options, z)
        chunks.add_gradients(i, h, z, group)
    return chunks.gradients()


def outputs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    options, chunking = options_of(arguments)
    outputs = kernels.empty_outputs(weight, target, class_weight, options)
    return *outputs, *gradient_outputs(hidden, weight, chunking, [False] * 3 if options.per_row else chunking.needs)


def gradient_outputs(hidden: Tensor, weight: Tensor, chunking: ChunkOptions, needs: list[bool]) -> tuple[Tensor, ...]:
    sizes = (hidden.shape, weight.shape, weight.shape[:1])
    dtype_of_sum = weight_gradient_dtype(chunking, math.prod(hidden.shape[:-1]), weight)
    dtypes = (weight.dtype, dtype_of_sum, kernels.accumulation_dtype(weight.dtype))
    return tuple(
        weight.new_empty(size if needed else 0, dtype=dtype)
        for size, dtype, needed in zip(sizes, dtypes, needs, strict=True)
    )


def backward_outputs(grad: Tensor, hidden: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Of every op whose arguments end with those of ``ChunkOptions``."""
    chunking = ChunkOptions(*arguments[-len(ChunkOptions._fields) :])
    return gradient_outputs(hidden, weight, chunking, chunking.needs)


def flops(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, *arguments: Any
) -> int:
    """GEMMs of the forward, and those of the gradients if it computes them."""
    options, chunking = options_of(arguments)
    gradients = sum(chunking.needs[:2]) if in_forward(options, chunking) else 0
    return (1 + gradients) * 2 * target.numel() * weight.numel()
