"""A token embedding whose vocabulary is split over a group.

    x = sum over r of  E_r[token - start_r]  where rank r owns the token, 0 elsewhere

Only one term of the sum is not zero, so it is exact. Source: Shoeybi et al., arXiv:1909.08053.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_ops.comm import reduce_from_group, reduce_scatter
from parallel_ops.comm._group import group_rank, group_size
from parallel_ops.layers._checks import before
from parallel_ops.layers._sharding import Init, ShardedModule, Sharding
from parallel_ops.ops._check import check_same_device


class VocabParallelEmbedding(ShardedModule):
    """``nn.Embedding`` with its rows split over a group.

    Args:
        num_embeddings: size of the vocabulary, at least the group's size. Any: the parts are those of ``torch.chunk``.
        embedding_dim: width.
        group: the ranks that share the table; ``None`` for one.
        sequence_parallel: the result is sharded by tokens over the group.
        init_method: fills the whole table in place; by default as ``nn.Embedding`` does.

    Attributes:
        weight: ``[V_r, embedding_dim]``, this rank's rows: also what ``vocab_parallel_linear_cross_entropy`` takes as
            the weight of a tied output layer.
        start, stop: of which rows they are. sizes: the rows of every rank.

    Raises:
        ValueError: a vocabulary of which some rank would have no part.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: ProcessGroup | None,
        sequence_parallel: bool = False,
        init_method: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_parallel, self.init_method = sequence_parallel, init_method
        sharding = Sharding((num_embeddings, embedding_dim), 0)
        size = group_size(group)
        if sharding.span(size - 1, size)[0] >= num_embeddings:
            raise ValueError(
                f"VocabParallelEmbedding: num_embeddings ({num_embeddings}) leaves some of the {size} ranks without a "
                "row; pad the vocabulary"
            )
        spans = [sharding.span(rank, size) for rank in range(size)]
        self.sizes = [stop - start for start, stop in spans]
        self.start, self.stop = spans[group_rank(group)]
        self.add_part("weight", sharding, (self.stop - self.start, embedding_dim), device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table as ``nn.Embedding`` does."""
        self.draw("weight", self.init_method or nn.init.normal_)

    def forward(self, tokens: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        """``[s, ...]`` token ids to ``[s, ..., embedding_dim]``.

        Args:
            tokens: int64 or int32, the same on every rank.
            sizes: the rows of the result on every rank, where ``s`` does not divide evenly.

        Raises:
            TypeError: tokens that are not integers. IndexError: tokens outside the vocabulary (CPU). Ranks whose
            tokens are right raise ValueError where another's are wrong.

        Sharding: tokens replicated; the result replicated, or S(0) with ``sequence_parallel``.
        """
        with before("reduce_scatter" if self.sequence_parallel else "reduce_from_group", self.group, tokens):
            rows = self._look_up(tokens)
        if group_size(self.group) == 1:
            return rows
        if self.sequence_parallel:
            return reduce_scatter(rows, self.group, sizes=sizes)
        return reduce_from_group(rows, self.group)

    def _look_up(self, tokens: Tensor) -> Tensor:
        """The rows of the tokens that are this rank's, zeros for the others."""
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
            got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(f"VocabParallelEmbedding: tokens must be an int64 or int32 tensor, got {got}")
        check_same_device("VocabParallelEmbedding", "tokens", tokens, "the weight", self.weight)
        local, mine = tokens, None
        if group_size(self.group) > 1:
            local = tokens - self.start
            mine = (local >= 0) & (local < self.stop - self.start)
            # A token that no rank owns must not pass as a row of zeros.
            outside = (tokens < 0) | (tokens >= self.num_embeddings)
            local = torch.where(mine, local, torch.where(outside, self.stop - self.start, 0))
        try:
            rows = F.embedding(local, self.weight)
        except IndexError:
            low, high = (int(t) for t in tokens.aminmax())
            raise IndexError(
                f"VocabParallelEmbedding: tokens must be from 0 to {self.num_embeddings - 1}, got {low} to {high}"
            ) from None
        # Chosen, not multiplied by zero: whatever the row that stands in holds, a NaN say, stays here.
        return rows if mine is None else rows.masked_fill(~mine.unsqueeze(-1), 0.0)

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, rank={group_rank(self.group)} of {group_size(self.group)}, "
            f"sequence_parallel={self.sequence_parallel}"
        )
