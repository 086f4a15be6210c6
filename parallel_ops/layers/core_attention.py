"""Core attention: from queries, keys and values to the weighted sum of values. Layers take it as a callable.

    out[s, b, h] = softmax over t of (q[s, b, h] . k[t, b, h // g] * softmax_scale) v[t, b, h // g]

    g = heads / kv_heads

``core_attention(q, k, v, *, causal, softmax_scale, window_size, dropout_p)`` takes q ``[s, b, heads, d]``, k and v
``[t, b, kv_heads, d]``, any strides, and returns ``[s, b, heads, d]``. Grouped queries (Ainslie et al.,
arXiv:2305.13245) share a key and a value. It may take further keywords: ``first_head``, the index of q's first head
among the heads of all ranks, which the layer passes with dropout; ``sink``, one more logit of each head, which a layer
with ``sink=True`` passes; and whatever the layer gets as ``core_options``, such as ``cu_seqlens``.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_ops._internal.distributed.groups import group_rank
from parallel_ops.layers.parameters import ShardedModule, ensure_divisible
from parallel_ops.ops import flash_attention, scaled_causal_softmax, scaled_masked_softmax

# On a GPU it takes torch's kernels where torch itself would. With dropout it draws by global index.
flash = flash_attention


class CoreAttention(Protocol):
    """The signature that layers call; shapes and meaning are at the top of this file."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        softmax_scale: float | None,
        window_size: tuple[int, int] | None,
        dropout_p: float,
    ) -> Tensor: ...


def unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] | None = None,
    dropout_p: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention with all scores in memory, ``[b, kv_heads, g, s, t]``, for arbitrary masks; keys are not repeated.

    Args:
        softmax_scale: ``None`` for ``1 / sqrt(d)``. window_size: ``(left, 0)`` as in ``flash_attention``; causal only.
        mask: bool (True masks the key out) or added to the scores, broadcastable to them; not with ``causal``.

    Raises:
        ValueError: a mask with ``causal``, a window without.
    """
    if causal and mask is not None:
        raise ValueError("unfused: mask must be None for causal attention; set causal=False")
    if not causal and window_size is not None and max(window_size) >= 0:
        raise ValueError("unfused: window_size needs causal=True")
    (s, b, heads, d), (t, _, kv, _) = q.shape, k.shape
    g = heads // kv
    # The queries that share a key are adjacent: one matmul for each key, [b kv, g s, d] x [b kv, d, t].
    q = q.reshape(s, b, kv, g, d).permute(1, 2, 3, 0, 4).reshape(b * kv, g * s, d)
    k, v = (x.reshape(t, b * kv, d).transpose(0, 1) for x in (k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(b, kv, g, s, t)
    scale = 1 / math.sqrt(d) if softmax_scale is None else softmax_scale
    if causal:
        window = None if window_size is None or window_size[0] < 0 else window_size[0] + 1
        weights = scaled_causal_softmax(scores, scale, window=window)
    else:
        weights = scaled_masked_softmax(scores, mask, scale)
    weights = F.dropout(weights, dropout_p) if dropout_p else weights
    context = torch.bmm(weights.view(b * kv, g * s, t).to(v.dtype), v)
    return context.view(b, kv, g, s, d).permute(3, 0, 1, 2, 4).reshape(s, b, heads, d)


class AttentionHeads(ShardedModule):
    """A module whose ``num_heads`` query heads are sharded over ``mesh``, with a core attention.

    Args:
        causal, window_size, core_attention, attention_dropout: see ``ParallelSelfAttention``.

    Raises:
        ValueError: heads that the mesh does not divide, a window that is not causal, a dropout outside of 0 to 1.
    """

    def __init__(
        self,
        num_heads: int,
        tp_mesh: DeviceMesh | None,
        *,
        causal: bool,
        window_size: tuple[int, int] | None,
        core_attention: CoreAttention | None,
        attention_dropout: float,
    ) -> None:
        super().__init__(tp_mesh)
        self._op = type(self).__name__
        if window_size is not None and (not causal or window_size[0] < -1):
            raise ValueError(
                f"{self._op}: window_size must be (left, 0) with left of at least 0, or -1 for no limit, and needs "
                f"causal=True, got {window_size}"
            )
        if not 0.0 <= attention_dropout < 1.0:
            raise ValueError(f"{self._op}: attention_dropout must be from 0 to below 1, got {attention_dropout}")
        self.local_heads = ensure_divisible(self._op, "num_heads", num_heads, self.ranks)
        self.causal, self.window_size, self.attention_dropout = causal, window_size, attention_dropout
        self.core_attention: CoreAttention = flash if core_attention is None else core_attention
        self._core_takes = frozenset(inspect.signature(self.core_attention).parameters)

    def _options_of(self, options: Mapping[str, Any] | None, mask: Tensor | None) -> dict[str, Any]:
        """Further keywords of the core attention. Raises a ``TypeError`` if it does not take one of them."""
        given = dict(options or {}) if mask is None else {**(options or {}), "mask": mask}
        for name in given:
            if name not in self._core_takes:
                raise TypeError(
                    f"{self._op}: {name} must be None for this core_attention, which does not take one"
                    + ("; give the layer core_attention=parallel_ops.layers.core_attention.unfused and causal=False")
                    * (name == "mask")
                )
        return given

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, given: dict[str, Any]) -> Tensor:
        """The core attention of this rank's heads ``[s, b, heads, d]``, as ``[s, b, heads * d_v]``."""
        dropout_p = self.attention_dropout if self.training else 0.0
        if dropout_p and "first_head" in self._core_takes:
            given["first_head"] = self.local_heads * group_rank(self.group)
        causal, window_size = self.causal, self.window_size
        if given.get("key_ranges") is not None:  # they say what is seen later than a token; a window cuts them before
            causal, window_size = False, None if window_size is None else (window_size[0], -1)
        y = self.core_attention(
            q, k, v, causal=causal, softmax_scale=scale, window_size=window_size, dropout_p=dropout_p, **given
        )  # fmt: skip
        return y.flatten(2)
