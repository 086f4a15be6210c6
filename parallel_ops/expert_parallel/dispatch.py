"""The way of tokens to their experts and back, over the ranks that share the experts of a layer.

    rows of this rank's tokens, by expert       permute; expert e is on rank e // (n / P)
    rows of this rank's experts, by sender      one all-to-all of as many rows as each rank has for each other
    rows of this rank's experts, by expert      permute; what the experts compute goes back the same way

The ranks first exchange how many rows each expert gets: the host reads these numbers, once for each layer and
micro-batch, as an all-to-all of uneven sizes needs them. With a capacity all sizes follow from the shapes, and the host
reads nothing. Gradients take the same ways back.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm import all_to_all
from parallel_ops.comm.consistency import CallSignature, check_consistency
from parallel_ops.expert_parallel.exchange import Exchange
from parallel_ops.ops import ExpertOrder, permute, sort_by_expert, unpermute


class ExpertInputs(NamedTuple):
    """The rows of this rank's experts.

    Attributes:
        rows: ``[r, h]``, ordered by expert, then by sending rank, then by token.
        offs: ``[num_experts / P]`` int32, the end of each expert's rows.
        weights: ``[r]``, the weight of each row, or ``None``.
    """

    rows: Tensor
    offs: Tensor
    weights: Tensor | None


class Dispatch:
    """Tokens on their way to the experts of all ranks and back.

    In ``chunks`` each rank's experts are that many groups, and the rows of each group travel by themselves: what one
    group computes hides the messages of those before and after it. Every expert still gets all its rows at once.

    Args:
        x: ``[t, h]``, this rank's tokens; ``t`` may differ between ranks, and be 0.
        experts: ``[t, k]``, ids from 0 to ``num_experts - 1``, of ``route``.
        load: ``[num_experts]``, how many of this rank's tokens chose each expert.
        num_experts: of all ranks; a multiple of their number.
        group: the ranks that share the experts; ``None`` for one.
        weights: ``[t, k]``, sent with the rows; ``None`` for nothing.
        capacity: rows of each expert from each rank at most; further ones are dropped, in the order of the tokens.
            ``None`` for no limit. The same on every rank.
        chunks: groups of each rank's experts, whose number it divides. The same on every rank; 1 without a group.
        multiple: of what the rows of each expert are padded to, with zeros.

    Attributes:
        in_flight: of each chunk, the rows and, where they are sent, the weights. ``receive`` takes them back, so that a
            module between may put its hooks on their gradients.

    Raises:
        ValueError: on every rank, before data moves, where ranks disagree (on CUDA: in the first call of a kind).

    Sharding: x S(0) over group; gradients are complete.
    """

    def __init__(
        self, x: Tensor, experts: Tensor, load: Tensor, num_experts: int, *, group: ProcessGroup | None,
        weights: Tensor | None = None, capacity: int | None = None, chunks: int = 1,
        multiple: int = 1,
    ) -> None:  # fmt: skip
        self._group, self.chunks, self._multiple = group, chunks, multiple
        self._sent: list[list[int]] = []
        self._received: list[list[int]] = []
        self._tables: Sequence[Tensor] = ()
        self._regrouped: dict[int, ExpertOrder] = {}
        if group is None:
            padded = capacity is None or capacity % multiple == 0
            self._order = sort_by_expert(experts, num_experts, capacity=capacity, multiple=multiple if padded else 1)
            self.in_flight = [self._permuted(x, weights)]
            if not padded and capacity is not None:  # dropped first, as without a multiple
                self._tables = [torch.full((1, num_experts), capacity, device=x.device)]
                self._received = [[len(self.in_flight[0][0])]]
            return
        ranks = group.size()
        if chunks > 1:  # chunk by chunk, and in each rank by rank
            by_chunk = torch.arange(num_experts, device=x.device).view(ranks, chunks, -1).transpose(0, 1).flatten()
            experts = by_chunk.argsort()[experts.long()]
        self._order = sort_by_expert(experts, num_experts, capacity=capacity)
        parts = self._permuted(x, weights)
        if capacity is not None:  # otherwise the ranks compare what they exchange
            same = x.dtype, x.shape[1], num_experts, capacity, weights is None, chunks
            text = f"rows of {x.shape[1]} {x.dtype} for {num_experts} experts, capacity={capacity}, chunks={chunks}"
            check_consistency(group, CallSignature("expert_parallel", same, text, ()), x.device)
        self._exchange_sizes(load, num_experts, capacity)
        sizes = [sum(sent) for sent in self._sent]
        pieces = zip(*(part.split(sizes) if chunks > 1 else [part] for part in parts), strict=True)
        self._leaving = [
            [Exchange(sent, received, group) for _ in parts]
            for sent, received in zip(self._sent, self._received, strict=True)
        ]
        self.in_flight = [
            [exchange.start(piece) for exchange, piece in zip(exchanges, of_chunk, strict=True)]
            for exchanges, of_chunk in zip(self._leaving, pieces, strict=True)
        ]

    def _permuted(self, x: Tensor, weights: Tensor | None) -> list[Tensor]:
        rows, own = permute(x, self._order), None if weights is None else _of_rows(weights, self._order.rows)
        return [rows] if own is None else [rows, own]

    def receive(self, in_flight: Sequence[Tensor], chunk: int = 0) -> ExpertInputs:
        """The rows of a chunk's experts on this rank. Called once for each chunk, in their order.

        Args:
            in_flight: those of the chunk, or what a module's hooks made of them.
        """
        if not self._tables:
            return ExpertInputs(in_flight[0], self._order.offs, in_flight[1] if len(in_flight) > 1 else None)
        # What a rank receives is ordered by sender and expert.
        table, total = self._tables[chunk], sum(self._received[chunk])
        ids = torch.arange(table.shape[1], device=table.device).repeat(table.shape[0])
        ids = ids.repeat_interleave(table.flatten(), output_size=total)
        order = self._regrouped[chunk] = sort_by_expert(ids[:, None], table.shape[1], multiple=self._multiple)
        parts = list(in_flight)
        if self._group is not None:  # the last that was sent first, as a backward goes through them
            exchanges = zip(reversed(self._leaving[chunk]), reversed(in_flight), strict=True)
            parts = [exchange.finish(rows) for exchange, rows in exchanges][::-1]
        weights = _of_rows(parts[1], order.rows) if len(parts) > 1 else None
        return ExpertInputs(permute(parts[0], order), order.offs, weights)

    def send_back(self, y: Tensor, chunk: int = 0) -> Tensor:
        """Sends what the experts have computed of a chunk's rows, ``[r, h]``: rows on their way back."""
        if chunk in self._regrouped:
            y = unpermute(y, self._regrouped[chunk])
        if self._group is None:
            return y
        exchange = Exchange(self._received[chunk], self._sent[chunk], self._group)
        self._leaving[chunk] = [exchange]
        return exchange.start(y)

    def combine(self, returning: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
        """What has come back, summed for each token in fp32: ``[t, h]``.

        Args:
            returning: what ``send_back`` gave for each chunk.
            weights: ``[t, k]``, of each token's experts; ``None`` where the rows have them in them.
        """
        if self._group is not None:
            returning = [self._leaving[chunk][0].finish(rows) for chunk, rows in enumerate(returning)]
        y = returning[0] if len(returning) == 1 else torch.cat(list(returning))
        return unpermute(y, self._order, weights)

    def _exchange_sizes(self, load: Tensor, num_experts: int, capacity: int | None) -> None:
        """Finds, for each chunk, the rows to and from each rank, and from each rank for each of this rank's experts."""
        assert self._group is not None
        ranks = self._group.size()
        shape = ranks, self.chunks, num_experts // ranks // self.chunks
        if capacity is not None:
            self._sent = self._received = [[shape[2] * capacity] * ranks] * self.chunks
            self._tables = [torch.full((ranks, shape[2]), capacity, device=load.device)] * self.chunks
            return
        own, table = load.view(shape), all_to_all(load.long(), self._group).view(shape)
        # The host waits for these.
        self._sent, self._received = torch.stack([own.sum(2), table.sum(2)]).transpose(1, 2).tolist()
        self._tables = table.unbind(1)


def _of_rows(weights: Tensor, slots: Tensor) -> Tensor:
    """The weight of each row, 0 for padding.

    Without tokens too it is in the graph of the weights: all ranks must take part in the messages of a backward.
    """
    return torch.cat([weights.flatten(), weights.new_zeros(1)])[slots.long()]  # -1 is the last
