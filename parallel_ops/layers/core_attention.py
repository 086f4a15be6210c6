"""Core attention: from queries, keys and values to the weighted sum of values. Layers take it as a callable.

    out[s, b, h] = softmax over t of (q[s, b, h] . k[t, b, h // g] * scale) v[t, b, h // g]        g = heads / kv_heads

``core_attention(q, k, v, *, causal, scale, window, dropout_p)`` takes q ``[s, b, heads, d]``, k and v
``[t, b, kv_heads, d]``, any strides, and returns ``[s, b, heads, d]``. Grouped queries (Ainslie et al.,
arXiv:2305.13245) share a key and a value. It may take further keywords: ``first_head``, the index of q's first head
among the heads of all ranks, which the layer passes with dropout; ``sink``, one more logit of each head, which a layer
with ``sink=True`` passes; and whatever the layer gets as ``core_options``, such as ``cu_seqlens``.
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_ops.ops import flash_attention, scaled_causal_softmax, scaled_masked_softmax
from parallel_ops.ops.attention.backends import BackendName

# With a sliding window, a block of queries reads at most ``window`` keys more than it has queries.
_LEAST_BLOCK = 256


class CoreAttention(Protocol):
    """The signature that layers call; shapes and meaning are at the top of this file."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float | None,
        window: int | None,
        dropout_p: float,
    ) -> Tensor: ...


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    first_head: int = 0,
    cu_seqlens: Tensor | None = None,
    sink: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """``flash_attention``, which on a GPU takes torch's kernels where torch itself would.

    Args:
        window: number of keys that a query attends to at most, its own included; causal only.
        dropout_p: on the probabilities, drawn by global index from a seed of torch's generator.
        first_head: index of the first head among the heads of all ranks.
        cu_seqlens: starts of documents; see ``flash_attention``.
        sink: ``[heads]``, one more logit of every row, without a value.
        backend: ``"triton"`` for the same bits on every run of a GPU; see ``flash_attention``.
    """
    return flash_attention(
        q, k, v, causal=causal, scale=scale, window=window, sink=sink, dropout_p=dropout_p, cu_seqlens=cu_seqlens,
        first_head=first_head, backend=backend,
    )  # fmt: skip


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Torch's ``scaled_dot_product_attention``, which does not keep all scores in memory.

    Args:
        scale: ``None`` for ``1 / sqrt(d)``.
        window: number of keys that a query attends to at most, its own included; causal only. Queries are processed in
            blocks with the keys in their windows, so neither scores nor a mask of ``s x s`` are made.
        dropout_p: on the probabilities, drawn by torch: the mask depends on how heads are sharded.

    Raises:
        ValueError: a window without ``causal``.
    """
    if window is not None and not causal:
        raise ValueError("sdpa: window needs causal=True")
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    s = q.shape[2]
    if window is None or window >= s:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, dropout_p=dropout_p, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3)
    block = max(window, _LEAST_BLOCK)
    parts = []
    for start in range(0, s, block):
        stop, first = min(start + block, s), max(0, start - window + 1)
        distance = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(first, stop, device=q.device)
        parts.append(
            F.scaled_dot_product_attention(
                q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop],
                attn_mask=(distance >= 0) & (distance < window),
                scale=scale, dropout_p=dropout_p, enable_gqa=grouped,
            )
        )  # fmt: skip
    return torch.cat(parts, dim=2).permute(2, 0, 1, 3)


def unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention with all scores in memory, ``[b, kv_heads, g, s, t]``, for arbitrary masks; keys are not repeated.

    Args:
        mask: bool (True masks the key out) or added to the scores, broadcastable to them; not with ``causal``.

    Raises:
        ValueError: a mask with ``causal``.
    """
    if causal and mask is not None:
        raise ValueError("unfused: mask must be None for causal attention; set causal=False")
    (s, b, heads, d), (t, _, kv, _) = q.shape, k.shape
    g = heads // kv
    # The queries that share a key are adjacent: one product for each key, [b kv, g s, d] x [b kv, d, t].
    q = q.reshape(s, b, kv, g, d).permute(1, 2, 3, 0, 4).reshape(b * kv, g * s, d)
    k, v = (x.reshape(t, b * kv, d).transpose(0, 1) for x in (k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(b, kv, g, s, t)
    scale = 1 / math.sqrt(d) if scale is None else scale
    if causal:
        weights = scaled_causal_softmax(scores, scale, window=window)
    else:
        weights = scaled_masked_softmax(scores, mask, scale)
    weights = F.dropout(weights, dropout_p) if dropout_p else weights
    context = torch.bmm(weights.view(b * kv, g * s, t).to(v.dtype), v)
    return context.view(b, kv, g, s, d).permute(3, 0, 1, 2, 4).reshape(s, b, heads, d)
