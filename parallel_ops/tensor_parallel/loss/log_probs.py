"""Log-probabilities of tokens and the entropy of their distributions, from hidden states, without the logits.

    z        = (h W^T + b) / T                       one chunk of rows at a time, as in linear_cross_entropy.py
    log p_j  = z_j - lse,   p_j = exp(log p_j)
    H        = - sum_j p_j log p_j
    dz_j     = g (1[j = t] - p_j) - g_H p_j (log p_j + H)

with t the token, T the temperature, g and g_H the incoming gradients of log p_t and of H. Saved for backward, per row:
maximum, log of the sum of exponentials, log p_t and H. The factors of the rows are known in backward only, which
computes each chunk of logits again: four GEMMs in all, and the memory of the linear loss with ``reduction="none"``.

Over a group each chunk has the all-gather of the loss, and with the entropy one more of 4 bytes a row, added in rank
order. Source: Schulman et al., arXiv:1707.06347 (the ratio and the entropy of PPO).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.dispatch.registration import cast_first, register
from parallel_ops._internal.distributed.groups import group_name
from parallel_ops.comm.consistency import communicates, propagate_errors
from parallel_ops.ops.cross_entropy import kernels
from parallel_ops.ops.cross_entropy.options import COLUMN_IGNORED, NONE, LossOptions, check_target_values
from parallel_ops.tensor_parallel.loss.cross_entropy import row_losses
from parallel_ops.tensor_parallel.loss.distributions import (
    check_temperature,
    flops_of_backward,
    rounded_gradients,
    row_entropy,
    sum_of_shards,
    write_gradient_,
)
from parallel_ops.tensor_parallel.loss.linear_loss import agreed, agreed_backward, backward_outputs, check_linear
from parallel_ops.tensor_parallel.loss.logit_chunks import ChunkOptions, Chunks

NAME = "vocab_parallel_linear_log_probs"


class LogProbs(NamedTuple):
    """Results for each token, in float32, or float64 for float64 tensors; 0 where the token is ignored.

    log_probs: ``[...]``, the natural logarithm of the token's probability.
    entropy: ``[...]``, of the distribution that the token is from, in nats; ``None`` if it was not requested.

    Examples:
        >>> import torch
        >>> from parallel_ops import linear_log_probs
        >>> result = linear_log_probs(torch.zeros(3, 8), torch.zeros(10, 8), torch.zeros(3, dtype=torch.long))
        >>> bool(torch.allclose(result.entropy, torch.tensor(10.0).log()))
        True
    """

    log_probs: Tensor
    entropy: Tensor | None


class Options(NamedTuple):
    """The options of the op, in the order of its schema."""

    temperature: float
    entropy: bool
    ignore_index: int

    def of_loss(self) -> LossOptions:
        """Options of the cross-entropy that is minus the log-probability."""
        return LossOptions(0.0, 0.0, 0.0, self.ignore_index, False, NONE)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    chunk_bytes: int | None = None,
) -> LogProbs:
    """``vocab_parallel_linear_log_probs`` on one device.

    Args:
        hidden: ``[..., H]``, float32, float16, bfloat16 or float64.
        weight: ``[V, H]``, the output embedding, dtype of ``hidden``.
        tokens: ``[...]``, int64 or int32.
        temperature, entropy, bias, ignore_index, chunk_bytes: see ``vocab_parallel_linear_log_probs``.

    Returns:
        ``LogProbs``; gradients flow through both results.

    Raises:
        TypeError: unsupported dtypes. ValueError: wrong shapes, devices or options and, on CPU, a token outside the
            vocabulary. On CUDA rows with such a token are NaN.

    Sharding: every row is independent; hidden, tokens and results may be sharded on their rows.

    Examples:
        >>> import torch
        >>> from parallel_ops import linear_log_probs
        >>> hidden, weight, tokens = torch.randn(32, 64), torch.randn(1000, 64), torch.randint(1000, (32,))
        >>> log_probs, entropy = linear_log_probs(hidden, weight, tokens)
        >>> expected = (hidden @ weight.T).log_softmax(-1)[torch.arange(32), tokens]
        >>> torch.allclose(log_probs, expected, rtol=1e-4, atol=1e-4)
        True
    """
    return _call(
        "linear_log_probs", hidden, weight, tokens, Options(temperature, entropy, ignore_index), bias, None, False,
        chunk_bytes,
    )  # fmt: skip


def vocab_parallel_linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
    group: ProcessGroup | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    sequence_parallel: bool = False,
    chunk_bytes: int | None = None,
) -> LogProbs:
    """Log-probability of each token and entropy of its distribution, from hidden states, without the logits.

    Args:
        hidden: ``[..., H]``, float32, float16, bfloat16 or float64; with ``sequence_parallel`` this rank's part
            ``[s / P, ..., H]``, equal parts in rank order.
        weight: ``[V_r, H]``, this rank's rows of the output embedding, dtype of ``hidden``.
        tokens: ``[...]``, or the whole ``[s, ...]`` with ``sequence_parallel``; int64 or int32, the same on every rank.
        temperature: divides the logits; above 0.
        entropy: compute the entropy too.
        group: the ranks that share the vocabulary; ``None`` for one rank.
        bias: ``[V_r]``. Columns of -inf count as absent (padding of the vocabulary).
        ignore_index: rows with this token have results and gradients 0.
        sequence_parallel: ``hidden`` is sharded on its first dimension over ``group``.
        chunk_bytes: bytes of logits that exist at a time (with the entropy half as many again in fp32); ``None`` for
            256 MiB on CUDA and 64 MiB on CPU.

    Returns:
        ``LogProbs``; gradients flow through both results. All ranks get the same bits. Under autocast hidden, weight
        and bias are cast to the autocast dtype.

    Raises:
        TypeError: unsupported dtypes. ValueError: wrong shapes, devices or options, ranks that disagree on the number
            of rows or on the options, and, on CPU, a token outside the vocabulary: on every rank. On CUDA rows with
            such a token are NaN.

    Sharding: hidden replicated over group, or S(0) with ``sequence_parallel``; weight and bias S(0); tokens and results
    replicated. The gradient of hidden is complete on every rank, sharded as hidden is; the incoming gradients must be
    the same on every rank.

    Examples:
        >>> import torch
        >>> from parallel_ops import vocab_parallel_linear_log_probs
        >>> hidden, weight, tokens = torch.randn(32, 64), torch.randn(1000, 64), torch.randint(1000, (32,))
        >>> log_probs, entropy = vocab_parallel_linear_log_probs(hidden, weight, tokens, temperature=0.7)
        >>> log_probs.shape, entropy.shape  # group=mesh["tp"].get_group() for shards of the weight
        (torch.Size([32]), torch.Size([32]))
    """
    options = Options(temperature, entropy, ignore_index)
    return _call(NAME, hidden, weight, tokens, options, bias, group, sequence_parallel, chunk_bytes)


def linear_log_probs_reference(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *, temperature: float = 1.0, bias: Tensor | None = None,
    ignore_index: int = -100,
) -> LogProbs:  # fmt: skip
    """``linear_log_probs`` in plain PyTorch."""
    z = torch.nn.functional.linear(hidden, weight, bias) / temperature
    log_p = (z.float() if z.itemsize < 4 else z).log_softmax(-1)
    kept = tokens != ignore_index
    at_token = log_p.gather(-1, torch.where(kept, tokens, 0).long().unsqueeze(-1)).squeeze(-1)
    summands = torch.where(log_p == -math.inf, 0.0, log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min))
    return LogProbs(torch.where(kept, at_token, 0.0), torch.where(kept, -summands.sum(-1), 0.0))


def _call(
    name: str, hidden: Tensor, weight: Tensor, tokens: Tensor, options: Options, bias: Tensor | None,
    group: ProcessGroup | None, sequence_parallel: bool, chunk_bytes: int | None,
) -> LogProbs:  # fmt: skip
    alone = group_name(name, group) is None
    with propagate_errors(name, None if alone else group, hidden, weight, tokens, checked=True):
        check_temperature(name, options.temperature)
        if not isinstance(options.ignore_index, int):
            raise TypeError(f"{name}: ignore_index must be an int, got {type(options.ignore_index).__name__}")
        chunking = check_linear(
            name, hidden, weight, tokens, bias, None, group, sequence_parallel, chunk_bytes, target_name="tokens"
        )
    options = options._replace(temperature=float(options.temperature), entropy=bool(options.entropy))
    try:
        log_probs, entropy, *_ = _op(hidden, weight, bias, tokens, *options, *chunking)
    except RuntimeError:
        if alone:  # on CPU the kernel checks the tokens; the next line names a bad one with its row
            check_target_values(name, tokens, weight.shape[0], options.ignore_index, "token")
        raise
    return LogProbs(log_probs, entropy if options.entropy else None)


def _options_of(arguments: Any) -> tuple[Options, ChunkOptions]:
    return Options(*arguments[:3]), ChunkOptions(*arguments[3:])


@communicates
def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    options, chunking = _options_of(arguments)
    group, layout, widest = agreed(NAME, weight, bias, tokens, options.of_loss(), chunking, options)
    chunks = Chunks(hidden, weight, bias, chunking, widest, temperature=options.temperature)
    log_probs, entropy, column, saved = outputs(hidden, weight, bias, tokens, *arguments)
    columns, kept = chunks.split(column), chunks.split(saved, 1)
    for i, t in enumerate(chunks.split(tokens)):
        _, z = chunks.logits(i, group)
        t_flat = t.flatten().contiguous()
        loss, where, row_saved = row_losses(NAME, z, t_flat, None, options.of_loss(), group, layout)
        rows = [*row_saved[:2], -loss]
        if options.entropy:
            rows += [torch.where(where == COLUMN_IGNORED, 0.0, sum_of_shards(NAME, row_entropy(z, row_saved), group))]
        columns[i].copy_(where.view(t.shape))
        kept[i].copy_(torch.stack(rows).view_as(kept[i]))
    log_probs.copy_(saved[2].view(tokens.shape))
    if options.entropy:
        entropy.copy_(saved[3].view(tokens.shape))
    return log_probs, entropy, column, saved


@communicates
def backward_of_chunks(
    grad: Tensor, grad_entropy: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None, column: Tensor,
    saved: Tensor, *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    options, chunking = _options_of(arguments)
    group, widest = agreed_backward(NAME, weight, grad, chunking, (*options, grad_entropy is None))
    chunks = Chunks(hidden, weight, bias, chunking, widest, temperature=options.temperature)
    columns, kept = chunks.split(column), chunks.split(saved, 1)
    of_entropy = [None] * chunks.count if grad_entropy is None else chunks.split(grad_entropy)
    for i, g in enumerate(chunks.split(grad)):
        h, z = chunks.logits(i, group)
        where, row_saved = columns[i].flatten().contiguous(), kept[i].flatten(1).contiguous()
        by_row, g_entropy = g.reshape(-1) / options.temperature, of_entropy[i]
        if g_entropy is None:
            kernels.backward(-by_row, z, None, where, row_saved[:3].contiguous(), None, *options.of_loss(), z)
        else:
            write_gradient_(z, where, row_saved, by_row, g_entropy.reshape(-1) / options.temperature)
        chunks.add_gradients(i, h, z, group)
    return chunks.gradients()


def outputs(hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    options, dtype = Options(*arguments[:3]), kernels.accumulation_dtype(weight.dtype)
    return (
        weight.new_empty(tokens.shape, dtype=dtype),
        weight.new_empty(tokens.shape if options.entropy else 0, dtype=dtype),
        tokens.new_empty(tokens.numel(), dtype=torch.int64),
        weight.new_empty((3 + options.entropy, tokens.numel()), dtype=dtype),
    )


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, _, *ctx.arguments = inputs
    _, _, column, saved = output
    ctx.mark_non_differentiable(column, saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, column, saved)


def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (4 + len(ctx.arguments))
    options, _ = _options_of(ctx.arguments)
    grad_entropy = grad_entropy if options.entropy else None
    if grad is None and grad_entropy is None:
        return nothing
    hidden, weight, bias, column, saved = ctx.saved_tensors
    if grad is None:
        grad = saved[2].new_zeros(saved.shape[1])
    given = grad, grad_entropy, hidden, weight, bias, column, saved, *ctx.arguments[:-1]
    return *rounded_gradients(NAME, ctx, weight, lambda needs: _backward_op(*given, needs)), *nothing[3:]


_backward_op = register(
    f"{NAME}_backward", outputs=lambda grad, _, *given: backward_outputs(grad, *given), cpu=backward_of_chunks,
    cuda=backward_of_chunks, flops=lambda grad, _, *given: flops_of_backward(grad, *given),
)  # fmt: skip
_op = register(
    NAME, outputs=outputs, cpu=forward, cuda=forward, setup_context=setup_context, backward=backward, differentiable=2,
    autocast=cast_first(3), flops=lambda _, weight, bias, tokens, *rest: 2 * tokens.numel() * weight.numel(),
)  # fmt: skip
