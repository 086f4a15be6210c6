"""Blocks of keys, merged, are the attention over all of them: what rings of ranks are made of."""

import itertools
import random

import pytest
import torch

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.ops import flash_attention_reference
from parallel_ops.ops.attention.block import (
    Dropout,
    attention_gradient_rows,
    begin_carry,
    block_attention,
    block_attention_backward,
)
from parallel_ops.ops.attention.options import AttentionOptions
from parallel_ops.ops.attention.ranges import MaskBounds, attention_bounds, dense_mask, document_ranges
from support.numerics.attention import CONVEX_SPANS, SPANS, attention, random_spans, spans_from_keys
from support.numerics.suite import DEVICES, forward_backward, randn

pytestmark = pytest.mark.parametrize("device", DEVICES)
S, B, HEADS, KV_HEADS, D = 150, 2, 4, 2, 24


def cut(layout):
    """Blocks of tokens: adjacent with an empty one, or every third token."""
    if layout == "striped":
        return [TokenRange(i, S // 3, 3) for i in range(3)]
    edges = [0, 70, 70, 71, S]
    return [TokenRange(start, end - start) for start, end in itertools.pairwise(edges)]


def part(t, tokens):
    return t[tokens.start : tokens.start + tokens.step * tokens.length : tokens.step]


@pytest.mark.parametrize("layout", ["adjacent", "striped"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window_size": (19, 0)},
        {"softcap": 3.0},
        {"dropout_p": 0.3, "dropout_seed": 5},
        {
            "cu_seqlens": torch.tensor([0, 69, 70, 72, 72, S]),
            "window_size": (29, 0),
            "dropout_p": 0.1,
            "dropout_seed": 1,
        },
    ],
    ids=str,
)
def test_blocks_in_any_order_are_the_whole(device, options, layout):
    """Of queries and of keys, visited last first; in fp64 on the CPU, so a wrong mask or draw shows."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    make = lambda heads, seed: randn(S, B, heads, D, dtype=dtype, device=device, seed=seed)  # noqa: E731
    q, k, v = make(HEADS, 0), make(KV_HEADS, 1), make(KV_HEADS, 2)
    grad = make(HEADS, 3).detach()
    options = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    expected = forward_backward(lambda *args: flash_attention_reference(*args, **options), (q, k, v), grad)
    q, k, v = (t.detach() for t in (q, k, v))
    left = options["window_size"][0] if "window_size" in options else None
    ranges = document_ranges(options["cu_seqlens"], causal=False) if "cu_seqlens" in options else None
    lines = {"left": left, "right": 0 if options.get("causal", True) else None, "ranges": ranges}
    got = [torch.zeros_like(t) for t in (q, q, k, v)]
    for queries in cut(layout):
        own, own_grad = part(q, queries), part(grad, queries)
        out, statistics = torch.empty_like(own), own.new_empty((2, B, HEADS, queries.length))
        begin_carry(out, statistics, None)
        blocks = []
        for keys in reversed(cut(layout)):
            mask = attention_bounds(queries, keys, **lines)
            if mask is None:
                continue
            seed = torch.tensor([options.get("dropout_seed", 0)], device=device)
            dropout = Dropout(options["dropout_p"], seed, queries, keys) if "dropout_seed" in options else None
            scores = AttentionOptions(softmax_scale=D**-0.5, softcap=options.get("softcap", 0.0))
            blocks.append((keys, mask, scores, dropout))
            block_attention(
                own, part(k, keys), part(v, keys), mask, scores, dropout=dropout, out=out, statistics=statistics,
                merge=True,
            )  # fmt: skip
        part(got[0], queries).copy_(out)
        rows, dq = attention_gradient_rows(own_grad, out, statistics), torch.zeros_like(own)
        for keys, mask, scores, dropout in blocks:
            ours = [part(t, keys) for t in (k, v)]
            dk, dv = (torch.full_like(t, torch.nan) for t in ours)
            block_attention_backward(
                own_grad, own, *ours, rows, mask, scores, dropout=dropout, dq=dq, dk=dk, dv=dv, accumulate_dq=True
            )
            part(got[2], keys).add_(dk)
            part(got[3], keys).add_(dv)
        part(got[1], queries).copy_(dq)
    tolerance = 1e-12 if device == "cpu" else 1e-4
    for ours, true in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, true, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_that_see_nothing_contribute_nothing(device, dtype):
    q, k, v, grad = (randn(70, 1, 2, 16, dtype=dtype, device=device, seed=i).detach() for i in range(4))
    spans = torch.zeros(2, 70, dtype=torch.int32, device=device)
    spans[:, 40:] = torch.tensor([[10], [20]])
    query_spans = torch.zeros(2, 70, dtype=torch.int32, device=device)
    query_spans[:, 10:20], query_spans[:, 20:] = torch.tensor([[40], [70]]), 70
    mask = MaskBounds(spans=spans, query_spans=query_spans)
    for merge in (False, True):
        out = torch.zeros(70, 1, 2, 16, device=device) if merge else torch.full_like(q, torch.nan)
        statistics = torch.zeros(2, 1, 2, 70, device=device)
        statistics[0] = -torch.inf
        block_attention(q, k, v, mask, AttentionOptions(), out=out, statistics=statistics, merge=merge)
        assert not out[:40].any() and out[40:].isfinite().all()
        assert (statistics[0, ..., :40] == -torch.inf).all() and not statistics[1, ..., :40].any()
        assert statistics[..., 40:].isfinite().all() and (statistics[1, ..., 40:] >= 1).all()
    dq, dk, dv = (torch.full_like(t, torch.nan) for t in (q, k, v))
    rows = attention_gradient_rows(grad, out.to(dtype), statistics)
    block_attention_backward(grad, q, k, v, rows, mask, AttentionOptions(), dq=dq, dk=dk, dv=dv, accumulate_dq=False)
    assert not dq[:40].any() and dq[40:].abs().sum() > 0
    for gradient in (dk, dv):
        assert not gradient[:10].any() and not gradient[20:].any() and gradient[10:20].abs().sum() > 0


def test_direct_calls_of_the_ops_cannot_read_out_of_bounds(device):
    q = torch.zeros(4, 1, 2, 8)
    statistics, rows = torch.zeros(2, 1, 2, 4), torch.zeros(3, 1, 2, 4)
    op = torch.ops.parallel_ops.block_attention_.default
    rest = (None, None, None, 1.0, 0.0, 0.0, None, [])
    for message, args in (
        ("of one dtype", (q, q.half(), q, *rest, q, statistics, False)),
        ("heads that divide", (q, q[..., :4], q, *rest, q, statistics, False)),
        ("v must have the shape", (q, q, q[:2], *rest, q, statistics, False)),
        ("out must have the shape", (q, q, q, *rest, q[:2], statistics, False)),
        ("statistics must be", (q, q, q, *rest, q, statistics[..., :2], False)),
        ("spans must be", (q, q, q, torch.zeros(2, 3, dtype=torch.int32), *rest[1:], q, statistics, False)),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*args)
    spans = torch.tensor([[-5] * 4, [9] * 4], dtype=torch.int32)  # cut to the block
    op(q, q, q, spans, *rest[1:], q.clone(), statistics, False)
    backward = torch.ops.parallel_ops.block_attention_backward_.default
    with pytest.raises(RuntimeError, match="grad_out must have the shape"):
        backward(q[:2], q, q, q, rows, *rest, q, q, q, False)
    with pytest.raises(RuntimeError, match="dk must have the shape"):
        backward(q, q, q, q, rows, *rest, q, q[:2], q, False)
    with pytest.raises(RuntimeError, match="rows must be"):
        backward(q, q, q, q, rows[:2], *rest, q, q, q, False)
    with pytest.raises(RuntimeError, match="statistics must be"):
        torch.ops.parallel_ops.attention_gradient_rows_.default(q, q, statistics[:1], rows)


def test_random_spans(device, trials):
    """Forward and backward against fp64: empty spans between others, spans of one key, queries in any order."""
    for trial in range(40 if trials is None else trials):
        draw = random.Random(trial)
        sq, sk, kv_heads = draw.randint(1, 200), draw.randint(1, 400), draw.choice((1, 2))
        d, dtype = draw.choice((1, 16, 40)), draw.choice((torch.float64, torch.float32, torch.bfloat16))
        # A GPU needs the spans of the keys too, and has no fp64 here.
        kinds = SPANS if device == "cpu" else CONVEX_SPANS
        dtype = dtype if device == "cpu" else torch.bfloat16
        spans = random_spans(draw, sq, sk, kinds)
        mask = spans_from_keys(spans, sk)
        here = dense_mask(mask, sq, sk, "cpu")
        shapes = (sq, 2), (sk, kv_heads), (sk, kv_heads), (sq, 2)
        q, k, v, grad = (
            randn(n, 2, h, d, dtype=dtype, device=device, seed=4 * trial + i).detach()
            for i, (n, h) in enumerate(shapes)
        )
        mask = MaskBounds(spans=mask.spans.to(device), query_spans=mask.query_spans.to(device))
        statistics = q.new_full((2, 2, 2, sq), torch.nan, dtype=torch.promote_types(dtype, torch.float32))
        options = AttentionOptions(softmax_scale=0.5)
        out, dq, dk, dv = (torch.full_like(t, torch.nan) for t in (q, q, k, v))
        block_attention(q, k, v, mask, options, out=out, statistics=statistics, merge=False)
        rows = attention_gradient_rows(grad, out, statistics)
        block_attention_backward(grad, q, k, v, rows, mask, options, dq=dq, dk=dk, dv=dv, accumulate_dq=False)
        leaves = [t.double().cpu().requires_grad_() for t in (q, k, v)]
        expected, _ = attention(*leaves, here, scale=0.5, softcap=0.0, kept=None)
        expected.backward(grad.double().cpu())
        oracle = expected.detach(), *(t.grad for t in leaves)
        tolerance = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.04}[dtype]
        for name, got, true in zip(("out", "dq", "dk", "dv"), (out, dq, dk, dv), oracle, strict=True):
            # Of the gradient too: where queries see one key each, their own gradient cancels to zero.
            off = (got.double().cpu() - true).norm() / (true.norm() + grad.double().norm().cpu())
            assert off <= tolerance, f"trial {trial}, {sq} x {sk} of {dtype}: {name} is off by {off:.1e}"
