"""Context parallelism of a model: the tokens of each rank, and the mean loss over the ranks."""

import copy
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parallel_ops._internal.distributed.groups import group_device
from parallel_ops.comm import primitives
from parallel_ops.context_parallel import SequenceLayout, ring_attention
from parallel_ops.context_parallel.algorithm import link_of, ranks_per_node
from parallel_ops.context_parallel.batch_layout import Heads, layout_for
from parallel_ops.context_parallel.calls import AlgorithmName
from parallel_ops.context_parallel.layouts import LayoutChoice
from parallel_ops.context_parallel.token_ranges import lengths
from parallel_ops.layers.core_attention import CoreAttention
from parallel_ops.layers.parameters import check_mesh

# Target of a token that has no loss, as in ``F.cross_entropy``.
IGNORE_INDEX = -100


@dataclass(frozen=True)
class SequenceShard:
    """Places of this rank's tokens in the sequence.

    Attributes:
        layout: how the sequence is split; ``None`` for one rank. rank: this rank in it.
        positions: positions of this rank's tokens; ``None`` for 0 to s - 1. Dropout draws by them.
        core_options: further arguments of the core attention.
    """

    layout: SequenceLayout | None = None
    rank: int = 0
    positions: Tensor | None = None
    core_options: Mapping[str, Any] = field(default_factory=dict)

    def shard(self, x: Tensor) -> Tensor:
        """This rank's tokens of ``[s, ...]``."""
        return x if self.layout is None else self.layout.shard(x, self.rank)


class RingCoreAttention(functools.partial[Tensor]):
    """``ring_attention`` over a group as the core attention of a layer. Deep copies are the same object, since groups
    cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "RingCoreAttention":
        return self


class Context:
    """The ranks that share each sequence.

    Args:
        windows: the window of each layer, for the balanced layout, which all layers share.
        parts: other groups of this rank, by size, for ``over``.
        heads: number of heads on a rank, and their width, for the layout ``"auto"``.

    Attributes:
        group, ranks, rank: the process group (``None`` for one rank), its size, and this rank in it.
        core_attention: ring attention over the group; ``None`` for one rank.
    """

    def __init__(
        self, layer: str, mesh: DeviceMesh | None, cp_layout: LayoutChoice, algorithm: AlgorithmName,
        windows: Sequence[int | None] = (None,), parts: Mapping[int, ProcessGroup | None] | None = None,
        heads: Heads | None = None,
    ) -> None:  # fmt: skip
        mesh = check_mesh(layer, mesh)
        layout_for(1, 1, cp_layout)  # raises here, not at the first forward
        self.layer, self.cp_layout = layer, cp_layout
        self._cuts = tuple((None if w is None else w - 1, 0, n) for w, n in Counter(windows).items())
        self.group: ProcessGroup | None = None if mesh is None else mesh.get_group()
        self.ranks, self.rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        self.core_attention: CoreAttention | None = None
        self._options: dict[str, Any] = {}
        self._heads = heads or Heads()
        self._parts: dict[int, Context] = {}
        if mesh is not None or parts is not None:
            # Calls over several ranks name their layout; what a rank alone has is never "auto".
            named = "balanced" if cp_layout == "auto" else cp_layout
            self.core_attention = RingCoreAttention(
                ring_attention, group=self.group, cp_layout=named, algorithm=algorithm
            )

        for size, group in (parts or {}).items():
            part = self._parts[size] = copy.copy(self)
            part.group, part.ranks, part.rank = group, size, 0 if group is None else group.rank()
            # Rows have documents of any length.
            part.cp_layout, part._options = "auto", {"group": group}

    def over(self, ranks: int | None) -> "Context":
        """The context of ``ranks`` neighbours, or with ``None`` this one.

        Raises:
            ValueError: there is no such group.
        """
        if ranks is None:
            return self
        if ranks not in self._parts:
            sizes = ", ".join(map(str, self._parts)) or "none without groups by length"
            raise ValueError(f"{self.layer}: cp_ranks must be one of {sizes}, got {ranks}")
        return self._parts[ranks]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Context":
        """The same object: a copy of a model is over the same ranks."""
        return self

    def lengths(self, s: int) -> tuple[int, ...]:
        """Number of tokens of each rank, of ``s`` in all; with ``"auto"`` in another order if ranks differ."""
        return lengths("balanced" if self.cp_layout == "auto" else self.cp_layout, s, self.ranks)

    def layout(self, s: int, cu_seqlens: Tensor | None = None) -> SequenceLayout:
        """The layout of sequences of ``s`` tokens in all, with documents that start at ``cu_seqlens``."""
        heads = self._heads
        if self.group is not None:
            link = link_of(group_device(self.group), torch.bfloat16, self.group)
            heads = heads._replace(link=link, ranks_per_node=ranks_per_node(self.group))
        return layout_for(s, self.ranks, self.cp_layout, self._cuts, cu_seqlens=cu_seqlens, heads=heads, op=self.layer)

    def place(
        self, s: int, *, whole: bool, device: torch.device, cu_seqlens: Tensor | None = None,
        layout: SequenceLayout | None = None,
    ) -> SequenceShard:  # fmt: skip
        """The places of this rank's tokens.

        Args:
            s: tokens of the whole sequence with ``whole``; otherwise the tokens of this rank, the same on every rank.
            device: of the positions.
            layout: what ``layout`` returned for this sequence, if it was made ahead.
        """
        if self.ranks == 1:
            return SequenceShard(core_options=self._options)
        length = s if whole else s * self.ranks
        if layout is None:
            layout = self.layout(length, cu_seqlens)
        elif (layout.length, layout.ranks) != (length, self.ranks):
            raise ValueError(
                f"{self.layer}: layout must be of {length} tokens over {self.ranks} ranks, got one of {layout.length} "
                f"over {layout.ranks}"
            )
        options = self._options | {"length": length}
        if self.cp_layout in ("balanced", "auto"):
            options["cp_layout"] = layout
        return SequenceShard(layout, self.rank, layout.positions(self.rank, device=device), options)

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """``total`` of all ranks by ``count``, 0 if that is none.

        Its gradient is ``ranks`` times this rank's part: averaged over the ranks, as FSDP does, it is the gradient of
        the mean.

        Args:
            total: sum over this rank's tokens. count: number of tokens of all ranks.
        """
        if self.group is None:
            return total / count.clamp(min=1)
        local = total * (self.ranks / count.clamp(min=1))
        mean = primitives.all_reduce(local.detach(), True, self.group.group_name, "mean loss") / self.ranks
        return mean + (local - local.detach())
