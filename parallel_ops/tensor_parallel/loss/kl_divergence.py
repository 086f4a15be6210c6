"""KL divergence of a student from a teacher, both from hidden states, without the logits of either.

    z, y     = student's and teacher's logits / T      one chunk of rows at a time, as in linear_cross_entropy.py
    KL       = sum_j q_j (log q_j - log p_j),          p = softmax(z), q = softmax(y)
    dz_j     = g (p_j - q_j)

with T the temperature and g the incoming gradient of a row. Saved for backward, per row: maximum and log of the sum of
exponentials of both. Backward computes each chunk of logits again. The teacher's logits may be given instead of its
hidden states. Source: Hinton et al., arXiv:1503.02531 (who multiply by T^2).
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.dispatch.checks import check_floating, check_same_device, check_same_dtype
from parallel_ops._internal.dispatch.registration import cast_first, register
from parallel_ops._internal.distributed.groups import group_name
from parallel_ops.comm.consistency import communicates, propagate_errors
from parallel_ops.ops.cross_entropy import kernels
from parallel_ops.ops.cross_entropy.options import NONE, LossOptions
from parallel_ops.tensor_parallel.loss.cross_entropy import row_losses
from parallel_ops.tensor_parallel.loss.distributions import (
    check_temperature,
    log_softmax,
    rounded_gradients,
    row_sums,
    sum_of_shards,
)
from parallel_ops.tensor_parallel.loss.linear_loss import agreed, agreed_backward, backward_outputs, check_linear
from parallel_ops.tensor_parallel.loss.logit_chunks import ChunkOptions, Chunks, blocks_of

NAME = "vocab_parallel_linear_kl_divergence"
# Statistics of rows need no target: every row has one that is ignored.
_IGNORED = LossOptions(0.0, 0.0, 0.0, -100, False, NONE)


def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: Tensor,
    *,
    teacher_weight: Tensor | None = None,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """``vocab_parallel_linear_kl_divergence`` on one device.

    Args:
        hidden: ``[..., H]``, the student's, float32, float16, bfloat16 or float64.
        weight: ``[V, H]``, the student's output embedding, dtype of ``hidden``.
        teacher: ``[..., H_t]``, the teacher's hidden states, or without ``teacher_weight`` its logits ``[..., V]``.
        teacher_weight, temperature, bias, chunk_bytes: see ``vocab_parallel_linear_kl_divergence``.

    Returns:
        ``[...]``, float32, or float64 for float64 tensors.

    Raises:
        TypeError: unsupported dtypes. ValueError: wrong shapes, devices or options.

    Sharding: every row is independent.

    Examples:
        >>> import torch
        >>> from parallel_ops import linear_kl_divergence
        >>> hidden, weight = torch.randn(32, 64), torch.randn(1000, 64)
        >>> bool((linear_kl_divergence(hidden, weight, hidden @ weight.T).abs() < 1e-3).all())
        True
    """
    return _call(
        "linear_kl_divergence", hidden, weight, teacher, teacher_weight, temperature, bias, None, chunk_bytes
    )  # fmt: skip


def vocab_parallel_linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: Tensor,
    *,
    teacher_weight: Tensor | None = None,
    temperature: float = 1.0,
    group: ProcessGroup | None = None,
    bias: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """KL divergence of each row, ``KL(teacher || student)``, for distillation without the student's logits.

    Args:
        hidden: ``[..., H]``, the student's, float32, float16, bfloat16 or float64.
        weight: ``[V_r, H]``, this rank's rows of the student's output embedding, dtype of ``hidden``.
        teacher: ``[..., H_t]``, the teacher's hidden states, or without ``teacher_weight`` its logits ``[..., V_r]``.
            The teacher takes no gradient.
        teacher_weight: ``[V_r, H_t]``, this rank's rows of the teacher's output embedding, dtype of ``teacher``.
        temperature: divides the logits of both; above 0. The result is not multiplied by its square.
        group: the ranks that share the vocabulary; ``None`` for one rank.
        bias: ``[V_r]``, of the student's logits.
        chunk_bytes: bytes of the student's logits that exist at a time, beside as many of the teacher's and half as
            many in fp32; ``None`` for 256 MiB on CUDA and 64 MiB on CPU.

    Returns:
        ``[...]``, float32, or float64 for float64 tensors; the same bits on every rank.

    Raises:
        TypeError: unsupported dtypes. ValueError: wrong shapes, devices or options, a teacher that requires a gradient,
            ranks that disagree on the number of rows or on the options: on every rank.

    Sharding: hidden and teacher replicated over group (its logits S(-1)); both weights and bias S(0); the result
    replicated. The gradient of hidden is complete on every rank; the incoming gradient must be the same on every rank.

    Examples:
        >>> import torch
        >>> from parallel_ops import vocab_parallel_linear_kl_divergence
        >>> hidden, weight = torch.randn(32, 64), torch.randn(1000, 64)
        >>> teacher, teacher_weight = torch.randn(32, 128), torch.randn(1000, 128)
        >>> loss = vocab_parallel_linear_kl_divergence(hidden, weight, teacher, teacher_weight=teacher_weight)
        >>> loss.shape  # group=mesh["tp"].get_group() for shards of the weights
        torch.Size([32])
    """
    return _call(NAME, hidden, weight, teacher, teacher_weight, temperature, bias, group, chunk_bytes)


def linear_kl_divergence_reference(
    hidden: Tensor, weight: Tensor, teacher: Tensor, *, teacher_weight: Tensor | None = None, temperature: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``linear_kl_divergence`` in plain PyTorch."""
    z = torch.nn.functional.linear(hidden, weight, bias) / temperature
    y = (teacher if teacher_weight is None else torch.nn.functional.linear(teacher, teacher_weight)) / temperature
    z, y = (t.float() if t.itemsize < 4 else t for t in (z, y))
    return torch.nn.functional.kl_div(
        z.log_softmax(-1), y.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)  # fmt: skip


