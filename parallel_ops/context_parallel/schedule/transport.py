"""Attention over a transport: all-to-all inside, ring or gather outside, forward and backward."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from parallel_ops.comm.transport.base import Transport
from parallel_ops.context_parallel.cost import Way
from parallel_ops.context_parallel.schedule import ring as _ring
from parallel_ops.context_parallel.schedule.blocks import Options
from parallel_ops.context_parallel.schedule.ulysses import Heads, join_heads, split_heads
from parallel_ops.context_parallel.token_ranges import counterparts, neighbours, runs
from parallel_ops.ops.attention.block import attention_gradient_rows, attention_sink_gradient
from parallel_ops.ops.attention.flash_attention import with_unit_last_stride


@dataclass(frozen=True)
class Attention:
    """One rank's part in an attention that the ranks of ``transport`` share.

    Args:
        op: named in errors. length: tokens of the whole sequence.
        options: for the first head.
    """

    op: str
    transport: Transport
    length: int
    layout: str
    way: Way
    options: Options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """O ``[s, b, h, d]``, its M and Z ``[2, b, h, s]``, and q, k and v of this rank's heads where heads are shared
        out, ``[all tokens, b, (h + 2 kv_heads) / ulysses_degree, d]``: what a backward then takes in their place."""
        if self._heads is None:
            k, v = k.contiguous(), v.contiguous()
            carry = _ring.forward(self.ring(), with_unit_last_stride(q), k, v, sink, gathered=self.way.gathered)
            return carry.out.to(q.dtype), carry.statistics, q.new_empty(0)
        u, at = self.way.ulysses_degree, self._heads.at
        kept = self._heads.tokens_to_heads(split_heads(u, q, k, v))
        heads = q.shape[2] // u
        q, k, v = kept.split([heads, k.shape[2] // u, v.shape[2] // u], dim=2)
        k, v = k.contiguous(), v.contiguous()
        sink = None if sink is None else sink.chunk(u)[at]
        carry = _ring.forward(self.ring(at * heads), q, k, v, sink, gathered=False)
        (out,) = join_heads(self._heads.heads_to_tokens(carry.out.to(q.dtype)), heads)
        statistics = carry.statistics.permute(3, 1, 2, 0).contiguous()
        statistics = torch.cat(self._heads.heads_to_tokens(statistics), dim=2).permute(3, 1, 2, 0).contiguous()
        return out, statistics, kept

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
        """dq, dk, dv of this rank's tokens, and the gradient of the sink that they give."""
        grad = with_unit_last_stride(grad)
        rows = attention_gradient_rows(grad, out, statistics)
        dsink = None if sink is None else attention_sink_gradient(sink, rows)
        if self._heads is None:
            k, v = k.contiguous(), v.contiguous()
            dq, (dk, dv) = _ring.backward(
                self.ring(), grad, with_unit_last_stride(q), k, v, rows, gathered=self.way.gathered
            )
            return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink
        u, at = self.way.ulysses_degree, self._heads.at
        heads = [t.shape[2] for t in (q, k, v)]
        grad = self._heads.tokens_to_heads(split_heads(u, grad))
        rows = self._heads.tokens_to_heads(split_heads(u, rows.permute(3, 1, 2, 0)))
        rows = rows.permute(3, 1, 2, 0).contiguous()
        k, v = k.contiguous(), v.contiguous()
        dq, (dk, dv) = _ring.backward(self.ring(at * heads[0]), grad, q, k, v, rows, gathered=False)
        together = torch.cat([dq, dk, dv], dim=2).to(q.dtype)
        dq, dk, dv = join_heads(self._heads.heads_to_tokens(together), *heads)
        return dq, dk, dv, dsink

    @cached_property
    def _heads(self) -> Heads | None:
        rank, size, u = self.transport.rank, self.transport.size, self.way.ulysses_degree
        if u == 1:
            return None
        ranks = neighbours(self.layout, size, rank, u)
        own = [runs(self.layout, self.length, size, r) for r in ranks]
        together = runs(self.layout, self.length, size, rank, u)
        return Heads(self.op, self.transport, ranks, ranks.index(rank), own, together)

    def ring(self, first_head: int = 0) -> _ring.Ring:
        """Whose keys this rank attends to."""
        rank, size, u = self.transport.rank, self.transport.size, self.way.ulysses_degree
        ranks = counterparts(self.layout, size, rank, u)
        shards = [runs(self.layout, self.length, size, r, u) for r in ranks]
        options = self.options.with_first_head(self.options.first_head + first_head)
        return _ring.Ring(self.op, self.transport, ranks, ranks.index(rank), shards, options)
