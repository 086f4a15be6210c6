"""Attention of one rank's queries over the keys that it has received, as calls of the block op."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.context_parallel.token_ranges import count_tokens, visible_keys
from parallel_ops.ops.attention.block import Dropout, begin_carry, block_attention, block_attention_backward
from parallel_ops.ops.attention.cache import once
from parallel_ops.ops.attention.options import AttentionOptions
from parallel_ops.ops.attention.ranges import MaskBounds, attention_bounds, in_order, range_bounds


@dataclass(frozen=True)
class _Block:
    """A call of the block op: slices of the queries and of the keys, and the indices of the queries' token ranges."""

    rows: slice
    columns: slice
    mask: MaskBounds
    dropout: Dropout | None
    ranges: range


def _blocks(
    queries: Sequence[TokenRange], keys: Sequence[TokenRange], options: AttentionOptions, from_keys: bool = False
) -> list[_Block]:
    """The fewest calls that cover the keys visible to the queries. ``from_keys``: see ``range_bounds``."""
    left, right, ranges, seed = options.left, options.right, options.key_ranges, options.dropout_seed
    if not queries or not keys:
        return []
    row_edges, column_edges = ([0, *accumulate(part.length for part in side)] for side in (queries, keys))
    plain = seed is None and ranges is None
    if plain and right == 0 and left is None and tuple(queries) == tuple(keys):
        # Queries and keys have the order of the sequence, so the mask is causal in indices too.
        n = row_edges[-1]
        return [_Block(slice(0, n), slice(0, n), MaskBounds(right=0), None, range(len(queries)))]
    if ranges is not None and seed is None and in_order(keys):
        # Spans can describe any mask between shards in the order of the sequence.
        def one() -> list[_Block]:
            limits = options.limits(tuple(queries)) if ranges.is_cpu else None
            see = [
                i for i, q in enumerate(queries)
                if visible_keys(tuple(keys), (q,), left, right, None if limits is None else limits[i : i + 1])
            ]  # fmt: skip
            if not see:
                return []
            seeing = range(see[0], see[-1] + 1)
            rows, columns = slice(row_edges[seeing.start], row_edges[seeing.stop]), slice(0, column_edges[-1])
            own = queries[seeing.start : seeing.stop]
            mask = range_bounds(own, keys, left, right, ranges, from_keys=from_keys)
            return [_Block(rows, columns, mask, None, seeing)]

        return once(ranges, ("blocks", tuple(queries), tuple(keys), left, right, from_keys), one)
    blocks = []
    for i, q in enumerate(queries):
        for j, k in enumerate(keys):
            mask = attention_bounds(q, k, left=left, right=right, ranges=ranges, from_keys=from_keys)
            if mask is not None:
                rows, columns = (slice(edges[n], edges[n + 1]) for edges, n in ((row_edges, i), (column_edges, j)))
                dropout = None if seed is None else Dropout(options.dropout_p, seed, q, k, options.first_head)
                blocks.append(_Block(rows, columns, mask, dropout, range(i, i + 1)))
    if len(blocks) > 1 and plain and all(block.mask == MaskBounds() for block in blocks):
        first, last = blocks[0], blocks[-1]
        rows, columns = slice(first.rows.start, last.rows.stop), slice(first.columns.start, last.columns.stop)
        covered = sum((b.rows.stop - b.rows.start) * (b.columns.stop - b.columns.start) for b in blocks)
        if covered == (rows.stop - rows.start) * (columns.stop - columns.start):
            return [_Block(rows, columns, MaskBounds(), None, range(first.ranges.start, last.ranges.stop))]
    return blocks


def pack_keys(k: Tensor, v: Tensor) -> Tensor:
    """k ``[s, b, kv_heads, d]`` and v ``[s, b, kv_heads, d_v]`` in one tensor ``[s, b, kv_heads, d + d_v]``."""
    return torch.cat([k, v], dim=3)


