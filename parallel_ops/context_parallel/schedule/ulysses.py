"""Attention over a transport: all-to-all among the ranks that share heads, ring or all-gather across them.

The all-to-all goes from this rank's tokens in all heads to all tokens in its heads, in one message to each rank.
Source: Jacobs et al., arXiv:2309.14509 (DeepSpeed-Ulysses).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_ops.comm.transport.base import Exchange, Receive, Send, Transport
from parallel_ops.context_parallel.schedule.blocks import unpack_keys
from parallel_ops.context_parallel.schedule.ring import Ring, Rows, joined, ring_backward, ring_forward
from parallel_ops.context_parallel.token_ranges import (
    count_tokens,
    layout_name,
    ranks_on_nodes,
    ring_ranks,
    shard_ranges,
    ulysses_ranks,
)
from parallel_ops.ops.attention.block import attention_gradient_rows, attention_sink_gradient, with_unit_last_stride
from parallel_ops.ops.attention.options import AttentionOptions

NAME = "ring_attention"


class UlyssesGroup:
    """The ranks with which this one exchanges heads for tokens, in the order of the heads."""

    def __init__(self, placement: "Placement", transport: Transport) -> None:
        layout, length, size, u = placement.cp_layout, placement.length, transport.size, placement.ulysses_degree
        self.transport, self.ranks = transport, ulysses_ranks(layout, size, transport.rank, u)
        self.at = self.ranks.index(transport.rank)
        # The tokens of each rank, and those of all of them.
        self.own = [shard_ranges(layout, length, size, rank) for rank in self.ranks]
        self.union = shard_ranges(layout, length, size, transport.rank, u)

    def tokens_to_heads(self, parts: Sequence[Tensor]) -> Tensor:
        """All tokens in this rank's heads.

        Args:
            parts: for each rank, this rank's tokens in the heads of that rank, ``[s, b, ...]``, contiguous.
        """
        arrived = self._exchange(parts, [count_tokens(own) for own in self.own])
        return joined([Rows(*pair) for pair in zip(self.own, arrived, strict=True)], self.union).rows

    def heads_to_tokens(self, x: Tensor) -> list[Tensor]:
        """This rank's tokens in the heads of each rank.

        Args:
            x: all tokens in this rank's heads, ``[tokens, b, ...]``, contiguous.
        """
        whole = Rows(self.union, x)
        return self._exchange([whole.of(own) for own in self.own], [count_tokens(self.own[self.at])] * len(self.ranks))

    def _exchange(self, parts: Sequence[Tensor], tokens: Sequence[int]) -> list[Tensor]:
        """Sends each rank its part, and returns what each sent, of so many tokens."""
        mine = parts[self.at]
        arrived = [mine if j == self.at else mine.new_empty((n, *mine.shape[1:])) for j, n in enumerate(tokens)]
        others = [j for j in range(len(self.ranks)) if j != self.at]
        sends = [Send(parts[j], self.ranks[j]) for j in others]
        Exchange(NAME, self.transport, sends, [Receive(arrived[j], self.ranks[j]) for j in others]).wait()
        return arrived


def split_heads(count: int, *tensors: Tensor) -> list[Tensor]:
    """The tensors ``[s, b, heads, d]``, each of its own heads and d, split by heads over ``count`` ranks.

    Returns:
        For each rank ``[s, b, n]``, its heads of all tensors one after the other.
    """
    chunks = zip(*(t.chunk(count, dim=2) for t in tensors), strict=True)
    return [torch.cat([t.flatten(2) for t in of_rank], dim=2) for of_rank in chunks]


def tensors_of(part: Tensor, *shapes: tuple[int, int]) -> list[Tensor]:
    """The tensors of one rank's part of ``split_heads``, as views. ``shapes``: heads and d of each in a part."""
    tensors = part.split([heads * d for heads, d in shapes], dim=2)
    return [t.unflatten(2, shape) for t, shape in zip(tensors, shapes, strict=True)]


def join_heads(parts: Sequence[Tensor], *shapes: tuple[int, int]) -> list[Tensor]:
    """Inverse of ``split_heads``. ``shapes``: as in ``tensors_of``."""
    chunks = zip(*(tensors_of(part, *shapes) for part in parts), strict=True)
    return [torch.cat(of_tensor, dim=2) for of_tensor in chunks]


@functools.lru_cache(maxsize=8)
def _all_keys(length: int, device: torch.device) -> Tensor:
    """Ranges of queries that see every key."""
    first = torch.zeros(length, dtype=torch.int32, device=device)
    return torch.stack([first, first + (length - 1)])


