"""Attention whose scores are never in memory as a whole, forward and backward.

    s[i, j] = scale q[i] . k[j]               softcap > 0:  s = softcap tanh(s / softcap)
    out[i]  = sum_j m[i, j] p[i, j] v[j] / (1 - p_drop)     p[i, :] = softmax of s[i, :] over the keys that i sees
                                                            and a sink, which has no value
    dsink   = - sum over batch and i of exp(sink - M[i]) / Z[i] dout[i] . out[i]

All keys are one block of ``block.py``, where the other formulas are. Saved for backward: the inputs,
out, and the maximum M and the sum Z of each row's exponentials, 8 bytes a row and head.

Source: FlashAttention (Dao, arXiv:2307.08691); soft cap as in Gemma 2 (arXiv:2408.00118), sink as in gpt-oss.
"""

import functools
import math
from typing import Any, TypedDict

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.registration import cast_first, register
from parallel_ops._internal.dropout import dropout_seed
from parallel_ops._internal.gradients.split_backward import kept_parameter, requested
from parallel_ops._internal.philox import kept_scale
from parallel_ops._internal.token_range import TokenRange
from parallel_ops.ops.attention import torch_kernels
from parallel_ops.ops.attention.backends import BackendName, check_backend, resolve
from parallel_ops.ops.attention.block import (
    Dropout,
    MaskBounds,
    attention_backward,
    attention_bounds,
    attention_gradient_rows,
    attention_sink_gradient,
    begin_carry,
    block_attention,
    dense_mask,
    dropout_keep_mask,
    merge_block,
)
from parallel_ops.ops.attention.checks import check_attention
from parallel_ops.ops.attention.flops import attention_flops
from parallel_ops.ops.softmaxes.shared import visible_softmax


