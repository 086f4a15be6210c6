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
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from parallel_ops._internal.dispatch.registration import cast_first, register
from parallel_ops._internal.gradients.split_backward import kept_parameter, requested
from parallel_ops._internal.philox import kept_scale
from parallel_ops._internal.tensor_format import TensorFormat, from_sbhd, to_sbhd
from parallel_ops._internal.token_range import TokenRange
from parallel_ops.ops.attention import torch_kernels
from parallel_ops.ops.attention.backends import check_backend, resolve
from parallel_ops.ops.attention.block import (
    Dropout,
    attention_backward,
    attention_gradient_rows,
    attention_sink_gradient,
    begin_carry,
    block_attention,
    dropout_keep_mask,
    merge_block,
)
from parallel_ops.ops.attention.flops import attention_flops
from parallel_ops.ops.attention.options import (
    AttentionArguments,
    AttentionOptions,
    BackendName,
    KeyRanges,
    attention_options,
    check_tensors,
)
from parallel_ops.ops.attention.ranges import MaskBounds, attention_bounds, dense_mask
from parallel_ops.ops.softmaxes.shared import visible_softmax

NAME = "flash_attention"


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
) -> Tensor:
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
            sees keys of its own document. The host does not read its values, so they are not checked.
        key_ranges: ``(first, last)``, int32 ``[sq]`` each, or both as one tensor ``[2, sq]``, on the device of ``q``:
            query i sees the keys j with ``first[i] <= j <= last[i]``, none if its first is after its last. Neither
            decreases from query to query. ``parallel_ops.ops.attention`` has ``document_ranges``, ``prefix_ranges``,
            ``block_causal_ranges``, ``causal_ranges`` and ``intersect_ranges``; layers that pass the same tensor share
            what is made of it. ``causal``, ``window_size`` and ``cu_seqlens``, where given too, cut it. Values are
            checked on CPUs only.
        first_head: the index of the first of these heads among those of all ranks, for dropout.
        tensor_format: order of the dimensions of q, k, v and the result: ``"sbhd"``, ``"bshd"`` (FlashAttention's) or
            ``"bhsd"`` (SDPA's). Nothing is copied.
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
        ``[sq, b, heads, d_v]``, contiguous, in the dtype of ``q`` (under autocast, in its dtype); in another
        ``tensor_format`` a view of this. Arithmetic in fp32 (fp64 for fp64). The result of a query that sees no key is
        0, and so are its gradient and that of a key that no query sees.

    Raises:
        TypeError: unsupported or different dtypes, an option of a wrong type.
        ValueError: wrong shapes or devices, ``sq > sk`` if causal, ``window_size`` below -1, ``softcap`` not above 0,
            ``softmax_scale`` not finite, ``dropout_p`` outside 0 to 1, ``cu_seqlens`` with ``sq != sk``, ``key_ranges``
            that decrease or leave the keys (CPU), a ``backend`` that is none or cannot do the call.

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
        return from_sbhd(_reference(q, k, v, options).contiguous(), tensor_format)
    return from_sbhd(_forward(q, k, v, *options)[0], tensor_format)


def flash_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, tensor_format: TensorFormat = "sbhd", **arguments: Unpack[AttentionArguments]
) -> Tensor:
    """The same in plain PyTorch, all scores in memory, whatever the backend."""
    q, k, v = (to_sbhd(t, tensor_format) for t in (q, k, v))
    return from_sbhd(_reference(q, k, v, attention_options(NAME, q, k, v, **arguments)), tensor_format)


def _reference(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    (sq, b, heads, _), sk = q.shape, k.shape[0]
    k, v = (t.repeat_interleave(heads // t.shape[2], dim=2).permute(1, 2, 0, 3) for t in (k, v))
    scores = q.permute(1, 2, 0, 3) @ k.transpose(2, 3) * options.softmax_scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    mask = _mask(sq, sk, options)
    nothing = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
    weights = visible_softmax(scores, nothing if mask is None else ~dense_mask(mask, sq, sk, q.device), options.sink)
    dropout = _dropout(sq, sk, options)
    if dropout is not None:
        keep = dropout_keep_mask(dropout, b, heads, sq, sk)
        weights = torch.where(keep, weights * kept_scale(options.dropout_p), 0.0)
    return (weights @ v).permute(2, 0, 1, 3)


def _mask(sq: int, sk: int, options: AttentionOptions, from_keys: bool = False) -> MaskBounds | None:
    if not options.packed:
        return _bounds(sq, sk, options.left, options.right)
    queries = TokenRange(sk - sq, sq)
    return attention_bounds(
        queries, TokenRange(0, sk), left=options.left, right=options.right, ranges=options.ranges(sq),
        first_query=queries.start, from_keys=from_keys,
    )  # fmt: skip


@functools.lru_cache(1024)  # it takes the host as long as a launch
def _bounds(sq: int, sk: int, left: int | None, right: int | None) -> MaskBounds | None:
    return attention_bounds(TokenRange(sk - sq, sq), TokenRange(0, sk), left=left, right=right)


def _dropout(sq: int, sk: int, options: AttentionOptions) -> Dropout | None:
    if options.dropout_seed is None:
        return None
    queries, keys = TokenRange(max(sk - sq, 0), sq), TokenRange(0, sk)
    return Dropout(options.dropout_p, options.dropout_seed, queries, keys, options.first_head)


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
    mask, dropout = _mask(q.shape[0], k.shape[0], options), _dropout(q.shape[0], k.shape[0], options)
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
    mask = _mask(q.shape[0], k.shape[0], options, from_keys=q.is_cuda)
    if mask is None:
        rows = attention_gradient_rows(grad, out, statistics)
        for gradient in (dq, dk, dv):
            gradient.zero_()
    else:
        dropout = _dropout(q.shape[0], k.shape[0], options)
        rows = attention_backward(
            grad, q, k, v, out, statistics, mask, options, dropout=dropout, dq=dq, dk=dk, dv=dv
        )  # fmt: skip
    if options.sink is not None:
        dsink.copy_(attention_sink_gradient(options.sink, rows))
    return gradients


def with_unit_last_stride(t: Tensor) -> Tensor:
    """``t``, or a copy of it whose elements of a head are adjacent in memory, as block ops need them."""
    return t if t.stride(3) == 1 or t.shape[3] == 1 else t.contiguous()


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


def _flops(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_seqlens: Tensor | None, *_: Any) -> int:
    return attention_flops(q.shape, k.shape[0], v.shape[3], cu_seqlens)


def _flops_of_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, sink: Tensor | None,
    cu_seqlens: Tensor | None, *_: Any,
) -> int:  # fmt: skip
    return attention_flops(q.shape, k.shape[0], v.shape[3], cu_seqlens, backward=True)


_backward = register(
    "flash_attention_backward",
    outputs=_gradients,
    cuda=backward,
    cpu=backward,
    flops=_flops_of_backward,
)
_forward = register(
    NAME,
    outputs=_outputs,
    cuda=forward,
    cpu=forward,
    setup_context=setup_context,
    backward=_autograd,
    autocast=cast_first(3),
    flops=_flops,
    reference=lambda q, k, v, *arguments: _reference(q, k, v, AttentionOptions(*arguments)),
)
