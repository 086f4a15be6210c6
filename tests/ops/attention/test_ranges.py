"""Ranges of every kind against masks with all scores, the helpers that make them, and bad ones."""

import random

import pytest
import torch

from parallel_ops import flash_attention
from parallel_ops.ops.attention import ranges as made
from support.numerics.attention import attention
from support.numerics.suite import DEVICES, randn, refuses

EDGES = torch.tensor([0, 3, 3, 10, 11, 24])


def seen(ranges, keys=None):
    """The ranges as booleans ``[queries, keys]``."""
    j = torch.arange(ranges.shape[1] if keys is None else keys)
    return (j >= ranges[0, :, None]) & (j <= ranges[1, :, None])


def documents(edges):
    return torch.repeat_interleave(torch.arange(len(edges) - 1), torch.diff(edges))


def test_helpers():
    i = torch.arange(24)
    causal, same = i[:, None] >= i, documents(EDGES)[:, None] == documents(EDGES)
    assert torch.equal(seen(made.causal_ranges(24)), causal)
    near = i[:, None] - i <= 4
    assert torch.equal(seen(made.causal_ranges(24, window_size=(4, 0))), causal & near)
    assert torch.equal(seen(made.document_ranges(EDGES)), causal & same)
    assert torch.equal(seen(made.document_ranges(EDGES, causal=False)), same)
    mixed = torch.tensor([True, False, False, True, True])
    assert torch.equal(seen(made.document_ranges(EDGES, causal=mixed)), same & (causal | ~mixed[documents(EDGES)]))
    assert torch.equal(seen(made.prefix_ranges(5, length=24)), causal | (i < 5).expand(24, 24))
    within = i - EDGES[documents(EDGES)]
    prefix = torch.tensor([2, 0, 4, 9, 0])
    whole = (within < prefix[documents(EDGES)]).expand(24, 24)
    assert torch.equal(seen(made.prefix_ranges(prefix, cu_seqlens=EDGES)), same & (causal | whole))
    frames = i // 7
    assert torch.equal(seen(made.block_causal_ranges(7, length=24)), frames[:, None] >= frames)
    assert torch.equal(seen(made.block_causal_ranges(EDGES)), documents(EDGES)[:, None] >= documents(EDGES))
    both = made.intersect_ranges(made.block_causal_ranges(7, length=24), made.document_ranges(EDGES, causal=False))
    assert torch.equal(seen(both), same & (frames[:, None] >= frames)) and both.dtype is torch.int32
    for found in (both, made.document_ranges(EDGES), made.prefix_ranges(prefix, cu_seqlens=EDGES)):
        assert made.range_error(found, 24) is None


def random_ranges(draw, sq, sk):
    """Bounds that do not decrease; many queries see no key."""
    first, last = (sorted(draw.randint(0, sk) for _ in range(sq)) for _ in range(2))
    return torch.tensor([first, [n - 1 for n in last]], dtype=torch.int32)


@pytest.mark.parametrize("device", DEVICES)
def test_random_ranges(device, trials):
    """Alone and cut by causal masks, windows and documents, forward and backward, against fp64."""
    for trial in range(40 if trials is None else trials):
        draw = random.Random(trial)
        sk, kv_heads = draw.randint(1, 90), draw.choice((1, 2))
        sq, options = sk if draw.random() < 0.5 else draw.randint(1, sk), {}
        dtype = draw.choice((torch.float64, torch.float32, torch.bfloat16)) if device == "cpu" else torch.bfloat16
        q, k, v, grad = (
            randn(n, 2, h, 16, dtype=dtype, device=device, seed=4 * trial + i)
            for i, (n, h) in enumerate(((sq, 2), (sk, kv_heads), (sk, kv_heads), (sq, 2)))
        )
        ranges = random_ranges(draw, sq, sk)
        here, apart = seen(ranges, sk), torch.arange(sk) - torch.arange(sk - sq, sk)[:, None]
        if draw.random() < 0.3:
            options["causal"], here = True, here & (apart <= 0)
        if draw.random() < 0.3:
            left, right = draw.randint(-1, 30), draw.randint(-1, 30)
            options["window_size"] = left, right
            here = here & (apart >= (-left if left >= 0 else -sk)) & (apart <= (right if right >= 0 else sk))
        if sq == sk and draw.random() < 0.3:
            edges = torch.tensor([0, draw.randint(0, sk), sk])
            options["cu_seqlens"], here = edges.to(device), here & (documents(edges)[:, None] == documents(edges))
        given = ranges.to(device) if draw.random() < 0.5 else tuple(ranges.to(device))
        out = flash_attention(q, k, v, key_ranges=given, softmax_scale=0.5, **options)
        gradients = torch.autograd.grad(out, (q, k, v), grad.detach())
        leaves = [t.detach().double().cpu().requires_grad_() for t in (q, k, v)]
        expected, _ = attention(*leaves, here, scale=0.5, softcap=0.0, kept=None)
        oracle = expected, *torch.autograd.grad(expected, leaves, grad.double().cpu())
        tolerance = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.04}[dtype]
        for name, got, true in zip(("out", "dq", "dk", "dv"), (out, *gradients), oracle, strict=True):
            off = (got.double().cpu() - true).norm() / (true.norm() + grad.double().norm().cpu())
            assert off <= tolerance, f"trial {trial}, {sq} x {sk} of {dtype}, {options}: {name} is off by {off:.1e}"
        assert not out[~here.any(1)].any(), "rows that see nothing"
        assert not gradients[1][~here.any(0)].any() and not gradients[2][~here.any(0)].any(), "keys that nobody sees"


@pytest.mark.parametrize(
    ("ranges", "error", "message"),
    [
        (torch.zeros(2, 5, dtype=torch.int32), ValueError, r"key_ranges must be \[2, 6\]"),
        ((torch.zeros(6, dtype=torch.int32),), TypeError, r"must be \(first, last\)"),
        (torch.zeros(2, 6), TypeError, "must be int32, got torch.float32"),
        (
            torch.tensor([[0, 1, 0, 1, 1, 1], [5] * 6]),
            ValueError,
            "first key must not decrease, .* from 1 to 0 in row 2",
        ),
        (
            torch.tensor([[0] * 6, [5, 5, 5, 5, 5, 4]]),
            ValueError,
            "last key must not decrease, .* from 5 to 4 in row 5",
        ),
        (torch.tensor([[0] * 6, [5, 5, 5, 5, 5, 6]]), ValueError, "last key of row 5 is 6, outside of -1 to 5"),
        (torch.tensor([[-1, 0, 0, 0, 0, 0], [5] * 6]), ValueError, "first key of row 0 is -1, outside of 0 to 6"),
    ],
)
def test_bad_ranges_are_named(ranges, error, message):
    q = torch.randn(6, 1, 2, 8)
    refuses(flash_attention, error, f"key_ranges.*{message}|{message}", q, q, q, key_ranges=ranges)


def test_they_are_the_whole_mask_unless_causal_is_said():
    q = torch.randn(6, 1, 2, 8)
    full = torch.tensor([[0] * 6, [5] * 6], dtype=torch.int32)
    assert torch.equal(flash_attention(q, q, q, key_ranges=full), flash_attention(q, q, q, causal=False))
    causal = flash_attention(q, q, q, key_ranges=full, causal=True)
    torch.testing.assert_close(causal, flash_attention(q, q, q))