class AttentionArguments(TypedDict, total=False):
    """Keyword arguments of ``flash_attention``."""

    causal: bool
    scale: float | None
    window: int | None
    sink: Tensor | None
    softcap: float | None
    dropout_p: float
    seed: int | Tensor | None
    cu_seqlens: Tensor | None
    first_head: int
    backend: BackendName


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    first_head: int = 0,
    backend: BackendName = "auto",
) -> Tensor:
    """``softmax(scale * q k^T) v`` over the keys visible to each query, without scores in memory.

    Args:
        q: ``[sq, b, heads, d]``, float32, float16, bfloat16 or float64, any strides. float64 on CUDA is for checks of
            gradients: it runs in plain PyTorch, with all scores in memory.
        k: ``[sk, b, kv_heads, d]``, where kv_heads divides heads: head h uses ``h // (heads // kv_heads)``; dtype and
            device of ``q``, any strides.
        v: ``[sk, b, kv_heads, d_v]``, as k. d_v may differ from d, as in multi-head latent attention (DeepSeek-V2,
            arXiv:2405.04434: 192 and 128). On CUDA both are at most 256.
        causal: query i sees the keys up to ``i + sk - sq``, so the last query sees the last key; ``sq <= sk``.
        scale: finite; ``None`` for ``1 / sqrt(d)``.
        window: how many keys a query sees at most, its own included; causal only.
        sink: ``[heads]``, one more logit of every row, not scaled, without a value; gets a gradient. Any
            floating-point dtype.
        softcap: scores are kept within ``(-softcap, softcap)`` by ``softcap * tanh(score / softcap)``; above 0.
        dropout_p: probability of dropping a probability, from 0 to 1; kept ones are scaled by ``1 / (1 - dropout_p)``.
        seed: what dropout draws from: any 64-bit integer, or one int64 element on the device of ``q``. ``None`` draws
            one from PyTorch's default generator of that device.
        cu_seqlens: int32 or int64 ``[documents + 1]`` on the device of ``q``, never decreasing from 0 to s, where
            ``sq == sk == s``: document n is the tokens from ``cu_seqlens[n]`` up to ``cu_seqlens[n + 1]``, and a query
            sees keys of its own document. The host does not read its values, so they are not checked.
        first_head: the index of the first of these heads among those of all ranks, for dropout.
        backend: whose kernels compute the call, forward and backward. ``"auto"``: on CUDA torch's (``"cudnn"``,
            ``"flash"``) where torch's ``scaled_dot_product_attention`` would take one of them and it can do the call,
            else this package's (``"triton"``); on CPUs this package's. The others by name:

            ==========  ==================================================================================
            triton      CUDA; everything
            cudnn       CUDA; 16 bits, d and d_v multiples of 8 up to 128; full, or causal with sq = sk
            flash       CUDA; 16 bits, d = d_v a multiple of 8 up to 256 (128 on some GPUs); full, or causal
                        with sq = sk, also with a window or, for b = 1, cu_seqlens. CPU; d = d_v; full or causal
            ==========  ==================================================================================

            A sink is joined to any. torch's take neither softcap nor dropout, and their gradients of q differ in the
            last bits from run to run. Under ``torch.use_deterministic_algorithms(True)`` ``"auto"`` is ``"triton"``,
            with the same bits on every run. Memory that is not aligned to 16 bytes goes to this package's kernels.

    Returns:
        ``[sq, b, heads, d_v]``, contiguous, in the dtype of ``q`` (under autocast, in its dtype); arithmetic in fp32
        (fp64 for fp64). The result of a query that sees no key is 0, and so is its gradient.

    Raises:
        TypeError: unsupported or different dtypes, an option of a wrong type.
        ValueError: wrong shapes or devices, ``sq > sk`` if causal, ``window`` without ``causal`` or below 1,
            ``softcap`` not above 0, ``scale`` not finite, ``dropout_p`` outside 0 to 1, ``cu_seqlens`` with
            ``sq != sk``, a ``backend`` that is none or cannot do the call.

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
    op = "flash_attention"
    check_attention(op, q, k, v, causal, scale, window, sink, softcap, cu_seqlens)
    check_backend(
        op, backend, q, k, v, causal=causal, scale=scale, window=window, documents=cu_seqlens is not None,
        softcap=softcap, dropout_p=dropout_p,
    )  # fmt: skip
    drawn = None
    if type(dropout_p) is not float or dropout_p != 0.0 or seed is not None:
        drawn = dropout_seed(op, "dropout_p", dropout_p, seed, "q", q)
    sink = None if sink is None else sink.to(torch.promote_types(q.dtype, torch.float32))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    p = 0.0 if drawn is None else dropout_p
    if q.dtype is torch.float64 and q.is_cuda:  # for which there is no Triton kernel
        y = flash_attention_reference(
            q, k, v, causal=causal, scale=scale, window=window, sink=sink, softcap=softcap, dropout_p=p, seed=drawn,
            cu_seqlens=cu_seqlens, first_head=first_head,
        )  # fmt: skip
        return y.contiguous()
    return _forward(q, k, v, sink, cu_seqlens, drawn, causal, scale, window, softcap or 0.0, p, first_head, backend)[0]


def flash_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    first_head: int = 0,
    backend: BackendName = "auto",
) -> Tensor:
    """The same in plain PyTorch, all scores in memory, whatever the backend."""
    (sq, b, heads, d), sk = q.shape, k.shape[0]
    k, v = (t.repeat_interleave(heads // t.shape[2], dim=2).permute(1, 2, 0, 3) for t in (k, v))
    scores = q.permute(1, 2, 0, 3) @ k.transpose(2, 3) * (d**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = _tokens(sq, sk)
    mask = attention_bounds(queries, keys, causal=causal, window=window, cu_seqlens=cu_seqlens, from_keys=False)
    nothing = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
    weights = visible_softmax(scores, nothing if mask is None else ~dense_mask(mask, sq, sk, q.device), sink)
    drawn = dropout_seed("flash_attention", "dropout_p", dropout_p, seed, "q", q)
    if drawn is not None:
        keep = dropout_keep_mask(Dropout(dropout_p, drawn, queries, keys, first_head), b, heads, sq, sk)
        weights = torch.where(keep, weights * kept_scale(dropout_p), 0.0)
    return (weights @ v).permute(2, 0, 1, 3)


def _tokens(sq: int, sk: int) -> tuple[TokenRange, TokenRange]:
    return TokenRange(max(sk - sq, 0), sq), TokenRange(0, sk)


def _mask(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, seed: Tensor | None, causal: bool, window: int | None, p: float,
    first_head: int, from_keys: bool = False,
) -> tuple[MaskBounds | None, Dropout | None]:  # fmt: skip
    if seed is None and cu_seqlens is None:
        return _bounds(q.shape[0], k.shape[0], causal, window), None
    queries, keys = _tokens(q.shape[0], k.shape[0])
    dropout = None if seed is None else Dropout(p, seed, queries, keys, first_head)
    mask = attention_bounds(queries, keys, causal=causal, window=window, cu_seqlens=cu_seqlens, from_keys=from_keys)
    return mask, dropout


@functools.lru_cache(1024)  # it takes the host as long as a launch
def _bounds(sq: int, sk: int, causal: bool, window: int | None) -> MaskBounds | None:
    return attention_bounds(*_tokens(sq, sk), causal=causal, window=window)


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    s, b, h, d = q.shape
    d_v = v.shape[3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if d == d_v else q.new_empty(s, b, h, d_v)
    return out, q.new_empty((2, b, h, s), dtype=torch.promote_types(q.dtype, torch.float32))


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, sink: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    dsink = statistics.new_empty(0 if sink is None else sink.shape[0])
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    return dq, dk, dv, dsink


def _run(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_seqlens: Tensor | None, seed: Tensor | None,
    causal: bool, scale: float, window: int | None, softcap: float, p: float, first_head: int, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = (with_unit_last_stride(t) for t in (q, k, v))
    taken = _taken_by_torch(backend, q, k, v, causal, scale, window, cu_seqlens, softcap, seed)
    if taken is not None:
        return _run_by_torch(*taken, q, k, v, sink, scale)
    out, statistics = _fake(q, k, v)
    mask, dropout = _mask(q, k, cu_seqlens, seed, causal, window, p, first_head)
    if sink is None and mask is not None:
        block_attention(
            q, k, v, mask, scale=scale, softcap=softcap, dropout=dropout, out=out, statistics=statistics, merge=False
        )
        return out, statistics
    carry = torch.empty_like(out, dtype=statistics.dtype)
    begin_carry(carry, statistics, sink)
    if mask is not None:
        block_attention(
            q, k, v, mask, scale=scale, softcap=softcap, dropout=dropout, out=carry, statistics=statistics, merge=True
        )
    return carry.to(q.dtype), statistics


def _taken_by_torch(
    backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None,
    cu_seqlens: Tensor | None, softcap: float, seed: Tensor | None,
) -> tuple[str, torch_kernels.Mask] | None:  # fmt: skip
    """Which of torch's kernels compute the call and with which mask; ``None`` if this package's do."""
    window = None if window is not None and window >= k.shape[0] else window
    chosen = resolve(
        backend, q, k, v, causal=causal, scale=scale, window=window is not None, documents=cu_seqlens is not None,
        softcap=softcap > 0.0, dropout=seed is not None,
    )  # fmt: skip
    if chosen == "triton":
        return None
    return chosen, torch_kernels.Mask(causal, window, None if cu_seqlens is None else cu_seqlens.to(torch.int32))


def _run_by_torch(
    backend: str, mask: torch_kernels.Mask, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, logsumexp = torch_kernels.forward(backend, q, k, v, mask, scale)
    statistics = _fake(q, k, v)[1]
    if sink is None:
        statistics[0].copy_(logsumexp)
        statistics[1].fill_(1.0)
        return out.contiguous(), statistics
    carry = torch.empty_like(out, dtype=statistics.dtype, memory_format=torch.contiguous_format)
    begin_carry(carry, statistics, sink)
    merge_block(out, logsumexp, out=carry, statistics=statistics, merge=True)
    return carry.to(q.dtype), statistics


def _run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, sink: Tensor | None,
    cu_seqlens: Tensor | None, seed: Tensor | None,
    causal: bool, scale: float, window: int | None, softcap: float, p: float, first_head: int, backend: str = "auto",
) -> tuple[Tensor, ...]:  # fmt: skip
    grad, q, k, v = (with_unit_last_stride(t) for t in (grad, q, k, v))
    taken = _taken_by_torch(backend, q, k, v, causal, scale, window, cu_seqlens, softcap, seed)
    if taken is not None:
        # A forward of either backend leaves M and Z. Their sum has no rows that see nothing: these calls have none.
        logsumexp = statistics[0] + statistics[1].log()
        theirs = torch_kernels.backward(taken[0], grad, q, k, v, out, logsumexp, taken[1], scale)
        dsink = statistics.new_empty(0)
        if sink is not None:
            dsink = attention_sink_gradient(sink, attention_gradient_rows(grad, out, statistics))
        return *(t.contiguous() for t in theirs), dsink
    dq, dk, dv, dsink = gradients = _fake_backward(grad, q, k, v, out, statistics, sink)
    mask, dropout = _mask(q, k, cu_seqlens, seed, causal, window, p, first_head, from_keys=q.is_cuda)
    if mask is None:
        rows = attention_gradient_rows(grad, out, statistics)
        for gradient in (dq, dk, dv):
            gradient.zero_()
    else:
        rows = attention_backward(
            grad, q, k, v, out, statistics, mask, scale=scale, softcap=softcap, dropout=dropout, dq=dq, dk=dk, dv=dv
        )
    if sink is not None:
        dsink.copy_(attention_sink_gradient(sink, rows))
    return gradients


def with_unit_last_stride(t: Tensor) -> Tensor:
    """``t``, or a copy of it whose elements of a head are adjacent in memory, as block ops need them."""
    return t if t.stride(3) == 1 or t.shape[3] == 1 else t.contiguous()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, cu_seqlens, seed, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, sink, cu_seqlens, seed)


def _autograd(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    q, k, v, out, statistics, sink, *rest = ctx.saved_tensors
    if sink is not None:
        sink = kept_parameter(ctx, "flash_attention", "sink", sink, 3, requested(ctx))
    dq, dk, dv, dsink = _backward(grad, q, k, v, out, statistics, sink, *rest, *ctx.options)
    return dq, dk, dv, None if sink is None else dsink, *(None,) * 9


def _flops(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_seqlens: Tensor | None, *_: Any) -> int:
    return attention_flops(q.shape, k.shape[0], v.shape[3], cu_seqlens)


def _flops_of_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, sink: Tensor | None,
    cu_seqlens: Tensor | None, *_: Any,
) -> int:  # fmt: skip
    return attention_flops(q.shape, k.shape[0], v.shape[3], cu_seqlens, backward=True)


_backward = register(
    "flash_attention_backward",
    fake=_fake_backward,
    cuda=_run_backward,
    cpu=_run_backward,
    flops=_flops_of_backward,
)
_forward = register(
    "flash_attention",
    fake=_fake,
    cuda=_run,
    cpu=_run,
    setup_context=_setup_context,
    backward=_autograd,
    autocast=cast_first(3),
    flops=_flops,
    reference=lambda q, k, v, sink, cu_seqlens, seed, causal, scale, window, softcap, p, first_head, _: (
        flash_attention_reference(
            q, k, v, causal=causal, scale=scale, window=window, sink=sink, softcap=softcap, dropout_p=p, seed=seed,
            cu_seqlens=cu_seqlens, first_head=first_head,
        )
    ),
)  # fmt: skip