def unpack_keys(kv: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """k and v, or their gradients, as views."""
    return kv[..., :d], kv[..., d:]


class SoftmaxAccumulator:
    """The running result of queries ``[s, b, h, d]``: O, M and Z of the block op, in fp32 (fp64 for fp64).

    Args:
        d_v: the width of values.
        options: with these heads' sinks, which are part of every query's initial value.
    """

    def __init__(self, q: Tensor, d_v: int, ranges: Sequence[TokenRange], options: AttentionOptions) -> None:
        s, b, h, _ = q.shape
        self._q, self._ranges, self._options = q, ranges, options
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.out = q.new_empty((s, b, h, d_v), dtype=dtype)
        self.statistics = q.new_empty((2, b, h, s), dtype=dtype)
        self._begun = [options.sink is not None] * len(ranges)
        if options.sink is not None:
            begin_carry(self.out, self.statistics, options.sink)

    def add(self, kv: Tensor, keys: Sequence[TokenRange]) -> None:
        """Merges the attention over those of these keys, of ``pack_keys``, that are visible."""
        o, (k, v) = self._options, unpack_keys(kv, self._q.shape[3])
        for block in _blocks(self._ranges, keys, o):
            rows, columns = block.rows, block.columns
            block_attention(
                self._q[rows],
                k[columns],
                v[columns],
                block.mask,
                o,
                dropout=block.dropout,
                out=self.out[rows],
                statistics=self.statistics[..., rows],
                merge=self._begun[block.ranges.start],
            )
            for i in block.ranges:
                self._begun[i] = True

    def finish(self) -> None:
        """Writes the result of queries that saw no key."""
        for own in _unseen(self._ranges, self._begun):
            begin_carry(self.out[own], self.statistics[..., own], None)


class Gradients:
    """The gradients of queries, summed over blocks of keys, and those of each block of keys.

    Args:
        out: the final output of the queries, if it is here: torch's kernels need it.
    """

    def __init__(
        self, grad: Tensor, q: Tensor, rows: Tensor, ranges: Sequence[TokenRange], options: AttentionOptions,
        out: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._grad, self._q, self._rows, self._ranges, self._options = grad, q, rows, ranges, options
        self._out = out
        self.dq = q.new_empty(q.shape, dtype=rows.dtype)
        self._begun = [False] * len(ranges)

    def add(self, kv: Tensor, keys: Sequence[TokenRange]) -> Tensor:
        """Adds the contribution of these keys to dq; returns these queries' share of dk and dv, packed as ``kv`` is."""
        o, blocks = self._options, _blocks(self._ranges, keys, self._options, from_keys=kv.is_cuda)
        d = self._q.shape[3]
        k, v = unpack_keys(kv, d)
        shares = kv.new_empty(kv.shape, dtype=self.dq.dtype)
        alone = len(blocks) == 1 and blocks[0].columns == slice(0, count_tokens(keys))
        if not alone:
            shares.zero_()
        for block in blocks:
            rows, columns = block.rows, block.columns
            share = shares[columns] if alone else torch.empty_like(shares[columns])
            dk, dv = unpack_keys(share, d)
            block_attention_backward(
                self._grad[rows],
                self._q[rows],
                k[columns],
                v[columns],
                self._rows[..., rows],
                block.mask,
                o,
                dropout=block.dropout,
                dq=self.dq[rows],
                dk=dk,
                dv=dv,
                accumulate_dq=self._begun[block.ranges.start],
                out=None if self._out is None else self._out[rows],
            )
            if not alone:
                shares[columns] += share
            for i in block.ranges:
                self._begun[i] = True
        return shares

    def finish(self) -> None:
        """Writes zeros for queries that saw no key."""
        for own in _unseen(self._ranges, self._begun):
            self.dq[own].zero_()


def _unseen(ranges: Sequence[TokenRange], begun: Sequence[bool]) -> Iterator[slice]:
    """The rows of the token ranges that no block has begun."""
    edges = [0, *accumulate(part.length for part in ranges)]
    return (slice(*edge) for edge, done in zip(pairwise(edges), begun, strict=True) if not done)