def _call(
    name: str, hidden: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor | None, temperature: float,
    bias: Tensor | None, group: ProcessGroup | None, chunk_bytes: int | None,
) -> Tensor:  # fmt: skip
    alone = group_name(name, group) is None
    with propagate_errors(name, None if alone else group, hidden, weight, teacher, checked=True):
        check_temperature(name, temperature)
        rows = torch.empty(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
        chunking = check_linear(name, hidden, weight, rows, bias, None, group, False, chunk_bytes)
        _check_teacher(name, hidden, weight, teacher, teacher_weight)
    teacher = teacher.contiguous()
    loss, _ = _op(hidden, weight, bias, teacher, teacher_weight, float(temperature), *chunking)
    return loss


def _check_teacher(op: str, hidden: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor | None) -> None:
    given = (
        [("teacher", teacher)] if teacher_weight is None else [("teacher", teacher), ("teacher_weight", teacher_weight)]
    )
    for name, t in given:
        check_floating(op, name, t)
        check_same_device(op, name, t, "hidden", hidden)
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: {name} requires a gradient, which the teacher does not get; detach it")
    if teacher.shape[:-1] != hidden.shape[:-1] or teacher.dim() != hidden.dim():
        raise ValueError(
            f"{op}: teacher must have the rows of hidden, {list(hidden.shape[:-1])}, got {list(teacher.shape)}"
        )
    width, wanted = weight.shape[0], "logits need one column for each row of weight"
    if teacher_weight is None:
        if teacher.shape[-1] != width:
            raise ValueError(f"{op}: teacher must have shape [..., {width}]: {wanted}; got {list(teacher.shape)}")
        return
    check_same_dtype(op, "teacher_weight", teacher_weight, "teacher", teacher)
    if teacher_weight.shape != (width, teacher.shape[-1]):
        raise ValueError(
            f"{op}: teacher_weight must have shape [{width}, {teacher.shape[-1]}], the rows of weight and the width of "
            f"teacher, got {list(teacher_weight.shape)}"
        )


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher: Tensor, teacher_weight: Tensor | None,
    chunking: ChunkOptions, widest: int, temperature: float,
) -> tuple[Chunks, Chunks | list[Tensor]]:  # fmt: skip
    """Chunks of the student, and of the teacher or, of its logits, their rows."""
    student = Chunks(hidden, weight, bias, chunking, widest, temperature=temperature)
    if teacher_weight is None:
        rows = teacher.view(-1, teacher.shape[-1])
        return student, [rows[i * student.rows : (i + 1) * student.rows] for i in range(student.count)]
    frozen = chunking._replace(needs=[False] * 3)
    return student, Chunks(teacher, teacher_weight, None, frozen, widest, rows=student.rows, temperature=temperature)


def _teacher_logits(chunks: Chunks | list[Tensor], i: int, temperature: float) -> Tensor:
    if isinstance(chunks, list):
        return chunks[i] if temperature == 1.0 else chunks[i] / temperature
    return chunks.logits(i, None)[1]


