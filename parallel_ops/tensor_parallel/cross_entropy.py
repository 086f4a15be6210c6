"""Cross-entropy on logits sharded over the vocabulary, without a copy of the logits.

    z      = x, or c tanh(x / c) with softcap c                       one row of logits, over all shards
    lse    = log sum_j exp(z_j)
    loss   = (1 - eps) (lse - z_t) + eps (lse - mean_j z_j) + zeta lse^2
    dx_j   = g dz_j/dx_j (p_j (1 + 2 zeta lse) - (1 - eps) [j = t] - eps / V),    p_j = exp(z_j - lse)

with t the target, eps the label smoothing over the *global* vocabulary of V entries, zeta the z-loss and g the incoming
gradient. At eps = zeta = 0 and without softcap this is ``F.cross_entropy``.

Forward: each rank reads its logits once and keeps, per row, max, sum of exp(z - max) and target logit (with smoothing
also the sum and the count of logits). One all-gather of these 12 or 20 bytes a row; every rank then combines them in
rank order, so that all have the same bits. Backward: no collective; the logits are read once and the gradient written
once, with the target's share folded in before the one rounding.

Saved for backward: the logits themselves (no copy), and per row the maximum and log sum exp(z - max). Their sum is lse;
they are kept apart because in fp32 lse has only three decimals left at logits of 1e4, and p would have no more.

A logit of -inf is a column that is not there: it gets no gradient and smoothing leaves it out of the mean. So a padded
vocabulary is masked by -inf in its padding columns (F.cross_entropy with smoothing gives inf there).

Sources: Szegedy et al., arXiv:1512.00567 (smoothing); Chowdhery et al., arXiv:2204.02311 (z-loss); Gemma Team,
arXiv:2408.00118 (softcap); Shoeybi et al., arXiv:1909.08053 (vocabulary parallelism).
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm._agreement import announcing, sends
from parallel_ops.comm._group import group_name, resolve_group
from parallel_ops.comm._primitives import gathered
from parallel_ops.ops import cross_entropy as local
from parallel_ops.ops._check import check_floating, check_same_device
from parallel_ops.ops._registration import register
from parallel_ops.tensor_parallel._loss_options import LossOptions, check_reduction, check_target, reduce
from parallel_ops.tensor_parallel._vocab_shards import agreed_layout

_NAME = "vocab_parallel_cross_entropy"


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: ProcessGroup | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace_backward: bool = False,
) -> Tensor:
    """Cross-entropy of logits whose last dimension is sharded over ``group``.

    Args:
        logits: ``[..., V_r]``, float32, float16, bfloat16 or float64, any strides: this rank's part of the vocabulary.
            Shards follow each other in rank order and may differ in size. -inf marks a column that is not there.
        target: ``[...]``, int64 or int32: indices into the whole vocabulary, the same on every rank.
        group: the ranks that share the vocabulary; ``None`` for unsharded logits.
        label_smoothing: the share of the target spread evenly over the whole vocabulary, in [0, 1].
        z_loss: weight of logsumexp squared.
        softcap: ``c`` replaces each logit x by ``c * tanh(x / c)``.
        ignore_index: rows with this target have loss and gradient 0.
        reduction: ``"none"``, ``"sum"``, or ``"mean"``: over the rows that are not ignored, 0 if there are none
            (``F.cross_entropy`` gives NaN).
        inplace_backward: the gradient is written over the logits (if contiguous), which saves as much memory again.
            Autograd knows: a second backward, or the backward of another op that saved these logits, raises. Values
            read from the logits afterwards are those of the gradient. Under ``torch.compile`` memory is the compiler's
            to plan, and the gradient goes to a new tensor.

    Returns:
        A scalar, or ``[...]`` for ``reduction="none"``; float32, or float64 for float64 logits. All ranks get the same
        bits.

    Raises:
        TypeError: unsupported dtypes. ValueError: wrong shapes, devices or options, ranks that disagree on the number
        of rows or on the options, and, on CPU, a target outside the vocabulary: on every rank, so that none waits. On
        CUDA, where looking would mean waiting for the device, rows with such a target have NaN loss and gradient.

    Sharding: logits S(-1) over group, target and loss replicated, gradient of logits S(-1). Every rank calls with the
    same rows; the incoming gradient must be the same on every rank.
    """
    name = group_name(_NAME, group)
    with announcing(_NAME, group, logits, target, asks=True):
        check_floating(_NAME, "logits", logits)
        if logits.dim() == 0:
            raise ValueError(f"{_NAME}: logits must have at least one dimension, got a scalar")
        check_target(_NAME, target, logits.shape[:-1], "that of logits without its last dimension")
        check_same_device(_NAME, "target", target, "logits", logits)
        check_reduction(_NAME, reduction)
        o = LossOptions.checked(_NAME, label_smoothing, z_loss, softcap, ignore_index)
    loss, _, _ = _op(logits, target, name, o.label_smoothing, o.z_loss, o.softcap, o.ignore_index, inplace_backward)
    return reduce(loss, target, ignore_index, reduction)


@sends
def _forward(
    logits: Tensor,
    target: Tensor,
    group: str | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    ignore_index: int,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    over = None if group is None else resolve_group(group)
    options = (label_smoothing, z_loss, softcap, logits.dtype is torch.float64)
    layout = agreed_layout(_NAME, over, logits.shape[-1], target, ignore_index, options)
    part, column = local.statistics(
        logits, target.contiguous(), layout.start, layout.vocab, ignore_index, softcap, label_smoothing != 0
    )
    parts = part.unsqueeze(0) if over is None else gathered(_NAME, part, over)
    loss, saved = local.combine(parts, column, label_smoothing, z_loss)
    return loss.view(target.shape), column, saved


def _fake(logits: Tensor, target: Tensor, group: str | None, label_smoothing: float, *_: Any) -> tuple[Tensor, ...]:
    accumulate, rows = local.accumulation_dtype(logits.dtype), target.numel()
    return (
        logits.new_empty(target.shape, dtype=accumulate),
        target.new_empty(rows, dtype=torch.int64),
        logits.new_empty((3 if label_smoothing else 2, rows), dtype=accumulate),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, _, label_smoothing, z_loss, softcap, _, ctx.inplace = inputs
    _, column, saved = output
    ctx.mark_non_differentiable(column, saved)
    ctx.save_for_backward(logits, column, saved)
    ctx.options = label_smoothing, z_loss, softcap


def _autograd(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    logits, column, saved = ctx.saved_tensors
    # Not while a compiler traces, which decides about memory itself and refuses writes to a leaf. Its tensors are of a
    # subclass; torch.compiler.is_compiling() is no sign of it here in torch 2.11.
    if ctx.inplace and logits.is_contiguous() and type(logits) in (Tensor, torch.nn.Parameter):
        dlogits = logits.detach()
        local.backward_inplace(grad, dlogits, column, saved, *ctx.options)
        torch.autograd.graph.increment_version(logits)
    else:
        dlogits = local.backward(grad, logits, column, saved, *ctx.options)
    return (dlogits, *(None,) * 7)


_op = register(_NAME, fake=_fake, cpu=_forward, cuda=_forward, setup_context=_setup_context, backward=_autograd)
