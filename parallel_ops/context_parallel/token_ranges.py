"""Which tokens of a sequence a rank has, and which of them the queries of another rank see. Integers alone: no torch.

    contiguous   rank r has one range of adjacent tokens
    zigzag       the sequence is cut in 2 P chunks; rank r has chunks r and 2 P - 1 - r, which balances every step of a
                 ring under a causal mask
    striped      token i is on rank i mod P
    balanced     the sequence is cut in many equal chunks, of whose ranks ``placement.balanced`` makes the layout's
                 name, such as "0,1,1,0"; the tokens after the last chunk, fewer than chunks, are shared out at the end

Lengths need not divide: chunks differ by one token at most, and with fewer tokens than ranks some ranks have none. A
rank keeps its tokens in the order of the sequence. Sources: Liu et al., arXiv:2310.01889 (ring); Brandon et al.,
arXiv:2311.09431 (striped).

The ``ulysses_degree`` ranks that exchange heads for tokens see the union of their tokens: a shard of the same layout
over ``ranks / ulysses_degree``. They have adjacent numbers, as the GPUs of a node have. In the striped layout they are
every ``ranks / ulysses_degree``-th rank, since that makes the union striped too.
"""

import functools
from collections.abc import Sequence

from parallel_ops._internal.token_range import TokenRange, rises

LAYOUTS = ("zigzag", "striped", "contiguous")
# Chunks of a rank in the finest balanced layout: 32 balance one document of 100K tokens among small ones, 64 ranks.
_MOST_CHUNKS = 32


