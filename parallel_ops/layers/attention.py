"""Self-attention with its heads split over a group.

    q, k, v = rows of W_qkv x + b_qkv               rotated by their positions, if these are rotary
    y       = W_o concat over heads of softmax(q k^T / sqrt(d)) v + b_o

Grouped queries (Ainslie et al., arXiv:2305.13245): g = heads / kv_heads queries share a key and a value, which are not
repeated in memory. The rows of W_qkv come as in Megatron-LM, key by key: g queries, the key, the value, d rows each. So
any number of ranks that divides ``kv_heads`` splits W_qkv into contiguous blocks of rows.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_ops.layers._checks import before, check_input, first_collective, last_collective
from parallel_ops.layers._sharding import Init, check_divides
from parallel_ops.layers.linear import ColumnParallelLinear, LinearOptions, RowParallelLinear
from parallel_ops.ops import rotary_embedding, scaled_causal_softmax, scaled_masked_softmax
from parallel_ops.tensor_parallel._overlap_plan import Overlap

Angles = tuple[Tensor, Tensor]


class ParallelSelfAttention(nn.Module):
    """Multi-head self-attention, causal unless told otherwise, scores in full.

    Args:
        hidden: width of input and output.
        heads: query heads; ``hidden / heads`` is the size of a head.
        kv_heads: key and value heads; divides ``heads``, and divides evenly by the group's size. ``None`` for
            ``heads``.
        causal: no token sees a later one.
        window: how many tokens a token sees at most, itself included; causal only.
        group: the ranks that share the heads; ``None`` for one.
        sequence_parallel, overlap, bias: as of ``ColumnParallelLinear`` and ``RowParallelLinear``.
        init_method, output_init_method: fill the whole weights of ``qkv`` and ``out`` in place.

    Raises:
        ValueError: sizes that do not fit each other or the group.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        group: ProcessGroup | None,
        kv_heads: int | None = None,
        causal: bool = True,
        window: int | None = None,
        bias: bool = True,
        sequence_parallel: bool = False,
        overlap: Overlap = "auto",
        init_method: Init | None = None,
        output_init_method: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shared, kv_heads = ("heads", heads) if kv_heads is None else ("kv_heads", kv_heads)
        if heads < 1 or hidden % heads:
            raise ValueError(f"ParallelSelfAttention: hidden ({hidden}) must be a multiple of heads ({heads})")
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"ParallelSelfAttention: heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
        if window is not None and not causal:
            raise ValueError("ParallelSelfAttention: window needs causal=True")
        self.kv_heads = check_divides("ParallelSelfAttention", shared, kv_heads, group)  # of this rank
        self.queries, self.head_size = heads // kv_heads, hidden // heads
        self.causal, self.window = causal, window
        common = LinearOptions(
            group=group, bias=bias, sequence_parallel=sequence_parallel, overlap=overlap, device=device, dtype=dtype
        )
        width = (heads + 2 * kv_heads) * self.head_size
        self.qkv = ColumnParallelLinear(hidden, width, init_method=init_method, **common)
        self.out = RowParallelLinear(hidden, hidden, init_method=output_init_method, **common)

    def forward(
        self,
        x: Tensor,
        angles: Angles | None = None,
        mask: Tensor | None = None,
        *,
        add_bias: bool = True,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """``[s, b, hidden]`` to the same shape.

        Args:
            x: whole, or with ``sequence_parallel`` this rank's rows ``[s_r, b, hidden]``.
            angles: cosines and sines of all positions, ``[s, R / 2]`` each, for rotary positions.
            mask: as of ``scaled_masked_softmax``, broadcastable to ``[b, kv_heads / P, g, s, s]``; not if causal.
            add_bias, sizes: as of ``RowParallelLinear.forward``.

        Raises:
            TypeError, ValueError: x that is not ``[s, b, hidden]`` in the dtype of the weights, a mask for causal
            attention, angles or a mask that do not fit: on every rank.

        Sharding: x and the result replicated, or both S(0) with ``sequence_parallel``; angles and mask replicated (a
        mask that differs by heads: this rank's).
        """
        with before(first_collective(self.qkv.sequence_parallel), self.qkv.group, x):
            check_input("ParallelSelfAttention", x, self.qkv.weight, "[s, b, {}]")
            if mask is not None and self.causal:
                raise ValueError("ParallelSelfAttention: mask must be None for causal attention; set causal=False")
        qkv = self.qkv(x, sizes=sizes)
        with before(last_collective(self.out.sequence_parallel), self.out.group, x):
            context = self._attend(qkv, angles, mask)
        out: Tensor = self.out(context, add_bias=add_bias, sizes=sizes)
        return out

    def _attend(self, qkv: Tensor, angles: Angles | None, mask: Tensor | None) -> Tensor:
        """``[s, b, this rank's q, k and v]`` to ``[s, b, this rank's heads * d]``."""
        s, b, _ = qkv.shape
        kv, g, d = self.kv_heads, self.queries, self.head_size
        # Views: [s, b, kv, g, d], and [s, b, kv, d] twice.
        q, k, v = qkv.view(s, b, kv, g + 2, d).split([g, 1, 1], dim=3)
        q, k, v = q.reshape(s, b, kv * g, d), k.squeeze(3), v.squeeze(3)
        if angles is not None:
            q, k = rotary_embedding(q, *angles), rotary_embedding(k, *angles)
        # The queries of a key one after another: one product for each key, [b kv, g s, d] x [b kv, d, s].
        q = q.reshape(s, b, kv, g, d).permute(1, 2, 3, 0, 4).reshape(b * kv, g * s, d)
        k, v = (t.reshape(s, b * kv, d).transpose(0, 1) for t in (k, v))
        scores = torch.bmm(q, k.transpose(1, 2)).view(b, kv, g, s, s)
        scale = 1 / math.sqrt(d)
        if self.causal:
            weights = scaled_causal_softmax(scores, scale, window=self.window)
        else:
            weights = scaled_masked_softmax(scores, mask, scale)
        context = torch.bmm(weights.view(b * kv, g * s, s).to(v.dtype), v)
        return context.view(b, kv, g, s, d).permute(3, 0, 1, 2, 4).reshape(s, b, kv * g * d)

    def extra_repr(self) -> str:
        return f"heads={self.kv_heads * self.queries}, kv_heads={self.kv_heads} (of this rank), causal={self.causal}"
