"""What a model does with its context-parallel ranks: each takes its tokens, and the loss is the mean over all."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parallel_ops.comm import primitives as _primitives
from parallel_ops.context_parallel import SequenceLayout, ring_attention
from parallel_ops.context_parallel.algorithm import Algorithm, Layout
from parallel_ops.layers.core_attention import CoreAttention
from parallel_ops.layers.parameters import check_mesh

# The target of a token that has none.
IGNORED = -100


@dataclass(frozen=True)
class Place:
    """Where the tokens of this rank are in a sequence.

    Attributes:
        layout: of the sequence, and the rank; ``None`` for one rank.
        positions: of this rank's tokens; ``None`` for 0 to s - 1.
        rows_before: tokens of the ranks before this one: dropout draws by rows in rank order.
        core_options: what the core needs to know.
    """

    layout: SequenceLayout | None = None
    rank: int = 0
    positions: Tensor | None = None
    rows_before: int = 0
    core_options: Mapping[str, Any] = field(default_factory=dict)

    def shard(self, x: Tensor) -> Tensor:
        """This rank's tokens of ``[s, ...]``."""
        return x if self.layout is None else self.layout.shard(x, self.rank)


class RingCore:
    """``ring_attention`` over a group as the core of an attention layer. Its copy is itself: over the same ranks."""

    def __init__(self, group: ProcessGroup, layout: Layout, algorithm: Algorithm) -> None:
        self.group, self.layout, self.algorithm = group, layout, algorithm

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        dropout_p: float = 0.0,
        first_head: int = 0,
        length: int | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        return ring_attention(
            q, k, v, group=self.group, layout=self.layout, algorithm=self.algorithm, causal=causal, scale=scale,
            window=window, dropout_p=dropout_p, first_head=first_head, length=length, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> "RingCore":
        return self


class Context:
    """The ranks that share each sequence; nothing but the default core for one rank."""

    def __init__(self, layer: str, mesh: DeviceMesh | None, layout: Layout, algorithm: Algorithm) -> None:
        mesh = check_mesh(layer, mesh)
        self.kind = SequenceLayout(1, 1, layout).kind  # checked here, not at the first forward
        self.group: ProcessGroup | None = None if mesh is None else mesh.get_group()
        self.ranks, self.rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        self.core: CoreAttention | None = None
        if mesh is not None:
            assert self.group is not None
            self.core = RingCore(self.group, layout, algorithm)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Context":
        """Itself: a copy of a model is over the same ranks."""
        return self

    def lengths(self, s: int) -> tuple[int, ...]:
        """How many of ``s`` tokens each rank has."""
        return SequenceLayout(s, self.ranks, self.kind).lengths

    def place(self, s: int, *, whole: bool, device: torch.device) -> Place:
        """This rank's, in sequences of ``s`` tokens, or of which it was given ``s`` (as every rank was)."""
        if self.ranks == 1:
            return Place()
        layout = SequenceLayout(s if whole else s * self.ranks, self.ranks, self.kind)
        return Place(
            layout,
            self.rank,
            layout.positions(self.rank, device=device),
            sum(layout.lengths[: self.rank]),
            {"length": layout.length},
        )

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """The mean over ``count`` tokens, 0 if there are none, from the sum over this rank's; its gradient is ``ranks``
        times this rank's part, so that the mean over the ranks is that of the mean."""
        assert self.group is not None
        own = total * (self.ranks / count.clamp(min=1))
        everyone = _primitives.all_reduce(own.detach(), True, self.group.group_name, "mean loss") / self.ranks
        return everyone + (own - own.detach())
