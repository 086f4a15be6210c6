"""Attention of a block of queries over a block of keys, merged into the result of other blocks.

    s[i, j] = scale q[i] . k[j]               softcap > 0:  s = softcap tanh(s / softcap)
    M[i]    = max_j s[i, j]                   over the keys j visible to query i
    Z[i]    = sum_j exp(s[i, j] - M[i])
    O[i]    = sum_j m[i, j] exp(s[i, j] - M[i]) v[j] / (Z[i] (1 - p))   m: the keep mask of dropout, all ones without

    merge:    M' = max(M, M_block),   Z' = exp(M - M') Z + exp(M_block - M') Z_block,
              O' = (exp(M - M') Z O + exp(M_block - M') Z_block O_block) / Z'

    D[i] = dO[i] . O[i];  P = W exp(s - C);  dV = (m P / (1 - p))^T dO;  dS = P (m dO V^T / (1 - p) - D), times the
    slope of softcap;  dQ = scale dS K;  dK = scale dS^T Q    with the final O, M and Z, so that blocks are
    independent.  C = M, W = 1 / Z; for 16-bit data on a GPU C = M + log Z, W = 1

M and Z are kept separately: M + log Z is rounded at the size of M, so every probability of a query with logits near
1,000 would have an error of 3e-5 in fp32. 16-bit data have a larger error anyway. A query that sees no key has
M = -inf, Z = 0, O = 0 and no gradient. A learnable sink is an initial value with M = sink, Z = 1 and O = 0.

Every mask leaves a query a range of adjacent keys (``ranges.py``): ``left <= j - i <= right``, or two ints for each
query.

Source: FlashAttention (Dao, arXiv:2307.08691); the merge is that of online softmax (Milakov and Gimelshein,
arXiv:1805.02867).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import parallel_ops._internal.dispatch.extension  # noqa: F401  (defines the torch ops)
from parallel_ops._internal.philox import philox4x32, threshold
from parallel_ops._internal.token_range import TokenRange
from parallel_ops.ops.attention import torch_kernels
from parallel_ops.ops.attention.backends import resolve
from parallel_ops.ops.attention.options import AttentionOptions
from parallel_ops.ops.attention.ranges import MaskBounds


class Dropout(NamedTuple):
    """The dropout of the probabilities. Philox draws the mask from the indices of batch, head, query and key in the
    whole tensor, so it does not depend on blocks, ranks or device.

        words      = Philox(key = seed, counter = (key >> 2, query, head, batch))
        m          = words[key & 3] >= round(p 2^32)
    """

    p: float
    seed: Tensor  # one int64 element on the device of q
    queries: TokenRange
    keys: TokenRange
    first_head: int = 0
    first_batch: int = 0


def dropout_keep_mask(dropout: Dropout, batch: int, heads: int, sq: int, sk: int) -> Tensor:
    """The dropout mask as booleans ``[batch, heads, sq, sk]``: for references and tests."""
    seed = dropout.seed.reshape(())
    device = seed.device

    def places(first: int, length: int, step: int, dim: int) -> Tensor:
        return (first + step * torch.arange(length, device=device)).view([-1 if d == dim else 1 for d in range(4)])

    key = places(dropout.keys.start, sk, dropout.keys.step, 3)
    counter = torch.broadcast_tensors(
        key >> 2,
        places(dropout.queries.start, sq, dropout.queries.step, 2),
        places(dropout.first_head, heads, 1, 1),
        places(dropout.first_batch, batch, 1, 0),
    )
    words = torch.stack(philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)))
    return words.gather(0, (key & 3).expand(words.shape[1:])[None])[0] >= threshold(dropout.p)


def with_unit_last_stride(t: Tensor) -> Tensor:
    """``t``, or a copy of it whose elements of a head are adjacent in memory, as block ops need them."""
    return t if t.stride(3) == 1 or t.shape[3] == 1 else t.contiguous()


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskBounds,
    options: AttentionOptions,
    *,
    dropout: Dropout | None = None,
    out: Tensor,
    statistics: Tensor,
    merge: bool,
) -> None:
    """Writes the attention of ``q`` over ``k`` and ``v`` to ``out`` and ``statistics``, or merges it into them.

    Args:
        q: ``[sq, b, heads, d]``; k: ``[sk, b, kv_heads, d]``; v: ``[sk, b, kv_heads, d_v]``; of one dtype, any strides
            with adjacent d.
        options: the scale, the soft cap, and the backend whose kernels compute the block, if they can: see
            ``backends``. torch's round the block's result to the dtype of ``q`` before it is merged.
        out: ``[sq, b, heads, d_v]`` in the dtype of ``q`` or fp32; with ``merge`` fp32 (fp64 for fp64).
        statistics: M and Z, ``[2, b, heads, sq]``, fp32 (fp64 for fp64).
    """
    taken = _taken_by_torch(q, k, v, mask, options, dropout)
    if taken is not None:
        theirs = torch_kernels.forward(*taken, q, k, v)
        merge_block(*theirs, out=out, statistics=statistics, merge=merge)
        return
    if q.is_cuda:
        from parallel_ops.triton_kernels.attention import flash_attention as kernels

        kernels.forward(
            q, k, v, out, statistics, merge=merge, left=mask.left, right=mask.right, spans=mask.spans,
            scale=options.softmax_scale, softcap=options.softcap, dropout=dropout,
        )  # fmt: skip
        return
    _forward(q, k, v, *_cpu_options(mask, options, dropout), out, statistics, merge)


def block_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    mask: MaskBounds,
    options: AttentionOptions,
    *,
    dropout: Dropout | None = None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    accumulate_dq: bool,
    out: Tensor | None = None,
) -> None:
    """The gradients from these keys.

    Args:
        grad_out: ``[sq, b, heads, d_v]``, the dtype of q. q, k, v: as in ``block_attention``.
        rows: result of ``attention_gradient_rows`` for the final output. options: as in ``block_attention``.
        dq, dk, dv: like ``q``, ``k`` and ``v``, in their dtype or fp32; dk and dv are overwritten, dq is with
            ``accumulate_dq`` fp32 and added to.
        out: the final output ``[sq, b, heads, d_v]`` in the dtype of q, for torch's kernels, which take it in place of
            D; without it the kernels are this package's.
    """
    taken = None if out is None else _taken_by_torch(q, k, v, mask, options, dropout)
    if taken is not None and out is not None:
        # On a GPU the rows of 16-bit data already hold the logsumexp.
        lse = rows[0] if q.is_cuda else rows[0] - rows[1].log()
        theirs = torch_kernels.backward(*taken, grad_out, q, k, v, out, lse)
        for ours, gradient, add in zip((dq, dk, dv), theirs, (accumulate_dq, False, False), strict=True):
            ours.add_(gradient) if add else ours.copy_(gradient)
        return
    if q.is_cuda:
        from parallel_ops.triton_kernels.attention import flash_attention as kernels

        kernels.backward(
            grad_out, q, k, v, rows, dq, dk, dv, accumulate_dq=accumulate_dq, **mask._asdict(),
            scale=options.softmax_scale, softcap=options.softcap, dropout=dropout,
        )  # fmt: skip
        return
    _backward(grad_out, q, k, v, rows, *_cpu_options(mask, options, dropout), dq, dk, dv, accumulate_dq)


def _taken_by_torch(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskBounds, options: AttentionOptions, dropout: Dropout | None
) -> tuple[str, AttentionOptions] | None:
    """The backend of torch that computes the block, and the block's options; ``None`` if this package's kernels do."""
    if options.backend == "triton" or (options.backend == "auto" and q.is_cpu):
        return None
    causal = mask.right == 0 and q.shape[0] == k.shape[0]
    full = mask.right is None and mask.left is None
    if mask.spans is not None or dropout is not None or not (causal or full):
        return None
    block = options._replace(
        cu_seqlens=None, key_ranges=None, left=None if mask.left is None else -mask.left, right=mask.right
    )
    chosen = resolve(block, q, k, v)
    return None if chosen == "triton" else (chosen, block)


def merge_block(block: Tensor, logsumexp: Tensor, *, out: Tensor, statistics: Tensor, merge: bool) -> None:
    """Writes the result of a block to ``out`` and ``statistics``, or merges it into them.

    Args:
        block: ``[sq, b, heads, d_v]``, any floating-point dtype. logsumexp: ``[b, heads, sq]``.
        out, statistics, merge: as in ``block_attention``.
    """
    largest, total = statistics
    if not merge:
        out.copy_(block)
        largest.copy_(logsumexp)
        total.fill_(1.0)
    elif out.is_cuda:
        from parallel_ops.triton_kernels.attention import merge as kernels

        kernels.merge(block, logsumexp.contiguous(), out, statistics)
    else:
        most = torch.maximum(largest, logsumexp)
        shift = torch.where(most == -torch.inf, 0.0, most)
        old, ours = (largest - shift).exp() * total, (logsumexp - shift).exp()
        sums = old + ours
        share = torch.where(sums == 0.0, 0.0, 1.0 / sums)
        (old, ours) = ((part * share).permute(2, 0, 1).unsqueeze(3) for part in (old, ours))
        out.mul_(old).add_(block.to(out.dtype) * ours)
        largest.copy_(most)
        total.copy_(sums)


def begin_carry(out: Tensor, statistics: Tensor, sink: Tensor | None) -> None:
    """Initialises ``out`` ``[s, b, h, d]`` and ``statistics`` ``[2, b, h, s]``: no key, only the sinks ``[h]``."""
    out.zero_()
    largest, total = statistics
    if sink is None:
        largest.fill_(-torch.inf)
        total.zero_()
    else:
        largest.copy_(sink[:, None])
        total.fill_(1.0)


def attention_gradient_rows(grad_out: Tensor, out: Tensor, statistics: Tensor) -> Tensor:
    """C, W and D of each query for the backward, ``[3, b, h, sq]`` in the dtype of ``statistics``.

    Args:
        grad_out, out: ``[sq, b, h, d]``. statistics: the final M and Z.
    """
    rows = statistics.new_empty((3, *statistics.shape[1:]))
    if grad_out.is_cuda:
        from parallel_ops.triton_kernels.attention import rows as kernels

        kernels.gradient_rows(grad_out, out, statistics, rows)
    else:
        _gradient_rows(grad_out, out, statistics, rows)
    return rows


def attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, mask: MaskBounds,
    options: AttentionOptions, *, dropout: Dropout | None, dq: Tensor, dk: Tensor, dv: Tensor,
) -> Tensor:  # fmt: skip
    """All gradients where these keys are all there are; returns the result of ``attention_gradient_rows``."""
    if not q.is_cuda:
        rows = attention_gradient_rows(grad_out, out, statistics)
        block_attention_backward(
            grad_out, q, k, v, rows, mask, options, dropout=dropout, dq=dq, dk=dk, dv=dv, accumulate_dq=False
        )
        return rows
    from parallel_ops.triton_kernels.attention import flash_attention as kernels

    rows = statistics.new_empty((3, *statistics.shape[1:]))
    kernels.backward(
        grad_out, q, k, v, rows, dq, dk, dv, accumulate_dq=False, left=mask.left, right=mask.right, spans=mask.spans,
        query_spans=mask.query_spans, scale=options.softmax_scale, softcap=options.softcap, dropout=dropout, out=out,
        statistics=statistics,
    )  # fmt: skip
    return rows


def attention_sink_gradient(sink: Tensor, rows: Tensor) -> Tensor:
    """The gradient of the sink from these queries, ``[heads]``; 0 from those that see nothing."""
    shift, weight, delta = rows
    share = torch.where(weight == 0.0, 0.0, weight * torch.exp(sink.to(rows.dtype)[:, None] - shift))
    return -(share * delta).sum((0, 2))


_forward = torch.ops.parallel_ops.block_attention_.default
_gradient_rows = torch.ops.parallel_ops.attention_gradient_rows_.default
_backward = torch.ops.parallel_ops.block_attention_backward_.default


def _cpu_options(mask: MaskBounds, options: AttentionOptions, dropout: Dropout | None) -> tuple[Any, ...]:
    bounds = (mask.spans, mask.left, mask.right, options.softmax_scale, options.softcap)
    if dropout is None:
        return (*bounds, 0.0, None, [])
    queries, keys = dropout.queries, dropout.keys
    places = [queries.start, queries.step, keys.start, keys.step, dropout.first_head, dropout.first_batch]
    return (*bounds, dropout.p, dropout.seed, places)
