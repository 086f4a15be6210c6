"""A token embedding whose vocabulary is split over a mesh.

    x = sum over r of  E_r[token - start_r]  where rank r owns the token, 0 elsewhere

Only one term of the sum is not zero, so it is exact. Source: Shoeybi et al., arXiv:1909.08053.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from parallel_ops._internal.dispatch.checks import check_same_device
from parallel_ops._internal.distributed.groups import group_rank
from parallel_ops.comm import reduce_from_group, reduce_scatter
from parallel_ops.layers.initialization import InitFn, init_sharded_
from parallel_ops.layers.parameters import ShardedModule, empty_parameter, propagates_errors, to_local


class VocabParallelEmbedding(ShardedModule):
    """``nn.Embedding`` with its rows split over a mesh.

    Args:
        num_embeddings: size of the vocabulary, split as by ``torch.chunk``; every rank must have a row.
        embedding_dim: width.
        tp_mesh: the ranks that share the table; ``None`` for one.
        sequence_parallel: shard the result by tokens over the mesh.
        init_method: fills tiles of the table in place, each element independently; ``None`` for what
            ``nn.Embedding`` does.
        device, dtype: of the table; ``None`` for torch's defaults.

    Attributes:
        weight: ``[num_embeddings, embedding_dim]``, a DTensor S(0).
        start, stop: this rank's rows. sizes: number of rows of every rank.

    Raises:
        ValueError: a vocabulary that leaves a rank without a row.

    Examples:
        >>> import torch
        >>> from parallel_ops.layers import VocabParallelEmbedding
        >>> embedding = VocabParallelEmbedding(1000, 64, tp_mesh=None)  # ParallelMesh(tp=4)["tp"] under torchrun
        >>> embedding(torch.randint(1000, (16, 2))).shape
        torch.Size([16, 2, 64])
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tp_mesh: DeviceMesh | None,
        sequence_parallel: bool = False,
        init_method: InitFn | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp_mesh)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_parallel, self.init_method = sequence_parallel and self.ranks > 1, init_method
        part = -(-num_embeddings // self.ranks)
        if (self.ranks - 1) * part >= num_embeddings:
            raise ValueError(
                f"VocabParallelEmbedding: num_embeddings ({num_embeddings}) leaves some of the {self.ranks} ranks "
                "without a row; pad the vocabulary"
            )
        self.sizes = [min(part, num_embeddings - rank * part) for rank in range(self.ranks)]
        self.start = group_rank(self.group) * part
        self.stop = self.start + self.sizes[group_rank(self.group)]
        self.weight = empty_parameter((num_embeddings, embedding_dim), Shard(0), self.mesh, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the table: by default as ``nn.Embedding`` does, independently of the mesh."""
        init_sharded_(self.weight, self.init_method or nn.init.normal_)

    def local_weight(self) -> Tensor:
        """This rank's rows, ``[V_r, embedding_dim]``, for the output layer in ``vocab_parallel_linear_cross_entropy``.

        Its gradient goes to ``weight``.
        """
        (weight,) = to_local(self, self.weight)
        assert weight is not None
        return weight

    @propagates_errors
    def forward(self, tokens: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        """``[s, ...]`` token ids to ``[s, ..., embedding_dim]``.

        Args:
            tokens: int64 or int32, the same on every rank.
            sizes: with ``sequence_parallel``, the rows of the result on every rank; ``None`` for equal parts.

        Raises:
            TypeError: tokens that are not integers. IndexError: tokens outside the vocabulary (CPU).

        Sharding: tokens replicated; the result replicated, or S(0) with ``sequence_parallel``.
        """
        rows = self._look_up(tokens)
        if self.sequence_parallel:
            return reduce_scatter(rows, self.group, sizes=sizes)
        return reduce_from_group(rows, self.group)

    def _look_up(self, tokens: Tensor) -> Tensor:
        """Rows of the tokens that this rank owns, zeros for other tokens."""
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
            got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(f"VocabParallelEmbedding: tokens must be an int64 or int32 tensor, got {got}")
        check_same_device("VocabParallelEmbedding", "tokens", tokens, "the weight", self.weight)
        local, mine = tokens, None
        if self.ranks > 1:
            local = tokens - self.start
            mine = (local >= 0) & (local < self.stop - self.start)
            # An index that no rank owns must be an error of F.embedding, not a row of zeros.
            outside = (tokens < 0) | (tokens >= self.num_embeddings)
            local = torch.where(mine, local, torch.where(outside, self.stop - self.start, 0))
        try:
            rows = F.embedding(local, self.local_weight())
        except IndexError:
            low, high = (int(t) for t in tokens.aminmax())
            raise IndexError(
                f"VocabParallelEmbedding: tokens must be from 0 to {self.num_embeddings - 1}, got {low} to {high}"
            ) from None
        # Filled, not multiplied by zero: a NaN in the row read in place of another rank's must not spread.
        return rows if mine is None else rows.masked_fill(~mine.unsqueeze(-1), 0.0)
