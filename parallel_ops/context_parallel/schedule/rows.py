"""Rows of tokens on their way between ranks: found, joined and added by the places of their tokens."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.comm.transport.base import Exchange
from parallel_ops.context_parallel.token_ranges import count_tokens, local_slice, merged

Parts = tuple[TokenRange, ...]


class Rows(NamedTuple):
    """Rows ``[tokens, ...]`` of these tokens: keys and values packed, or their gradients; valid after ``wait``."""

    parts: Parts
    rows: Tensor
    exchange: Exchange | None = None

    def wait(self) -> "Rows":
        if self.exchange is not None:
            self.exchange.wait()
        return self

    def of(self, parts: Parts) -> Tensor:
        """The rows of some of the tokens, contiguous; copied only if they are apart."""
        places = [local_slice(part, self.parts) for part in parts]
        if not places:
            return self.rows[:0]
        if all(place.step == 1 for place in places) and all(a.stop == b.start for a, b in pairwise(places)):
            return self.rows[places[0].start : places[-1].stop]
        return torch.cat([self.rows[place] for place in places])

    def add_to(self, total: "Rows") -> None:
        for part in self.parts:
            total.rows[local_slice(part, total.parts)] += self.rows[local_slice(part, self.parts)]


def joined(found: Sequence[Rows], whole: Parts | None = None) -> Rows:
    """All rows, of the tokens ``whole``; without, in the order of the sequence if ranks have adjacent tokens."""
    if whole is None:
        if len(found) == 1:
            return found[0]
        whole = merged([part for rows in found for part in rows.parts])
    out = found[0].rows.new_empty((count_tokens(whole), *found[0].rows.shape[1:]))
    for rows in found:
        for part in rows.parts:
            out[local_slice(part, whole)] = rows.rows[local_slice(part, rows.parts)]
    return Rows(whole, out)
