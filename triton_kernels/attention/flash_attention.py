"""flash_attention: launchers of the block attention kernels. Maths, masks, dropout: ops/attention/block.py.

Tensors are ``[s, b, heads, d]`` of any strides with adjacent ``d``, which for v, out and their gradients may be another
than for q and k; ``statistics`` is ``[2, b, heads, sq]``, ``rows`` ``[3, b, heads, sq]``, fp32, of any strides with
adjacent queries. k and v may have fewer heads than q, each for a group of adjacent ones.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from parallel_ops.triton_kernels._common import cdiv
from parallel_ops.triton_kernels._launch import launch, remembered, temporary
from parallel_ops.triton_kernels.attention.backward import _keys_kernel, _queries_kernel
from parallel_ops.triton_kernels.attention.forward import _forward_kernel
from parallel_ops.triton_kernels.attention.grids import dims_of, group_splits, hints_of, section_of, strides_of
from parallel_ops.triton_kernels.attention.merge import sum_parts
from parallel_ops.triton_kernels.attention.rows import gradient_rows
from parallel_ops.triton_kernels.attention.tiles import Tile, Tiles, tiles

_LOG2_E = 1.4426950408889634


class _Tokens(Protocol):
    @property
    def start(self) -> int: ...
    @property
    def step(self) -> int: ...


class Dropout(Protocol):
    """The fields of ``ops.attention.block.Dropout``, which kernels do not import."""

    @property
    def p(self) -> float: ...
    @property
    def seed(self) -> Tensor: ...
    @property
    def queries(self) -> _Tokens: ...
    @property
    def keys(self) -> _Tokens: ...
    @property
    def first_head(self) -> int: ...
    @property
    def first_batch(self) -> int: ...


class _Draws(NamedTuple):
    """Arguments of dropout beside the seed: words up to ``last_dropped`` are dropped."""

    kept_scale: float = 1.0
    last_dropped: int | None = None
    query_start: int | None = None
    query_step: int | None = None
    key_start: int | None = None
    key_step: int | None = None
    first_head: int | None = None
    first_batch: int | None = None

    @classmethod
    def of(cls, dropout: Dropout) -> _Draws:
        dropped = int(dropout.p * 2.0**32 + 0.5)
        if dropped == 0:
            return cls()
        queries, keys = dropout.queries, dropout.keys
        return cls(
            1.0 / (1.0 - dropout.p) if dropout.p < 1.0 else 0.0, dropped - 1,
            queries.start, queries.step, keys.start, keys.step, dropout.first_head, dropout.first_batch,
        )  # fmt: skip

    @property
    def drawn(self) -> bool:
        return self.last_dropped is not None

    @property
    def options(self) -> dict[str, bool]:
        drawn = self.drawn
        return {"DROPOUT": drawn, "BY_FOUR": drawn and self.key_step == 1 and (self.key_start or 0) % 4 == 0}


_NO_DRAWS = _Draws()


def _draws(dropout: Dropout | None) -> tuple[Tensor | None, _Draws]:
    """The seed, ``None`` if nothing is dropped, and the numbers."""
    if dropout is None:
        return None, _NO_DRAWS
    draws = _Draws.of(dropout)
    return dropout.seed if draws.drawn else None, draws


def _factors(q: Tensor, scale: float, softcap: float) -> tuple[bool, float, float]:
    """(16-bit data, the factor of q.k, the cap), in the units of ``_attention.exponential``."""
    fast = q.dtype is not torch.float32
    unit = _LOG2_E if fast else 1.0
    if softcap > 0.0:
        return fast, (2.0 * _LOG2_E * scale / softcap if fast else scale), softcap * unit
    return fast, scale * unit, 0.0


def _precision(q: Tensor) -> str:
    """How fp32 matmuls are made: like PyTorch's, or of three tf32 matmuls, which is as exact as fp32."""
    # ``allow_tf32`` cannot be read once somebody has set this.
    fast = q.dtype is not torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if fast else "tf32x3"


def _bounds(left: int | None, right: int | None, own: int, others: int) -> tuple[int, int]:
    """``left`` and ``right`` within what can matter, so that 32 bits hold any sum with an index."""
    return (
        -own if left is None else min(max(left, -own), others),
        others if right is None else max(min(right, others), -own),
    )


def _tiles(q: Tensor, v: Tensor, softcap: float, draws: _Draws, spans: Tensor | None, merge: bool) -> Tiles:
    return tiles(
        max(q.shape[3], v.shape[3]), q.dtype, q.device, softcap=softcap > 0.0, dropout=draws.drawn,
        spans=spans is not None, merge=merge,
    )  # fmt: skip


def _options(t: Tile) -> dict[str, int]:
    return {
        "BLOCK_QUERIES": t.queries, "BLOCK_KEYS": t.keys, "num_warps": t.warps, "num_stages": t.stages,
    }  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, *, merge: bool, left: int | None,
    right: int | None, spans: Tensor | None, scale: float, softcap: float, dropout: Dropout | None,
) -> None:  # fmt: skip
    """Writes ``out`` (of q's dtype or fp32) and ``statistics``, or merges into those of other blocks (fp32)."""
    seed, draws = _draws(dropout)
    _forward(
        q, k, v, out, statistics, spans, seed,
        merge=merge, left=left, right=right, scale=scale, softcap=softcap, draws=draws, precision=_precision(q),
    )  # fmt: skip


