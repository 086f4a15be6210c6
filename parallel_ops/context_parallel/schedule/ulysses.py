"""All-to-all between ranks that share out the heads: tokens of this rank in all heads, or all tokens in this rank's.

Each rank of the neighbours sends every other one message for each run of its tokens, and what arrives lands where it
belongs in the sequence. Source: Jacobs et al., arXiv:2309.14509 (DeepSpeed-Ulysses).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_ops.comm.transport.base import Receive, Send, Transport
from parallel_ops.comm.transport.exchange import Exchange
from parallel_ops.context_parallel.token_ranges import Run, tokens, where


@dataclass(frozen=True)
class Heads:
    """Neighbours that share out the heads.

    Args:
        ranks: their numbers in the transport's group, in the order of the heads.
        at: which of them this one is.
        own: the tokens of each. together: the tokens of all of them.
    """

    op: str
    transport: Transport
    ranks: Sequence[int]
    at: int
    own: Sequence[tuple[Run, ...]]
    together: tuple[Run, ...]

    def of(self, source: int) -> list[tuple[slice, slice]]:
        """For each run of a rank, where it is in its own tokens and in those of all."""
        return [(where(run, self.own[source]), where(run, self.together)) for run in self.own[source]]

    def tokens_to_heads(self, parts: Sequence[Tensor]) -> Tensor:
        """``parts[j]``, ``[s, b, ...]``, contiguous: this rank's tokens in the heads of rank j. All tokens in this
        rank's heads."""
        mine = parts[self.at]
        out = mine.new_empty((tokens(self.together), *mine.shape[1:]))
        sends, receives, apart = [], [], []
        for j, rank in enumerate(self.ranks):
            for own, all_of_it in self.of(j):
                target = out[all_of_it]
                if j == self.at:
                    target.copy_(mine[own])
                    continue
                if not target.is_contiguous():
                    apart.append((target, target.new_empty(target.shape)))
                    target = apart[-1][1]
                receives.append(Receive(target, rank))
            if j != self.at:
                sends += [Send(parts[j][own], rank) for own, _ in self.of(self.at)]
        Exchange(self.op, self.transport, sends, receives).wait()
        for target, arrived in apart:
            target.copy_(arrived)
        return out

    def heads_to_tokens(self, x: Tensor) -> list[Tensor]:
        """``x``: all tokens in this rank's heads, ``[.., b, ...]``, contiguous. This rank's tokens, in the heads of
        each rank."""
        s = tokens(self.own[self.at])
        parts = [x.new_empty((s, *x.shape[1:])) for _ in self.ranks]
        sends, receives = [], []
        for j, rank in enumerate(self.ranks):
            if j == self.at:
                for own, all_of_it in self.of(j):
                    parts[j][own] = x[all_of_it]
                continue
            sends += [Send(x[all_of_it].contiguous(), rank) for _, all_of_it in self.of(j)]
            receives += [Receive(parts[j][own], rank) for own, _ in self.of(self.at)]
        Exchange(self.op, self.transport, sends, receives).wait()
        return parts


def split_heads(count: int, *tensors: Tensor) -> list[Tensor]:
    """For each of ``count`` ranks its heads of all tensors ``[s, b, heads, d]``, one after another."""
    chunks = zip(*(t.chunk(count, dim=2) for t in tensors), strict=True)
    return [torch.cat(of_rank, dim=2) for of_rank in chunks]


def join_heads(parts: Sequence[Tensor], *heads: int) -> list[Tensor]:
    """The tensors of which ``split_heads`` made ``parts``. ``heads``: how many each has in a part."""
    chunks = zip(*(part.split(heads, dim=2) for part in parts), strict=True)
    return [torch.cat(of_tensor, dim=2) for of_tensor in chunks]