class Placement(NamedTuple):
    """How the ranks of a group share an attention, in the order in which the registered op takes it.

    Attributes:
        group: name of the process group. length: tokens of the whole sequence.
        ulysses_degree, all_gather: see ``cost.Algorithm``.
    """

    group: str
    length: int
    cp_layout: str
    ulysses_degree: int
    all_gather: bool

    @property
    def layout(self) -> str:
        """The kind of the layout."""
        return layout_name(self.cp_layout)

    def ring(
        self, transport: Transport, options: AttentionOptions, heads: int, device: torch.device, ranks_per_node: int = 1
    ) -> Ring:
        """The ranks whose keys this rank attends to, with the options of its ``heads`` heads."""
        size, u = transport.size, self.ulysses_degree
        ranks = ring_ranks(self.cp_layout, size, transport.rank, u)
        shards = [shard_ranges(self.cp_layout, self.length, size, r, u) for r in ranks]
        # Values that only a GPU has are read once a batch, if the layout was made of them; no graph is captured then.
        mask = options if options.packed and (options.known_on_host or self.layout == "balanced") else None
        ranges = options.ranges(self.length)
        if ranges is None and max(map(len, shards)) > 2 and options.dropout_seed is None:
            ranges = _all_keys(self.length, device)  # one call a step instead of one for each pair of ranges
        options = options._replace(key_ranges=ranges, cu_seqlens=None)
        if u > 1:
            at = ulysses_ranks(self.cp_layout, size, transport.rank, u).index(transport.rank)
            options = options._replace(
                first_head=options.first_head + at * heads,
                sink=None if options.sink is None else options.sink.chunk(u)[at],
            )
        at, per_node = ranks.index(transport.rank), ranks_on_nodes(ranks, ranks_per_node)
        return Ring(NAME, transport, ranks, at, shards, options, mask, per_node)


def attention_forward(
    placement: Placement, transport: Transport, options: AttentionOptions, q: Tensor, k: Tensor, v: Tensor, *,
    ranks_per_node: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """O ``[s, b, h, d_v]``, its M and Z ``[2, b, h, s]``, and q, k and v after the all-to-all.

    The last, ``[tokens, b, (h d + kv_heads (d + d_v)) / ulysses_degree]``, replace q, k and v in the backward: see
    ``tensors_of``. They are empty if ``ulysses_degree`` is 1.
    """
    u = placement.ulysses_degree
    if u == 1:
        ring = placement.ring(transport, options, q.shape[2], q.device, ranks_per_node)
        result = ring_forward(ring, with_unit_last_stride(q), k, v, all_gather=placement.all_gather)
        return result.out.to(q.dtype), result.statistics, q.new_empty(0)
    group, heads = UlyssesGroup(placement, transport), q.shape[2] // u
    qkv = group.tokens_to_heads(split_heads(u, q, k, v))
    q, k, v = tensors_of(qkv, *((t.shape[2] // u, t.shape[3]) for t in (q, k, v)))
    ring = placement.ring(transport, options, heads, q.device, ranks_per_node)
    result = ring_forward(ring, q, k, v, all_gather=False)
    out = result.out.to(q.dtype)
    (out,) = join_heads(group.heads_to_tokens(out.flatten(2)), (heads, out.shape[3]))
    statistics = result.statistics.permute(3, 1, 2, 0).contiguous()
    statistics = torch.cat(group.heads_to_tokens(statistics), dim=2).permute(3, 1, 2, 0).contiguous()
    return out, statistics, qkv


def attention_backward(
    placement: Placement, transport: Transport, options: AttentionOptions, grad: Tensor, q: Tensor, k: Tensor,
    v: Tensor, out: Tensor, statistics: Tensor, *, ranks_per_node: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dq, dk and dv of this rank's tokens, and their share of the sink's gradient."""
    grad = with_unit_last_stride(grad)
    rows = attention_gradient_rows(grad, out, statistics)
    dsink = None if options.sink is None else attention_sink_gradient(options.sink, rows)
    u, heads = placement.ulysses_degree, q.shape[2]
    ring = placement.ring(transport, options, heads, q.device, ranks_per_node)
    if u == 1:
        dq, packed = ring_backward(
            ring, grad, with_unit_last_stride(q), k, v, rows, out, all_gather=placement.all_gather
        )
        dk, dv = (t.to(q.dtype).contiguous() for t in unpack_keys(packed, q.shape[3]))
        return dq.to(q.dtype), dk, dv, dsink
    group = UlyssesGroup(placement, transport)
    grad = group.tokens_to_heads(split_heads(u, grad)).unflatten(2, (heads, grad.shape[3]))
    rows = group.tokens_to_heads(split_heads(u, rows.permute(3, 1, 2, 0))).unflatten(2, (heads, 3))
    rows = rows.permute(3, 1, 2, 0).contiguous()
    # The outputs of these heads are on the ranks of their tokens, which sent D: the kernels are this package's.
    dq, packed = ring_backward(ring, grad, q, k, v, rows, all_gather=False)
    gradients = torch.cat([t.flatten(2) for t in (dq, *unpack_keys(packed, q.shape[3]))], dim=2).to(q.dtype)
    dq, dk, dv = join_heads(group.heads_to_tokens(gradients), *((t.shape[2], t.shape[3]) for t in (q, k, v)))
    return dq, dk, dv, dsink
