"""Attention whose scores are never in memory as a whole, forward and backward.

    s[i, j] = scale q[i] . k[j]               softcap > 0:  s = softcap tanh(s / softcap)
    out[i]  = sum_j m[i, j] p[i, j] v[j] / (1 - p_drop)     p[i, :] = softmax of s[i, :] over the keys that i sees
                                                            and a sink, which has no value
    dsink   = - sum over batch and i of exp(sink - M[i]) / Z[i] dout[i] . out[i]

All keys are one block of ``block.py``, where the other formulas are. Saved for backward: the inputs,
out, and the maximum M and the sum Z of each row's exponentials, 8 bytes a row and head.

Source: FlashAttention (Dao, arXiv:2307.08691); soft cap as in Gemma 2 (arXiv:2408.00118), sink as in gpt-oss.
"""

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from parallel_ops._internal.dispatch.registration import cast_first, register
from parallel_ops._internal.gradients.split_backward import kept_parameter, requested
from parallel_ops._internal.tensor_format import TensorFormat, from_sbhd, to_sbhd
from parallel_ops.ops.attention import torch_kernels
from parallel_ops.ops.attention.backends import check_backend, resolve
from parallel_ops.ops.attention.block import (
    attention_backward,
    attention_gradient_rows,
    attention_sink_gradient,
    begin_carry,
    block_attention,
    merge_block,
    with_unit_last_stride,
)
from parallel_ops.ops.attention.flops import flops, flops_of_backward
from parallel_ops.ops.attention.options import (
    AttentionArguments,
    AttentionOptions,
    BackendName,
    KeyRanges,
    attention_options,
    check_tensors,
)
from parallel_ops.ops.attention.reference import dropout_of, logits_of, mask_of, reference

