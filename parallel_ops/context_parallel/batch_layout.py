"""The layout of a batch: of a name, of the documents in it or of ranges, made once for all layers."""

import functools
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from parallel_ops.context_parallel.cost import Link
from parallel_ops.context_parallel.counts import AttentionShape
from parallel_ops.context_parallel.layouts import SequenceLayout
from parallel_ops.context_parallel.selection import select_layout
from parallel_ops.context_parallel.token_ranges import documents_error
from parallel_ops.ops.attention.cache import on_host, once

# Keys before and after a query's own place that it sees, ``None`` for all; and the number of layers.
Cut = tuple[int | None, int | None, int]


class Heads(NamedTuple):
    """Number of heads of an attention on a rank and their width, and the rates by which ``"auto"`` counts seconds."""

    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1
    link: Link | None = None
    ranks_per_node: int = 1


def layout_for(
    length: int, ranks: int, cp_layout: str, cuts: tuple[Cut, ...] = ((None, 0, 1),), *,
    cu_seqlens: Tensor | None = None, key_ranges: Tensor | None = None, heads: Heads | None = None, op: str = "layout",
) -> SequenceLayout:  # fmt: skip
    """The layout of this name. Values on a GPU are read once.

    Args:
        cuts: windows of the layers, for ``"balanced"`` and ``"auto"``.
        cu_seqlens, key_ranges: documents, or ranges of all queries; one sequence without either.
        heads: with its rates ``"auto"`` is the layout that takes the fewest seconds.

    Raises:
        ValueError: ``cu_seqlens`` does not rise from 0 to ``length``.
    """
    if ranks == 1 or cp_layout not in ("balanced", "auto"):
        return SequenceLayout(length, ranks, "zigzag" if cp_layout in ("balanced", "auto") else cp_layout)
    if key_ranges is None:
        bounds = (0, length) if cu_seqlens is None else tuple(on_host(cu_seqlens).tolist())
        if wrong := documents_error(bounds, length):
            raise ValueError(f"{op}: {wrong}")
        return _of_documents(tuple(end - start for start, end in pairwise(bounds)), ranks, cp_layout, cuts, heads)
    from parallel_ops.context_parallel.placement import balanced, cut  # needs numpy

    host, weights = on_host(key_ranges), [count for *_, count in cuts]

    def placed() -> SequenceLayout:
        masks = [cut(host.numpy(), left, right) for left, right, _ in cuts]
        return SequenceLayout(length, ranks, balanced(masks, ranks, weights=weights))

    return once(host, ("layout", ranks, cuts), placed)


@functools.lru_cache(maxsize=64)
def _of_documents(
    documents: tuple[int, ...], ranks: int, cp_layout: str, cuts: tuple[Cut, ...], heads: Heads | None = None
) -> SequenceLayout:
    """The balanced layout of documents of these lengths, or with ``"auto"`` the fastest, without rates the one that
    shares them evenly and sends least then: by counts, so the same on all ranks."""
    if cp_layout == "auto":
        heads = heads or Heads()
        kinds = [
            (count, AttentionShape(
                length=sum(documents), ranks=ranks, batch=1, heads=heads.heads, kv_heads=heads.kv_heads,
                head_dim=heads.head_dim, itemsize=2, causal=right == 0, documents=documents,
                window_size=(-1 if left is None else left, -1 if right is None else right),
                ranks_per_node=heads.ranks_per_node,
            ))
            for left, right, count in cuts
        ]  # fmt: skip
        return SequenceLayout(sum(documents), ranks, select_layout(kinds, None, heads.link).cp_layout)
    from parallel_ops.context_parallel.placement import balanced, ranges_of  # needs numpy

    masks = [ranges_of(documents, left, right) for left, right, _ in cuts]
    return SequenceLayout(sum(documents), ranks, balanced(masks, ranks, weights=[count for *_, count in cuts]))
