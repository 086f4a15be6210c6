"""Attention over a transport: all-to-all among the ranks that share heads, ring or all-gather across them."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from parallel_ops.comm.transport.base import Transport
from parallel_ops.context_parallel.cost import Algorithm
from parallel_ops.context_parallel.schedule.blocks import Options, unpack_keys
from parallel_ops.context_parallel.schedule.ring import Ring, ring_backward, ring_forward
from parallel_ops.context_parallel.schedule.ulysses import Heads, join_heads, split_heads, tensors_of
from parallel_ops.context_parallel.token_ranges import ring_ranks, shard_ranges, ulysses_ranks
from parallel_ops.ops.attention.block import attention_gradient_rows, attention_sink_gradient
from parallel_ops.ops.attention.flash_attention import with_unit_last_stride


@dataclass(frozen=True)
class Attention:
    """One rank's part of an attention that the ranks of ``transport`` share.

    Args:
        op: named in errors. length: tokens of the whole sequence.
        options: those of this rank's first head.
    """

    op: str
    transport: Transport
    length: int
    layout: str
    algorithm: Algorithm
    options: Options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """O ``[s, b, h, d_v]``, its M and Z ``[2, b, h, s]``, and q, k and v after the all-to-all.

        The last, ``[tokens, b, (h d + kv_heads (d + d_v)) / ulysses_degree]``, replace q, k and v in the backward: see
        ``tensors_of``. They are empty if ``ulysses_degree`` is 1.
        """
        if self._heads is None:
            result = ring_forward(
                self.ring(), with_unit_last_stride(q), k, v, sink, all_gather=self.algorithm.all_gather
            )
            return result.out.to(q.dtype), result.statistics, q.new_empty(0)
        u, at = self.algorithm.ulysses_degree, self._heads.at
        qkv = self._heads.tokens_to_heads(split_heads(u, q, k, v))
        heads = q.shape[2] // u
        q, k, v = tensors_of(qkv, *((t.shape[2] // u, t.shape[3]) for t in (q, k, v)))
        sink = None if sink is None else sink.chunk(u)[at]
        result = ring_forward(self.ring(at * heads), q, k, v, sink, all_gather=False)
        out = result.out.to(q.dtype)
        (out,) = join_heads(self._heads.heads_to_tokens(out.flatten(2)), (heads, out.shape[3]))
        statistics = result.statistics.permute(3, 1, 2, 0).contiguous()
        statistics = torch.cat(self._heads.heads_to_tokens(statistics), dim=2).permute(3, 1, 2, 0).contiguous()
        return out, statistics, qkv

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        out: Tensor,
        statistics: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dq, dk and dv of this rank's tokens, and their share of the sink's gradient."""
        grad = with_unit_last_stride(grad)
        rows = attention_gradient_rows(grad, out, statistics)
        dsink = None if sink is None else attention_sink_gradient(sink, rows)
        if self._heads is None:
            dq, packed = ring_backward(
                self.ring(), grad, with_unit_last_stride(q), k, v, rows, out, all_gather=self.algorithm.all_gather
            )
            dk, dv = (t.to(q.dtype).contiguous() for t in unpack_keys(packed, q.shape[3]))
            return dq.to(q.dtype), dk, dv, dsink
        u, at, heads = self.algorithm.ulysses_degree, self._heads.at, q.shape[2]
        grad = self._heads.tokens_to_heads(split_heads(u, grad)).unflatten(2, (heads, grad.shape[3]))
        rows = self._heads.tokens_to_heads(split_heads(u, rows.permute(3, 1, 2, 0))).unflatten(2, (heads, 3))
        rows = rows.permute(3, 1, 2, 0).contiguous()
        # The outputs of these heads are on the ranks of their tokens, which sent D: the kernels are this package's.
        dq, packed = ring_backward(self.ring(at * heads), grad, q, k, v, rows, all_gather=False)
        gradients = torch.cat([t.flatten(2) for t in (dq, *unpack_keys(packed, q.shape[3]))], dim=2).to(q.dtype)
        shapes = [(t.shape[2], t.shape[3]) for t in (q, k, v)]
        dq, dk, dv = join_heads(self._heads.heads_to_tokens(gradients), *shapes)
        return dq, dk, dv, dsink

    @cached_property
    def _heads(self) -> Heads | None:
        rank, size, u = self.transport.rank, self.transport.size, self.algorithm.ulysses_degree
        if u == 1:
            return None
        ranks = ulysses_ranks(self.layout, size, rank, u)
        own = [shard_ranges(self.layout, self.length, size, r) for r in ranks]
        union = shard_ranges(self.layout, self.length, size, rank, u)
        return Heads(self.op, self.transport, ranks, ranks.index(rank), own, union)

    def ring(self, first_head: int = 0) -> Ring:
        """The ranks whose keys this rank attends to. ``first_head``: relative to ``options``."""
        rank, size, u = self.transport.rank, self.transport.size, self.algorithm.ulysses_degree
        ranks = ring_ranks(self.layout, size, rank, u)
        shards = [shard_ranges(self.layout, self.length, size, r, u) for r in ranks]
        options = self.options.with_first_head(self.options.first_head + first_head)
        return Ring(self.op, self.transport, ranks, ranks.index(rank), shards, options)