NAME = "flash_attention"


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, tensor_format: TensorFormat = ..., return_max_logit: Literal[False] = ...,
    **arguments: Unpack[AttentionArguments],
) -> Tensor: ...  # fmt: skip


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, tensor_format: TensorFormat = ..., return_max_logit: Literal[True],
    **arguments: Unpack[AttentionArguments],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_ranges: KeyRanges | None = None,
    first_head: int = 0,
    tensor_format: TensorFormat = "sbhd",
    backend: BackendName = "auto",
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(softmax_scale * q k^T) v`` over the keys visible to each query, without scores in memory.

    Args:
        q: ``[sq, b, heads, d]``, or as ``tensor_format`` says; float32, float16, bfloat16 or float64, any strides.
            float64 on CUDA is for checks of gradients: it runs in plain PyTorch, with all scores in memory.
        k: ``[sk, b, kv_heads, d]``, where kv_heads divides heads: head h uses ``h // (heads // kv_heads)``; dtype and
            device of ``q``, any strides.
        v: ``[sk, b, kv_heads, d_v]``, as k. d_v may differ from d, as in multi-head latent attention (DeepSeek-V2,
            arXiv:2405.04434: 192 and 128). On CUDA both are at most 256.
        causal: query i sees the keys up to ``i + sk - sq``, so the last query sees the last key; ``sq <= sk``.
            ``None``: true without ``key_ranges``, false with them.
        softmax_scale: finite; ``None`` for ``1 / sqrt(d)``.
        window_size: ``(left, right)``, counted as FlashAttention does: query i sees the keys from
            ``i + sk - sq - left`` to ``i + sk - sq + right``; -1 for no limit. A causal window of n tokens, the query's
            own included, is ``(n - 1, 0)``: n is Hugging Face's ``sliding_window``. With ``causal`` nothing on the
            right is seen.
        sink: ``[heads]``, one more logit of every row, not scaled, without a value; gets a gradient. Any
            floating-point dtype.
        softcap: scores are kept within ``(-softcap, softcap)`` by ``softcap * tanh(score / softcap)``; above 0.
        dropout_p: probability of dropping a probability, from 0 to 1; kept ones are scaled by ``1 / (1 - dropout_p)``.
        dropout_seed: any 64-bit integer, or one int64 element on the device of ``q``: the key of Philox, from which
            dropout draws. ``None`` draws one from PyTorch's default generator of that device.
        cu_seqlens: int32 or int64 ``[documents + 1]`` on the device of ``q``, never decreasing from 0 to s, where
            ``sq == sk == s``: document n is the tokens from ``cu_seqlens[n]`` up to ``cu_seqlens[n + 1]``, and a query
            sees keys of its own document. Values are checked on CPUs only.
        key_ranges: ``(first, last)``, int32 ``[sq]`` each, or both as one tensor ``[2, sq]``, on the device of ``q``:
            query i sees the keys j with ``first[i] <= j <= last[i]``, none if its first is after its last. Neither
            decreases from query to query. ``parallel_ops.ops.attention`` has ``document_ranges``, ``prefix_ranges``,
            ``block_causal_ranges``, ``causal_ranges`` and ``intersect_ranges``; layers that pass the same tensor share
            what is made of it. ``causal``, ``window_size`` and ``cu_seqlens``, where given too, cut it. Values are
            checked on CPUs only.
        first_head: the index of the first of these heads among those of all ranks, for dropout.
        tensor_format: order of the dimensions of q, k, v and the result: ``"sbhd"``, ``"bshd"`` (FlashAttention's) or
            ``"bhsd"`` (SDPA's). Nothing is copied.
        backend: whose kernels compute the call, forward and backward. ``"auto"``: on CUDA flash-attn-4's
            (``"fa4"``) or torch's where a published measurement speaks for it (``allow_list.py``), torch's
            (``"cudnn"``, ``"flash"``) where its ``scaled_dot_product_attention`` would take one of them and it can do
            the call, else this package's (``"triton"``); on CPUs this package's. The others by name:

            ==========  ==================================================================================
            triton      CUDA; everything
            cudnn       CUDA; 16 bits, d and d_v multiples of 8 up to 128; full, or causal with sq = sk
            flash       CUDA; 16 bits, d = d_v a multiple of 8 up to 256 (128 on some GPUs); full, or causal
                        with sq = sk, also with a window or, for b = 1, cu_seqlens. CPU; d = d_v; full or causal
            fa4         CUDA, if flash-attn-4 is installed; 16 bits; any window, softcap; for b = 1 cu_seqlens;
                        widths of heads by GPU, see ``refusals.py``
            ==========  ==================================================================================

            A sink is joined to any; dropout and ``key_ranges`` are this package's alone. torch's gradients of q differ
            in the last bits from run to run. Under ``torch.use_deterministic_algorithms(True)`` ``"auto"`` is
            ``"triton"``, or ``"fa4"`` where its deterministic backward is known, with the same bits on every run.
            Memory that is not aligned to 16 bytes goes to this package's kernels.
        return_max_logit: also return the largest logit of each head, as QK-clip reads it (Kimi K2, arXiv:2507.20534,
            section 2.1). Where the call's kernels do not keep it, and with a sink, this package's compute it apart.

    Returns:
        ``[sq, b, heads, d_v]``, contiguous, in the dtype of ``q`` (under autocast, in its dtype); in another
        ``tensor_format`` a view of this. Arithmetic in fp32 (fp64 for fp64). The result of a query that sees no key is
        0, and so are its gradient and that of a key that no query sees. With ``return_max_logit`` a pair: the result,
        and fp32 (fp64 for fp64) ``[heads]`` without a gradient, the maximum over batch, queries and the keys that they
        see of the logits after ``softmax_scale`` and ``softcap``, without the sink; -inf if there are none.

    Raises:
        TypeError: unsupported or different dtypes, an option of a wrong type.
        ValueError: wrong shapes or devices, ``sq > sk`` if causal, ``window_size`` below -1, ``softcap`` not above 0,
            ``softmax_scale`` not finite, ``dropout_p`` outside 0 to 1, ``cu_seqlens`` with ``sq != sk`` or,
            on CPUs, of other tokens, ``key_ranges`` that decrease or leave the keys (CPU), a ``backend`` that is none
            or cannot do the call.

    Sharding: any shard of kv_heads with their heads and sinks gives that shard of out, with ``first_head`` also
    its dropout mask. So does any shard of batch without dropout. Queries and keys must be whole; ``ring_attention``
    takes them sharded.

    Examples:
        >>> import torch
        >>> from parallel_ops import flash_attention
        >>> q = torch.randn(128, 2, 8, 32)  # [s, b, heads, d]
        >>> k, v = torch.randn(128, 2, 4, 32), torch.randn(128, 2, 4, 32)  # two query heads share a key head
        >>> flash_attention(q, k, v).shape
        torch.Size([128, 2, 8, 32])
    """
    check_tensors(NAME, q, k, v, tensor_format)
    if tensor_format != "sbhd":
        q, k, v = (to_sbhd(t, tensor_format) for t in (q, k, v))
    options = attention_options(
        NAME, q, k, v, causal=causal, softmax_scale=softmax_scale, window_size=window_size, sink=sink, softcap=softcap,
        dropout_p=dropout_p, dropout_seed=dropout_seed, cu_seqlens=cu_seqlens, key_ranges=key_ranges,
        first_head=first_head, backend=backend,
    )  # fmt: skip
    check_backend(NAME, options, q, k, v)
    if q.dtype is torch.float64 and q.is_cuda:  # there is no Triton kernel for fp64
        out, statistics = reference(q, k, v, options).contiguous(), None
    else:
        out, statistics = _forward(q, k, v, *options)
    out = from_sbhd(out, tensor_format)
    return (out, _max_logit(q, k, v, options, statistics)) if return_max_logit else out


@torch.no_grad()
def _max_logit(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, statistics: Tensor | None) -> Tensor:
    """The largest logit of each head ``[heads]``; ``statistics``: those of the call."""
    if statistics is None:
        scores, visible = logits_of(q, k, options)
        return scores.masked_fill(~visible, -math.inf).amax((0, 2, 3))
    if options.sink is not None or resolve(options, q, k, v) != "triton":
        # The sink, and others' kernels, leave no maximum. A few columns of v spare the second matmul.
        ours = options._replace(sink=None, dropout_seed=None, dropout_p=0.0, backend="auto" if q.is_cpu else "triton")
        statistics = _forward(q, k, v[..., :16], *ours)[1]
    largest = statistics[0]
    return largest.amax((0, 2)) if largest.numel() else largest.new_full(largest.shape[1:2], -math.inf)


def _outputs(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    s, b, h, d = q.shape
    d_v = v.shape[3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if d == d_v else q.new_empty(s, b, h, d_v)
    return out, q.new_empty((2, b, h, s), dtype=torch.promote_types(q.dtype, torch.float32))


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, sink: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    dsink = statistics.new_empty(0 if sink is None else sink.shape[0])
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    return dq, dk, dv, dsink


def forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    options = AttentionOptions(*arguments)
    q, k, v = (with_unit_last_stride(t) for t in (q, k, v))
    out, statistics = _outputs(q, k, v)
    chosen = resolve(options, q, k, v)
    if chosen != "triton":
        theirs, logsumexp = torch_kernels.forward(chosen, options, q, k, v)
        if options.sink is None:
            statistics[0].copy_(logsumexp)
            statistics[1].fill_(1.0)
            return theirs.contiguous(), statistics
        carry = torch.empty_like(out, dtype=statistics.dtype)
        begin_carry(carry, statistics, options.sink)
        merge_block(theirs, logsumexp, out=carry, statistics=statistics, merge=True)
        return carry.to(q.dtype), statistics
    mask, dropout = mask_of(q.shape[0], k.shape[0], options), dropout_of(q.shape[0], k.shape[0], options)
    merge = options.sink is not None or mask is None
    if merge:
        out = torch.empty_like(out, dtype=statistics.dtype)
        begin_carry(out, statistics, options.sink)
    if mask is not None:
        ours = options if options.backend == "auto" and q.is_cpu else options._replace(backend="triton")
        block_attention(q, k, v, mask, ours, dropout=dropout, out=out, statistics=statistics, merge=merge)
    return out.to(q.dtype) if merge else out, statistics


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    options = AttentionOptions(*arguments)
    grad, q, k, v = (with_unit_last_stride(t) for t in (grad, q, k, v))
    chosen = resolve(options, q, k, v)
    if chosen != "triton":
        # A forward of either backend leaves M and Z. Their sum has no rows that see nothing: these calls have none.
        logsumexp = statistics[0] + statistics[1].log()
        theirs = torch_kernels.backward(chosen, options, grad, q, k, v, out, logsumexp)
        dsink = statistics.new_empty(0)
        if options.sink is not None:
            dsink = attention_sink_gradient(options.sink, attention_gradient_rows(grad, out, statistics))
        return *(t.contiguous() for t in theirs), dsink
    dq, dk, dv, dsink = gradients = _gradients(grad, q, k, v, out, statistics, options.sink)
    mask = mask_of(q.shape[0], k.shape[0], options, from_keys=q.is_cuda)
    if mask is None:
        rows = attention_gradient_rows(grad, out, statistics)
        for gradient in (dq, dk, dv):
            gradient.zero_()
    else:
        dropout = dropout_of(q.shape[0], k.shape[0], options)
        rows = attention_backward(
            grad, q, k, v, out, statistics, mask, options, dropout=dropout, dq=dq, dk=dk, dv=dv
        )  # fmt: skip
    if options.sink is not None:
        dsink.copy_(attention_sink_gradient(options.sink, rows))
    return gradients


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *arguments = inputs
    sink, cu_seqlens, key_ranges, seed, *ctx.options = arguments
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, sink, cu_seqlens, key_ranges, seed)


def _autograd(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    q, k, v, out, statistics, sink, *tensors = ctx.saved_tensors
    if sink is not None:
        sink = kept_parameter(ctx, NAME, "sink", sink, 3, requested(ctx))
    dq, dk, dv, dsink = _backward(grad, q, k, v, out, statistics, sink, *tensors, *ctx.options)
    return dq, dk, dv, None if sink is None else dsink, *(None,) * (len(AttentionOptions._fields) - 1)


_backward = register(
    "flash_attention_backward",
    outputs=_gradients,
    cuda=backward,
    cpu=backward,
    flops=flops_of_backward,
)
_forward = register(
    NAME,
    outputs=_outputs,
    cuda=forward,
    cpu=forward,
    setup_context=setup_context,
    backward=_autograd,
    autocast=cast_first(3),
    flops=flops,
    reference=lambda q, k, v, *arguments: reference(q, k, v, AttentionOptions(*arguments)),
)