@communicates
def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher: Tensor, teacher_weight: Tensor | None,
    temperature: float, *arguments: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    chunking = ChunkOptions(*arguments)
    ignored = torch.full(hidden.shape[:-1], _IGNORED.ignore_index, device=hidden.device).flatten()
    kind = (temperature, None if teacher_weight is None else teacher.shape[-1], teacher.itemsize)
    group, layout, widest = agreed(NAME, weight, bias, ignored, _IGNORED, chunking, kind)
    student, of_teacher_chunks = _chunks(hidden, weight, bias, teacher, teacher_weight, chunking, widest, temperature)
    loss, saved = outputs(hidden, weight)
    losses, kept = student.split(loss), student.split(saved, 1)
    for i, t in enumerate(student.split(ignored)):
        _, z = student.logits(i, group)
        y = _teacher_logits(of_teacher_chunks, i, temperature)
        _, _, of_z = row_losses(NAME, z, t.flatten(), None, _IGNORED, group, layout)
        _, _, of_y = row_losses(NAME, y, t.flatten(), None, _IGNORED, group, layout)
        part = saved.new_empty(z.shape[0])
        for rows in blocks_of(z):
            log_q, log_p = log_softmax(y[rows], of_y[:, rows]), log_softmax(z[rows], of_z[:, rows])
            q = log_q.exp()
            # A column that the teacher does not have adds nothing, whatever the student's is.
            part[rows] = row_sums(torch.where(q == 0, 0.0, q.mul_(log_q.sub_(log_p))))
        losses[i].copy_(sum_of_shards(NAME, part, group).view(losses[i].shape))
        kept[i].copy_(torch.cat([of_z[:2], of_y[:2]]).view_as(kept[i]))
    return loss, saved


@communicates
def backward_of_chunks(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher: Tensor, teacher_weight: Tensor | None,
    saved: Tensor, temperature: float, *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    chunking = ChunkOptions(*arguments)
    group, widest = agreed_backward(NAME, weight, grad, chunking, (temperature,))
    student, of_teacher = _chunks(hidden, weight, bias, teacher, teacher_weight, chunking, widest, temperature)
    kept = student.split(saved, 1)
    for i, g in enumerate(student.split(grad)):
        h, z = student.logits(i, group)
        y, row_saved = _teacher_logits(of_teacher, i, temperature), kept[i].flatten(1)
        by_row = (g.reshape(-1) / temperature).unsqueeze(1)
        for rows in blocks_of(z):
            p = log_softmax(z[rows], row_saved[:2, rows]).exp_()
            q = log_softmax(y[rows], row_saved[2:, rows]).exp_()
            z[rows] = p.sub_(q).mul_(by_row[rows]).to(z.dtype)
        student.add_gradients(i, h, z, group)
    return student.gradients()


def outputs(hidden: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype, shape = kernels.accumulation_dtype(weight.dtype), hidden.shape[:-1]
    return weight.new_empty(shape, dtype=dtype), weight.new_empty((4, math.prod(shape)), dtype=dtype)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.temperature, group, parts, chunk_bytes, _ = inputs
    ctx.chunking = group, parts, chunk_bytes
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])


def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 10
    if grad is None:
        return nothing
    hidden, weight, *others = ctx.saved_tensors
    given = grad, hidden, weight, *others, ctx.temperature, *ctx.chunking
    return *rounded_gradients(NAME, ctx, weight, lambda needs: _backward_op(*given, needs)), *nothing[3:]


def _flops(hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher: Tensor, other: Tensor | None, *_: Any) -> int:
    return 2 * math.prod(hidden.shape[:-1]) * (weight.numel() + (0 if other is None else other.numel()))


def _flops_of_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher: Tensor, other: Tensor | None, *rest: Any
) -> int:
    again = _flops(hidden, weight, bias, teacher, other)
    return again + sum(rest[-1][:2]) * 2 * grad.numel() * weight.numel()


_backward_op = register(
    f"{NAME}_backward", outputs=backward_outputs, cpu=backward_of_chunks, cuda=backward_of_chunks,
    flops=_flops_of_backward,
)  # fmt: skip
_op = register(
    NAME, outputs=outputs, cpu=forward, cuda=forward, setup_context=setup_context, backward=backward, differentiable=1,
    autocast=cast_first(3), flops=_flops,
)  # fmt: skip