@remembered
def _forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, spans: Tensor | None, seed: Tensor | None, *,
    merge: bool, left: int | None, right: int | None, scale: float, softcap: float, draws: _Draws, precision: str,
) -> None:  # fmt: skip
    (queries, batch, heads), (keys, kv_heads) = q.shape[:3], k.shape[0:3:2]
    if q.numel() == 0:
        return
    fast, factor, cap = _factors(q, scale, softcap)
    t = _tiles(q, v, softcap, draws, spans, merge).forward
    low, high = _bounds(left, right, queries, keys)
    strides = strides_of(q, k, v, out)
    blocks, pairs, group = cdiv(queries, t.queries), heads * batch, heads // kv_heads
    section = section_of(pairs, _bytes_of_a_head(k, v), group)
    launch(
        _forward_kernel, (blocks * pairs,),
        q, k, v, out, statistics, spans, seed, queries, keys, heads, group, blocks, pairs, section, low, high,
        factor, cap,
        *draws, None if spans is None else spans.stride(0), *strides, *statistics.stride()[:3],
        **dims_of(q, v), MERGE=merge,
        HAS_LOW=left is not None or spans is not None, CAPPED=softcap > 0.0, SIGNED=softcap <= 0.0 and scale <= 0.0,
        FAST=fast, PRECISION=precision, **hints_of(strides), **draws.options, **_options(t),
    )  # fmt: skip


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    *, accumulate_dq: bool, left: int | None, right: int | None, spans: Tensor | None, query_spans: Tensor | None,
    scale: float, softcap: float, dropout: Dropout | None, out: Tensor | None = None, statistics: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes ``dk`` and ``dv`` (fp32 or of q's dtype), and writes ``dq`` or adds to it (then fp32).

    With ``out`` and ``statistics`` ``rows`` is written first, as by ``gradient_rows``.
    """
    seed, draws = _draws(dropout)
    _backward(
        grad_out, q, k, v, rows, dq, dk, dv, spans, query_spans, seed, out, statistics,
        accumulate_dq=accumulate_dq, left=left, right=right, scale=scale, softcap=softcap, draws=draws,
        precision=_precision(q),
    )  # fmt: skip


@remembered
def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    spans: Tensor | None, query_spans: Tensor | None, seed: Tensor | None, out: Tensor | None,
    statistics: Tensor | None, *, accumulate_dq: bool, left: int | None, right: int | None, scale: float,
    softcap: float, draws: _Draws, precision: str,
) -> None:  # fmt: skip
    if out is not None and statistics is not None:
        gradient_rows(grad_out, out, statistics, rows)
    (queries, batch, heads), (keys, kv_heads) = q.shape[:3], k.shape[0:3:2]
    fast, factor, cap = _factors(q, scale, softcap)
    common = {
        **dims_of(q, v), "CAPPED": softcap > 0.0, "FAST": fast, "PRECISION": precision, **draws.options,
    }  # fmt: skip
    group = heads // kv_heads
    if k.numel():
        t = _tiles(q, v, softcap, draws, spans, accumulate_dq).keys
        low, high = _bounds(None if right is None else -right, None if left is None else -left, keys, queries)
        blocks = cdiv(keys, t.keys)
        splits = group_splits(blocks * kv_heads * batch, group, q.device) if queries else 1
        parts = [dk, dv]
        if splits > 1:
            shapes = ((splits * batch, kv_heads, keys, gradient.shape[3]) for gradient in (dk, dv))
            parts = [temporary(functools.partial(_part, shape, k.device)) for shape in shapes]
        strides = strides_of(grad_out, q, k, v, *parts)
        pairs = splits * kv_heads * batch
        launch(
            _keys_kernel, (blocks * pairs,),
            grad_out, q, k, v, rows, *parts, query_spans, seed,
            queries, keys, heads, group, blocks, pairs, section_of(pairs, _bytes_of_a_head(q, grad_out)), splits,
            low, high, factor, cap, scale,
            *draws, None if query_spans is None else query_spans.stride(0), *strides, *rows.stride()[:3],
            HAS_LOW=right is not None or query_spans is not None,
            HAS_HIGH=left is not None or query_spans is not None, **hints_of(strides), **common, **_options(t),
        )  # fmt: skip
        if splits > 1:
            sum_parts(parts, dk, dv, splits)
    if q.numel():
        t = _tiles(q, v, softcap, draws, spans, accumulate_dq).queries
        low, high = _bounds(left, right, queries, keys)
        strides = strides_of(grad_out, q, k, v, dq)
        blocks, pairs = cdiv(queries, t.queries), heads * batch
        launch(
            _queries_kernel, (blocks * pairs,),
            grad_out, q, k, v, rows, dq, spans, seed,
            queries, keys, heads, group, blocks, pairs, section_of(pairs, _bytes_of_a_head(k, v), group),
            low, high, factor, cap, scale,
            *draws, None if spans is None else spans.stride(0), *strides, *rows.stride()[:3],
            ACCUMULATE=accumulate_dq, HAS_LOW=left is not None or spans is not None, **hints_of(strides),
            **common, **_options(t),
        )  # fmt: skip


def _part(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A buffer for parts of dk or dv, ``[keys, splits * batch, kv_heads, dims]``."""
    return torch.empty(shape, dtype=torch.float32, device=device).permute(2, 0, 1, 3)


def _bytes_of_a_head(a: Tensor, b: Tensor) -> int:
    """Bytes of all tokens of one head and batch."""
    return a.shape[0] * (a.shape[3] + b.shape[3]) * a.element_size()
