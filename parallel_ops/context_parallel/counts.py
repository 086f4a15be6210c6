"""Counts of an attention that ranks share: visible pairs of a rank, and the keys that ranks send, by token ranges.

With lengths of documents they are those of the documents, which ``placement`` counts; where the device alone knows the
lengths, those of one sequence. No torch: the planner uses it too.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.context_parallel.token_ranges import (
    LAYOUTS,
    count_tokens,
    layout_of,
    ranks_on_nodes,
    ring_ranks,
    shard_ranges,
    visible_keys,
)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """An attention over a sequence that ``ranks`` ranks share.

    Args:
        length: tokens of the whole sequence. itemsize: bytes of an element of q, k and v.
        window_size: as in ``flash_attention``.
        documents: lengths of packed documents, inside of which attention stays; ``True`` if they are not known here.
        ranks_per_node: adjacent ranks that share a faster link, by which keys are handed on; 1 for none.

    Raises:
        ValueError: the documents do not make up the sequence.
    """

    length: int
    ranks: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    cp_layout: str = "zigzag"
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    documents: tuple[int, ...] | bool = False
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        found = self.documents
        if isinstance(found, tuple) and (sum(found) != self.length or min(found, default=0) < 0):
            raise ValueError(
                f"AttentionShape: documents must be lengths of {self.length} tokens in all, got {sum(found)}"
            )

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """Keys before and after a query's own place that it sees; ``None`` for all."""
        left, right = (None if n < 0 else n for n in self.window_size)
        return left, 0 if self.causal else right


class Keys(NamedTuple):
    """Keys that a rank sends, or passes on, in a step of a ring, and those that it receives."""

    leaving: int
    arriving: int


@functools.lru_cache(maxsize=256)
def hops(shape: AttentionShape, ulysses_degree: int) -> list[list[tuple[Keys, Keys]]]:
    """For each rank of a ring its steps: keys between nodes, and inside of its own."""
    size = shape.ranks // ulysses_degree
    m = ranks_on_nodes(ring_ranks(shape.cp_layout, shape.ranks, 0, ulysses_degree), shape.ranks_per_node)
    rows, to_nodes = (key_rows(shape, ulysses_degree, n) for n in (1, m))

    def step(at: int, k: int) -> tuple[Keys, Keys]:
        node, before, after = at // m, (at - k * m) % size, (at + k * m) % size
        others = [rank for rank in range(node * m, (node + 1) * m) if rank != at]
        handed = Keys(sum(rows[before][o] for o in others), sum(rows[(o - k * m) % size][at] for o in others))
        return Keys(to_nodes[at][after // m], to_nodes[before][node]), handed

    return [[step(at, k) for k in range(size // m)] for at in range(size)]


@functools.lru_cache(maxsize=256)
def counts(shape: AttentionShape, ulysses_degree: int) -> tuple[list[float], list[list[int]]]:
    """Visible pairs of the queries of each rank and its ``ulysses_ranks`` together, and the keys ``[source][target]``
    that such queries see of others."""
    if isinstance(shape.documents, tuple):
        from parallel_ops.context_parallel.placement import area  # needs NumPy

        areas: list[float] = area(*_documents(shape, ulysses_degree)).tolist()
    else:
        areas = [_pairs(shard, shape) for shard in _shards(shape, ulysses_degree)]
    return areas, key_rows(shape, ulysses_degree, 1)


@functools.lru_cache(maxsize=256)
def key_rows(shape: AttentionShape, ulysses_degree: int, per_node: int) -> list[list[int]]:
    """Keys ``[source][node]`` that any query of a node's ``per_node`` ranks sees; none of the source's own node."""
    counted = isinstance(shape.documents, tuple)
    if counted and shape.cp_layout != "striped":
        from parallel_ops.context_parallel.placement import rows_sent  # needs NumPy

        found: list[list[int]] = rows_sent(*_documents(shape, ulysses_degree), per_node).tolist()
        return found
    # In a striped layout each document that is longer than the ranks needs all of its keys.
    bounds, shards = (None, None) if counted else shape.bounds, _shards(shape, ulysses_degree)
    nodes = [sum(shards[i : i + per_node], ()) for i in range(0, len(shards), per_node)]
    return [
        [0 if i // per_node == j else count_tokens(visible_keys(keys, nodes[j], *bounds)) for j in range(len(nodes))]
        for i, keys in enumerate(shards)
    ]


def _shards(shape: AttentionShape, ulysses_degree: int) -> list[tuple[TokenRange, ...]]:
    """The tokens of each rank and its ``ulysses_ranks`` together."""
    first = 1 if shape.cp_layout == "striped" else ulysses_degree
    return [
        shard_ranges(shape.cp_layout, shape.length, shape.ranks, i * first, ulysses_degree)
        for i in range(shape.ranks // ulysses_degree)
    ]


@functools.lru_cache(maxsize=256)
def _documents(shape: AttentionShape, ulysses_degree: int) -> tuple[Any, str, int]:
    """Ranges of the documents, and layout and number of ranks that share heads and tokens as one."""
    from parallel_ops.context_parallel.placement import ranges_of  # needs NumPy

    layout = shape.cp_layout
    if layout not in LAYOUTS:
        layout = layout_of([int(owner) // ulysses_degree for owner in layout.split(",")])
    return ranges_of(shape.documents, *shape.bounds), layout, shape.ranks // ulysses_degree


def _pairs(shard: Sequence[TokenRange], shape: AttentionShape) -> float:
    """The number of (query, key) pairs to compute for a shard's queries."""
    left, right = shape.bounds
    widest = shape.length if left is None else left + 1
    if right != 0:
        return count_tokens(shard) * min(shape.length, widest + (shape.length if right is None else right))
    total = 0
    for part in shard:
        # Query p sees min(p + 1, widest) keys.
        growing = min(part.length, max(0, -(-(widest - part.start) // part.step)))
        total += growing * (part.start + 1) + part.step * growing * (growing - 1) // 2
        total += (part.length - growing) * widest
    return total