@functools.lru_cache(maxsize=4096)
def shard_ranges(layout: str, length: int, ranks: int, rank: int, ulysses_degree: int = 1) -> tuple[TokenRange, ...]:
    """The tokens of ``rank`` among the sequence's ``length``; those of all its ``ulysses_ranks`` if there are more."""
    members = ulysses_ranks(layout, ranks, rank, ulysses_degree)
    if layout == "striped":
        step, first = ranks // ulysses_degree, members[0]
        found = [TokenRange(first, -(-(length - first) // step), step)]
    elif layout not in LAYOUTS:
        starts, owners = chunks_of(layout, length, ranks)
        own = [TokenRange(starts[i], starts[i + 1] - starts[i]) for i, owner in enumerate(owners) if owner in members]
        found = list(merged([part for part in own if part.length]))
    else:
        chunks, low, high = (ranks, members[0], members[-1] + 1)
        spans = [(low, high)]
        if layout == "zigzag":
            chunks = 2 * ranks
            spans.append((chunks - high, chunks - low))
        edges = [(_chunk_start(length, chunks, first), _chunk_start(length, chunks, end)) for first, end in spans]
        if len(edges) == 2 and edges[0][1] == edges[1][0]:
            edges = [(edges[0][0], edges[1][1])]
        found = [TokenRange(first, end - first) for first, end in edges]
    return tuple(part for part in found if part.length > 0)


@functools.lru_cache(maxsize=64)
def chunks_of(layout: str, length: int, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Starts of the chunks of a layout that is not striped, and the sequence's end; the rank of each chunk."""
    if layout in LAYOUTS:
        owners = tuple(range(ranks)) + (tuple(reversed(range(ranks))) if layout == "zigzag" else ())
        return tuple(_chunk_start(length, len(owners), i) for i in range(len(owners) + 1)), owners
    owners = tuple(map(int, layout.split(",")))
    cut = length // len(owners) * len(owners)
    rest = [cut + _chunk_start(length - cut, ranks, rank) for rank in range(ranks + 1)]
    starts = range(0, cut, max(1, length // len(owners)))
    return (*starts, *rest), owners[: len(starts)] + tuple(range(ranks))


def layout_of(owners: Sequence[int]) -> str:
    """The layout whose chunks have these ranks."""
    return ",".join(map(str, owners))


def layout_name(layout: str, op: str = "SequenceLayout") -> str:
    """The kind of a layout: ``"balanced"`` for one that is named by the ranks of its chunks.

    Raises:
        ValueError: there is no such layout.
    """
    if layout in LAYOUTS:
        return layout
    if layout != "balanced" and not layout.replace(",", "").isdecimal():
        raise ValueError(f"{op}: cp_layout must be one of {', '.join(LAYOUTS)}, balanced, got {layout!r}")
    return "balanced"


def balanced_chunks(length: int, ranks: int) -> int:
    """The number of chunks of a balanced layout: ``_MOST_CHUNKS`` a rank if a chunk has a token."""
    chunks = ranks * _MOST_CHUNKS
    while chunks > max(length, ranks):
        chunks //= 2
    return chunks


def _chunk_start(length: int, chunks: int, chunk: int) -> int:
    """The first token of a chunk; the first chunks have one token more if the length does not divide."""
    return chunk * (length // chunks) + min(chunk, length % chunks)


def ulysses_ranks(layout: str, ranks: int, rank: int, ulysses_degree: int) -> tuple[int, ...]:
    """The ranks that share the heads with ``rank``, itself included."""
    ring_degree = ranks // ulysses_degree
    if layout == "striped":
        return tuple(range(rank % ring_degree, ranks, ring_degree))
    first = rank // ulysses_degree * ulysses_degree
    return tuple(range(first, first + ulysses_degree))


def ring_ranks(layout: str, ranks: int, rank: int, ulysses_degree: int) -> tuple[int, ...]:
    """The ranks that have the same heads as ``rank``, itself included, in the order of the ring."""
    ring_degree = ranks // ulysses_degree
    if layout == "striped":
        first = rank // ring_degree * ring_degree
        return tuple(range(first, first + ring_degree))
    return tuple(range(rank % ulysses_degree, ranks, ulysses_degree))


def ranks_on_nodes(ranks: Sequence[int], ranks_per_node: int) -> int:
    """How many of these ranks each node has: those of a node adjacent here. 1 if nodes differ, or there is only one."""
    nodes = [rank // ranks_per_node for rank in ranks]
    m = nodes.count(nodes[0])
    adjacent = [node for node in dict.fromkeys(nodes) for _ in range(m)]
    return m if adjacent == nodes and m < len(nodes) else 1


def lengths(layout: str, length: int, ranks: int) -> tuple[int, ...]:
    """The number of tokens on each rank, which is the same for all balanced layouts."""
    if layout_name(layout) == "balanced":
        layout = layout_of(range(ranks))
    return tuple(count_tokens(shard_ranges(layout, length, ranks, rank)) for rank in range(ranks))


def documents_error(bounds: tuple[int, ...], length: int) -> str | None:
    """The reason why documents cannot start at these tokens, or ``None``."""
    if len(bounds) > 1 and rises(bounds, length):
        return None
    return f"cu_seqlens must rise from 0 to {length}, the tokens of all ranks, got {bounds}"


def count_tokens(ranges: Sequence[TokenRange]) -> int:
    return sum(part.length for part in ranges)


def local_slice(part: TokenRange, shard: Sequence[TokenRange]) -> slice:
    """The indices of ``part``, which lies in one range of ``shard``, among the tokens of ``shard``."""
    offset = 0
    for whole in shard:
        if whole.start <= part.start <= whole.last and (part.start - whole.start) % whole.step == 0:
            first, step = offset + (part.start - whole.start) // whole.step, part.step // whole.step
            return slice(first, first + step * (part.length - 1) + 1, step)
        offset += whole.length
    raise ValueError(f"{part} is not in {shard}")


@functools.lru_cache(maxsize=4096)
def visible_keys(
    keys: tuple[TokenRange, ...], queries: tuple[TokenRange, ...], left: int | None, right: int | None,
    limits: tuple[tuple[int, int], ...] | None = None,
) -> tuple[TokenRange, ...]:  # fmt: skip
    """The keys visible to the queries: of each range the parts that any range of queries sees.

    Args:
        left, right: keys before and after a query's own place that it sees; ``None`` for all.
        limits: for each range of queries the first and the last key that any of them sees.
    """
    parts = []
    for k in keys:
        bounds = []
        for i, q in enumerate(queries):
            first, last = (k.start, k.last) if limits is None else limits[i]
            first = first if left is None else max(first, q.start - left)
            last = last if right is None else min(last, q.last + right)
            low = max(0, -((k.start - first) // k.step))
            high = min(k.length - 1, (last - k.start) // k.step)
            if low <= high:
                bounds.append((low, high))
        end = -1
        for low, high in sorted(bounds):
            if low > end + 1 or end < 0:
                parts.append(TokenRange(k.start + low * k.step, high - low + 1, k.step))
            elif high > end:
                parts[-1] = parts[-1]._replace(length=parts[-1].length + high - end)
            end = max(end, high)
    return tuple(parts)


def merged(ranges: Sequence[TokenRange]) -> tuple[TokenRange, ...]:
    """The fewest ranges of adjacent tokens in the order of the sequence; ranges with a step stay as they are."""
    if any(part.step != 1 for part in ranges):
        return tuple(ranges)
    out: list[TokenRange] = []
    for part in sorted(ranges):
        if out and out[-1].last + 1 == part.start:
            out[-1] = TokenRange(out[-1].start, out[-1].length + part.length)
        else:
            out.append(part)
    return tuple(out)
