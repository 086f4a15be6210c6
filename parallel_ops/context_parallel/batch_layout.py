"""The layout of a batch: of a name, of the documents in it or of ranges, made once for all layers."""

import functools
from itertools import pairwise

from torch import Tensor

from parallel_ops.context_parallel.cost import AttentionShape
from parallel_ops.context_parallel.layouts import SequenceLayout
from parallel_ops.context_parallel.selection import select_layout
from parallel_ops.ops.attention.cache import on_host, once

# Keys before and after a query's own place that it sees, ``None`` for all; and the number of layers.
Cut = tuple[int | None, int | None, int]


def layout_for(
    length: int, ranks: int, cp_layout: str, ranges: Tensor | None = None, cuts: tuple[Cut, ...] = ((None, 0, 1),)
) -> SequenceLayout:
    """The layout of this name.

    Args:
        ranges: of all queries, on any device, cut further by each of ``cuts``, for ``"balanced"``; ``None`` for one
            document.
    """
    if ranks == 1 or cp_layout not in ("balanced", "auto"):
        return SequenceLayout(length, ranks, "zigzag" if cp_layout in ("balanced", "auto") else cp_layout)
    if ranges is None:
        return _of_documents((length,), ranks, cp_layout, cuts)
    from parallel_ops.context_parallel.placement import balanced, cut  # needs numpy

    host, weights = on_host(ranges), [count for *_, count in cuts]

    def placed() -> SequenceLayout:
        masks = [cut(host.numpy(), left, right) for left, right, _ in cuts]
        return SequenceLayout(length, ranks, balanced(masks, ranks, weights=weights))

    return once(host, ("layout", ranks, cuts), placed)


def document_layout(
    op: str, length: int, ranks: int, cp_layout: str, cu_seqlens: Tensor | None, cuts: tuple[Cut, ...]
) -> SequenceLayout:
    """``layout_for`` packed documents; values on a GPU are read once.

    Raises:
        ValueError: ``cu_seqlens`` does not rise from 0 to ``length``.
    """
    if cu_seqlens is None or ranks == 1 or cp_layout not in ("balanced", "auto"):
        return layout_for(length, ranks, cp_layout, cuts=cuts)
    bounds = tuple(on_host(cu_seqlens).tolist())
    if wrong := documents_error(bounds, length):
        raise ValueError(f"{op}: {wrong}")
    return _of_documents(tuple(end - start for start, end in pairwise(bounds)), ranks, cp_layout, cuts)


def documents_error(bounds: tuple[int, ...], length: int) -> str | None:
    """The reason why documents cannot start at these tokens, or ``None``."""
    if len(bounds) > 1 and bounds[0] == 0 and bounds[-1] == length and sorted(bounds) == list(bounds):
        return None
    return f"cu_seqlens must rise from 0 to {length}, the tokens of all ranks, got {bounds}"


@functools.lru_cache(maxsize=64)
def _of_documents(documents: tuple[int, ...], ranks: int, cp_layout: str, cuts: tuple[Cut, ...]) -> SequenceLayout:
    """The balanced layout of documents of these lengths, or with ``"auto"`` the one that shares them evenly and sends
    least then: by counts, so the same on all ranks."""
    if cp_layout == "auto":
        kinds = [
            (count, AttentionShape(
                length=sum(documents), ranks=ranks, batch=1, heads=1, kv_heads=1, head_dim=1, itemsize=2,
                causal=right == 0, documents=documents,
                window_size=(-1 if left is None else left, -1 if right is None else right),
            ))
            for left, right, count in cuts
        ]  # fmt: skip
        return SequenceLayout(sum(documents), ranks, select_layout(kinds, None, None).cp_layout)
    from parallel_ops.context_parallel.placement import balanced, ranges_of  # needs numpy

    masks = [ranges_of(documents, left, right) for left, right, _ in cuts]
    return SequenceLayout(sum(documents), ranks, balanced(masks, ranks, weights=[count for *_, count in cuts]))
