"""The way of tokens to their experts and back, over the ranks that share the experts of a layer.

    rows of this rank's tokens, by expert       permute; expert e is on rank e // (n / P)
    rows of this rank's experts, by sender      one all-to-all of as many rows as each rank has for each other
    rows of this rank's experts, by expert      permute; what the experts compute goes back the same way

The ranks first exchange how many rows each expert gets: the host reads these numbers, once for each layer and
micro-batch, as an all-to-all of uneven sizes needs them. With a capacity all sizes follow from the shapes, and the host
reads nothing. Gradients take the same ways back.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm import all_to_all
from parallel_ops.comm.consistency import CallSignature, check_consistency
from parallel_ops.expert_parallel.exchange import Exchange
from parallel_ops.ops.experts import ExpertOrder, permute, sort_by_expert, unpermute


class Arrived(NamedTuple):
    """The rows of this rank's experts.

    Attributes:
        rows: ``[r, h]``, ordered by expert, then by sending rank, then by token.
        ends: ``[num_experts / P]`` int32, the end of each expert's rows.
        weights: ``[r]``, the weight of each row, or ``None``.
    """

    rows: Tensor
    ends: Tensor
    weights: Tensor | None


class Dispatch:
    """Tokens on their way to the experts of all ranks: ``arrive`` waits for them.

    Args:
        x: ``[t, h]``, this rank's tokens; ``t`` may differ between ranks, and be 0.
        experts: ``[t, k]``, ids from 0 to ``num_experts - 1``, of ``route``.
        load: ``[num_experts]``, how many of this rank's tokens chose each expert.
        num_experts: of all ranks; a multiple of their number.
        group: the ranks that share the experts; ``None`` for one.
        weights: ``[t, k]``, sent with the rows; ``None`` for nothing.
        capacity: rows of each expert from each rank at most; further ones are dropped, in the order of the tokens.
            ``None`` for no limit. The same on every rank.

    Raises:
        ValueError: on every rank, before data moves, where ranks disagree (on CUDA: in the first call of a kind).

    Sharding: x S(0) over group; gradients are complete.
    """

    def __init__(
        self, x: Tensor, experts: Tensor, load: Tensor, num_experts: int, *, group: ProcessGroup | None,
        weights: Tensor | None = None, capacity: int | None = None,
    ) -> None:  # fmt: skip
        self._group = group
        self._order = sort_by_expert(experts, num_experts, capacity=capacity)
        self._sent: list[int] = []
        self._received: list[int] = []
        self._regrouped: ExpertOrder | None = None
        rows, own = permute(x, self._order), None if weights is None else _of_rows(weights, self._order.rows)
        self._parts = [rows] if own is None else [rows, own]
        self._leaving: list[Exchange] = []
        if group is not None:
            if capacity is not None:  # otherwise the ranks compare what they exchange
                same = x.dtype, x.shape[1], num_experts, capacity, weights is None
                text = f"rows of {x.shape[1]} {x.dtype} for {num_experts} experts, capacity={capacity}"
                check_consistency(group, CallSignature("expert_parallel", same, text, ()), x.device)
            table = self._exchange_sizes(load, num_experts, capacity)
            self._leaving = [Exchange(part, self._sent, self._received, group) for part in self._parts]
            # What a rank will have received is ordered by sender and expert.
            local = table.shape[1]
            ids = torch.arange(local, device=x.device).repeat(len(self._received))
            ids = ids.repeat_interleave(table.flatten(), output_size=sum(self._received))
            self._regrouped = sort_by_expert(ids[:, None], local)

    def arrive(self) -> Arrived:
        """The rows of this rank's experts. Called once, before ``combine``."""
        if self._regrouped is None:
            return Arrived(self._parts[0], self._order.ends, self._parts[1] if len(self._parts) > 1 else None)
        # The last that was sent first, as a backward goes through them.
        parts = [exchange.finish() for exchange in reversed(self._leaving)][::-1]
        weights = parts[1][self._regrouped.rows.long()] if len(parts) > 1 else None
        return Arrived(permute(parts[0], self._regrouped), self._regrouped.ends, weights)

    def combine(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """What the experts have computed of ``rows``, ``[r, h]``, summed for each token in fp32: ``[t, h]``.

        Args:
            weights: ``[t, k]``, of each token's experts; ``None`` where the rows have them in them.
        """
        if self._regrouped is not None:
            y = unpermute(y, self._regrouped)
            assert self._group is not None
            y = Exchange(y, self._received, self._sent, self._group).finish()
        return unpermute(y, self._order, weights)

    def _exchange_sizes(self, load: Tensor, num_experts: int, capacity: int | None) -> Tensor:
        """The rows from each rank for each of this rank's experts, ``[P, num_experts / P]``."""
        assert self._group is not None
        ranks = self._group.size()
        shape = ranks, num_experts // ranks
        if capacity is not None:
            self._sent = self._received = [shape[1] * capacity] * ranks
            return torch.full(shape, capacity, device=load.device)
        table = all_to_all(load.long(), self._group).view(shape)
        both = torch.stack([load.view(shape).sum(1), table.sum(1)]).tolist()  # the host waits for these
        self._sent, self._received = both
        return table


def _of_rows(weights: Tensor, slots: Tensor) -> Tensor:
    """The weight of each row, 0 for padding.

    Without tokens too it is in the graph of the weights: all ranks must take part in the messages of a backward.
    """
    return torch.cat([weights.flatten(), weights.new_zeros(1)])[slots.long()]  # -1 is the last
