"""All-to-all between ranks that share the heads: from this rank's tokens in all heads to all tokens in its heads.

Each rank sends every other rank one message for each of its token ranges, which is received at its place in the
sequence. Source: Jacobs et al., arXiv:2309.14509 (DeepSpeed-Ulysses).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.comm.transport.base import Receive, Send, Transport
from parallel_ops.comm.transport.exchange import Exchange
from parallel_ops.context_parallel.token_ranges import count_tokens, local_slice


@dataclass(frozen=True)
class Heads:
    """The ranks that share the heads.

    Args:
        ranks: their numbers in the transport's group, in the order of the heads.
        at: the index of this rank among them.
        own: the tokens of each rank. union: the tokens of all of them.
    """

    op: str
    transport: Transport
    ranks: Sequence[int]
    at: int
    own: Sequence[tuple[TokenRange, ...]]
    union: tuple[TokenRange, ...]

    def slices(self, source: int) -> list[tuple[slice, slice]]:
        """The indices of each token range of ``source`` among its own tokens and among those of all ranks."""
        return [(local_slice(part, self.own[source]), local_slice(part, self.union)) for part in self.own[source]]

    def tokens_to_heads(self, parts: Sequence[Tensor]) -> Tensor:
        """All tokens in this rank's heads.

        Args:
            parts: for each rank, this rank's tokens in the heads of that rank, ``[s, b, ...]``, contiguous.
        """
        mine = parts[self.at]
        out = mine.new_empty((count_tokens(self.union), *mine.shape[1:]))
        sends, receives, copies = [], [], []
        for j, rank in enumerate(self.ranks):
            for own, union in self.slices(j):
                target = out[union]
                if j == self.at:
                    target.copy_(mine[own])
                    continue
                if not target.is_contiguous():
                    copies.append((target, target.new_empty(target.shape)))
                    target = copies[-1][1]
                receives.append(Receive(target, rank))
            if j != self.at:
                sends += [Send(parts[j][own], rank) for own, _ in self.slices(self.at)]
        Exchange(self.op, self.transport, sends, receives).wait()
        for target, received in copies:
            target.copy_(received)
        return out

    def heads_to_tokens(self, x: Tensor) -> list[Tensor]:
        """This rank's tokens in the heads of each rank.

        Args:
            x: all tokens in this rank's heads, ``[tokens, b, ...]``, contiguous.
        """
        s = count_tokens(self.own[self.at])
        parts = [x.new_empty((s, *x.shape[1:])) for _ in self.ranks]
        sends, receives = [], []
        for j, rank in enumerate(self.ranks):
            if j == self.at:
                for own, union in self.slices(j):
                    parts[j][own] = x[union]
                continue
            sends += [Send(x[union].contiguous(), rank) for _, union in self.slices(j)]
            receives += [Receive(parts[j][own], rank) for own, _ in self.slices(self.at)]
        Exchange(self.op, self.transport, sends, receives).wait()
        return parts


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
