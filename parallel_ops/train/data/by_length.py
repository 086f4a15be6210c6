"""A micro-batch of all data-parallel rows, shared out by length of documents: see ``context_parallel.group_size``."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from parallel_ops.context_parallel.group_size import group_documents
from parallel_ops.models.context import IGNORE_INDEX
from parallel_ops.train.data.batches import Batch


@dataclass(frozen=True)
class ByLength:
    """Takes the documents of one rank's group out of the packed row that has all.

    Attributes:
        ranks, rank: Number of ranks of dp x cp, and this one.
        pair: Work of a visible pair of query and key, in that of a token outside of attention.
    """

    ranks: int
    rank: int
    pair: float

    def __call__(self, batch: Batch) -> Batch:
        assert batch.cu_seqlens is not None and batch.positions is not None
        starts = batch.cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        groups = group_documents(lengths, self.ranks, pair=self.pair).groups
        own = next(group for group in groups if group.first <= self.rank < group.first + group.size)
        places = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in own.documents])
        ends = torch.tensor([0, *(lengths[i] for i in own.documents)]).cumsum(0)
        return replace(
            batch, tokens=batch.tokens[places], targets=batch.targets[places], positions=batch.positions[places],
            cu_seqlens=ends.to(torch.int32), first_rank=own.first, cp_ranks=own.size,
            targets_of_all=int((batch.targets != IGNORE_INDEX).sum()),
        )  # fmt: skip
