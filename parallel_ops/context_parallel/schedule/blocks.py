"""Attention of the queries at hand over the keys at hand, as calls of the block op."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from parallel_ops.context_parallel.token_ranges import Run, seen, tokens
from parallel_ops.ops.attention.block import (
    Dropout,
    Tokens,
    Visible,
    begin_carry,
    block_attention,
    block_attention_backward,
    document_bounds,
    visible,
)


@dataclass(frozen=True)
class Options:
    """The options of the attention of one rank.

    Args:
        softcap, dropout_p: 0 for none. seed: one int64 element, with dropout.
        first_head: the first of this rank's query heads.
    """

    causal: bool
    window: int | None
    scale: float
    softcap: float
    dropout_p: float
    seed: Tensor | None
    cu_seqlens: Tensor | None
    first_head: int = 0

    def with_first_head(self, head: int) -> "Options":
        return replace(self, first_head=head)

    def dropout(self, queries: Run, keys: Run) -> Dropout | None:
        if self.seed is None:
            return None
        return Dropout(self.dropout_p, self.seed, Tokens(*queries), Tokens(*keys), self.first_head)


@dataclass(frozen=True)
class _Block:
    """A call of the block op: these rows of the queries, these of the keys; ``runs``: whose queries they are."""

    rows: slice
    columns: slice
    mask: Visible
    dropout: Dropout | None
    runs: range


def _blocks(queries: Sequence[Run], keys: Sequence[Run], options: Options, from_keys: bool = False) -> list[_Block]:
    """The calls that cover what the queries see of the keys, as few as can be. ``from_keys``: as of ``visible``."""
    o = options
    if not queries or not keys:
        return []
    row_edges, column_edges = ([0, *accumulate(run.length for run in side)] for side in (queries, keys))
    plain = o.seed is None and o.cu_seqlens is None
    if plain and o.causal and o.window is None and tuple(queries) == tuple(keys):
        # Both have the order of the sequence, so what comes later in one comes later in the other.
        n = row_edges[-1]
        return [_Block(slice(0, n), slice(0, n), Visible(right=0), None, range(len(queries)))]
    if o.cu_seqlens is not None and o.seed is None and all(a.last < b.start for a, b in pairwise(keys)):
        # Spans say what any shard sees of any other that has the order of the sequence.
        see = [i for i, q in enumerate(queries) if seen(tuple(keys), (q,), o.causal, o.window)]
        if not see:
            return []
        runs = range(see[0], see[-1] + 1)
        rows = slice(row_edges[runs.start], row_edges[runs.stop])
        columns = slice(0, column_edges[-1])
        mask = _within_documents(queries[runs.start : runs.stop], keys, o, from_keys)
        return [_Block(rows, columns, mask, None, runs)]
    blocks = []
    for i, q in enumerate(queries):
        for j, k in enumerate(keys):
            seeing = visible(Tokens(*q), Tokens(*k), causal=o.causal, window=o.window)
            if seeing is not None:
                mask = seeing if o.cu_seqlens is None else _within_documents((q,), (k,), o, from_keys)
                rows, columns = (slice(edges[n], edges[n + 1]) for edges, n in ((row_edges, i), (column_edges, j)))
                blocks.append(_Block(rows, columns, mask, o.dropout(q, k), range(i, i + 1)))
    if len(blocks) > 1 and plain and all(block.mask == Visible() for block in blocks):
        first, last = blocks[0], blocks[-1]
        rows, columns = slice(first.rows.start, last.rows.stop), slice(first.columns.start, last.columns.stop)
        covered = sum((b.rows.stop - b.rows.start) * (b.columns.stop - b.columns.start) for b in blocks)
        if covered == (rows.stop - rows.start) * (columns.stop - columns.start):
            return [_Block(rows, columns, Visible(), None, range(first.runs.start, last.runs.stop))]
    return blocks


def _within_documents(queries: Sequence[Run], keys: Sequence[Run], options: Options, from_keys: bool) -> Visible:
    """What tokens see of their own document, from places that both have in the order of the sequence."""
    o = options
    assert o.cu_seqlens is not None
    places = [
        torch.cat([run.start + run.step * torch.arange(run.length, device=o.cu_seqlens.device) for run in side])
        for side in (queries, keys)
    ]
    before, after = o.window, 1 if o.causal else None
    bounds = document_bounds(places[0], o.cu_seqlens, before, after)
    spans, query_spans = torch.searchsorted(places[1], bounds, out_int32=True), None
    if from_keys:
        bounds = document_bounds(places[1], o.cu_seqlens, after, before)
        query_spans = torch.searchsorted(places[0], bounds, out_int32=True)
    return Visible(spans=spans, query_spans=query_spans)


class SoftmaxAccumulator:
    """The running result of queries ``[s, b, h, d]``: O, M and Z of the block op, in fp32 (fp64 for fp64).

    Args:
        sink: ``[h]``, a logit that every query starts with.
    """

    def __init__(self, q: Tensor, runs: Sequence[Run], sink: Tensor | None, options: Options) -> None:
        s, b, h, _ = q.shape
        self._q, self._runs, self._options = q, runs, options
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.out = q.new_empty(q.shape, dtype=dtype)
        self.statistics = q.new_empty((2, b, h, s), dtype=dtype)
        self._begun = [sink is not None] * len(runs)
        if sink is not None:
            begin_carry(self.out, self.statistics, sink)

    def add(self, k: Tensor, v: Tensor, keys: Sequence[Run]) -> None:
        """Merges what the queries see of these keys."""
        o = self._options
        for block in _blocks(self._runs, keys, o):
            rows, columns = block.rows, block.columns
            block_attention(
                self._q[rows],
                k[columns],
                v[columns],
                block.mask,
                scale=o.scale,
                softcap=o.softcap,
                dropout=block.dropout,
                out=self.out[rows],
                statistics=self.statistics[..., rows],
                merge=self._begun[block.runs.start],
            )
            for i in block.runs:
                self._begun[i] = True

    def finish(self) -> None:
        """Queries that saw no key get their result."""
        offset = 0
        for run, begun in zip(self._runs, self._begun, strict=True):
            if not begun:
                own = slice(offset, offset + run.length)
                begin_carry(self.out[own], self.statistics[..., own], None)
            offset += run.length


class Gradients:
    """The gradients of queries, summed over the keys that they saw, and of keys, block by block."""

    def __init__(self, grad: Tensor, q: Tensor, rows: Tensor, runs: Sequence[Run], options: Options) -> None:
        self._grad, self._q, self._rows, self._runs, self._options = grad, q, rows, runs, options
        self.dq = q.new_empty(q.shape, dtype=rows.dtype)
        self._begun = [False] * len(runs)

    def add(self, k: Tensor, v: Tensor, keys: Sequence[Run]) -> Tensor:
        """Adds to dq what these keys give; ``[2, *k.shape]``: the share of these queries in dk and dv."""
        o, blocks = self._options, _blocks(self._runs, keys, self._options, from_keys=k.is_cuda)
        shares = k.new_empty((2, *k.shape), dtype=self.dq.dtype)
        alone = len(blocks) == 1 and blocks[0].columns == slice(0, tokens(keys))
        if not alone:
            shares.zero_()
        for block in blocks:
            rows, columns = block.rows, block.columns
            share = shares[:, columns] if alone else torch.empty_like(shares[:, columns])
            block_attention_backward(
                self._grad[rows],
                self._q[rows],
                k[columns],
                v[columns],
                self._rows[..., rows],
                block.mask,
                scale=o.scale,
                softcap=o.softcap,
                dropout=block.dropout,
                dq=self.dq[rows],
                dk=share[0],
                dv=share[1],
                accumulate_dq=self._begun[block.runs.start],
            )
            if not alone:
                shares[:, columns] += share
            for i in block.runs:
                self._begun[i] = True
        return shares

    def finish(self) -> None:
        """Queries that saw nothing have no gradient."""
        offset = 0
        for run, begun in zip(self._runs, self._begun, strict=True):
            if not begun:
                self.dq[offset : offset + run.length].zero_()
            offset += run.length
