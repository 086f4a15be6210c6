"""Ring, all-to-all, hybrid and gathered attention over the loopback transport: up to 16 ranks in any interleaving."""

import dataclasses
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.parallelism.context_parallel import ANY, Case, cases, divisors, joined, oracle, shared
from support.transports.loopback import LoopbackGroup

WAYS = [
    {"ranks_per_node": m, **way}
    for m in (1, 2)
    for way in ({}, {"all_gather": True}, {"ulysses_degree": 2}, {"ulysses_degree": 4})
]


def run(case, size, tensors, seed=0, credits=0):
    return LoopbackGroup(size, seed=seed, credits=credits).run(lambda transport: shared(case, transport, tensors))


def check(case, size, seed=0, credits=0):
    tensors = case.tensors()
    for got, want in zip(joined(case, run(case, size, tensors, seed, credits)), oracle(case, tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@given(drawn=cases(), seed=st.integers(0, 10**6), credits=st.integers(0, 2))
def test_any_attention_is_that_of_one_rank(drawn, seed, credits):
    check(*drawn, seed, credits)


@pytest.mark.parametrize("layout", ANY)
@pytest.mark.parametrize("way", WAYS)
def test_every_layout_and_way_with_every_option(layout, way):
    """4 ranks, on two nodes too; 13 tokens, of them one document empty and one a single token; fewer than ranks."""
    options = {"heads": 8, "kv_heads": 4, "layout": layout, **way}
    documents = (0, 1, 7, 0, 5)
    check(Case(13, **options), 4)
    check(Case(13, causal=False, documents=documents, **options), 4)
    check(Case(3, sink=True, **options), 4)
    check(Case(13, window=4, sink=True, softcap=2.0, dropout_p=0.4, documents=documents, **options), 4)


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("way", [{}, {"all_gather": True}, {"ulysses_degree": 2}])
def test_the_error_does_not_grow_with_the_ring(size, way):
    """In bfloat16: the relative error of each result is that of one rank."""
    case = Case(192, heads=4, kv_heads=2, head_dim=32, **way)
    tensors = case.tensors(torch.bfloat16)
    want = oracle(case, tensors)
    alone = run(dataclasses.replace(case, ulysses_degree=1, all_gather=False), 1, tensors)[0]
    for got, one, true in zip(joined(case, run(case, size, tensors)), alone, want, strict=True):
        errors = [((t.double() - true).norm() / true.norm()).item() for t in (got, one)]
        assert errors[0] <= 1.01 * errors[1], errors


def relative_errors(results, oracle):
    return [
        ((got.double() - true).norm() / true.norm().clamp(min=1e-9)).item()
        for got, true in zip(results, oracle, strict=True)
    ]


@pytest.mark.parametrize("spread", [1.0, 6.0, 20.0])
@pytest.mark.parametrize("options", [{}, {"causal": False, "sink": True}, {"documents": (100, 0, 37, 1, 62)}], ids=str)
def test_the_error_in_fp32_does_not_grow_with_the_logits(spread, options):
    """Logits of 0.7, 25 and 280 root mean square: the relative error of each result is at most twice one rank's."""
    case = Case(200, heads=4, kv_heads=2, head_dim=32, **options)
    tensors = case.tensors(torch.float32)
    tensors[:2] = [t * spread for t in tensors[:2]]
    tensors[3] = None if tensors[3] is None else tensors[3] * spread**2
    want = oracle(case, tensors)
    alone = relative_errors(run(case, 1, tensors)[0], want)
    for size in (2, 5, 8):
        found = relative_errors(joined(case, run(case, size, tensors)), want)
        assert all(got <= 2 * one for got, one in zip(found, alone, strict=True)), f"{size} ranks: {found}, {alone}"


def random_case(draw):
    """A sequence of some hundred tokens in documents, in which some steps of a ring show queries no key: (case, ranks,
    dtype)."""
    size, length = draw.randint(2, 8), draw.randint(1, 300)
    documents = None
    if draw.random() < 0.8:
        cuts = sorted(draw.randint(0, length) for _ in range(draw.randint(0, 8)))
        documents = tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))
    kv_heads, causal = draw.choice((1, 2)), draw.random() < 0.5
    ulysses_degree = draw.choice([n for n in divisors(size) if kv_heads % n == 0])
    case = Case(
        length, heads=kv_heads * draw.choice((1, 2)), kv_heads=kv_heads, head_dim=draw.choice((4, 16)), causal=causal,
        window=draw.randint(1, 150) if causal and draw.random() < 0.3 else None, sink=draw.random() < 0.3,
        documents=documents, layout=draw.choice(ANY), ulysses_degree=ulysses_degree,
        all_gather=ulysses_degree == 1 and draw.random() < 0.3, dropout_p=draw.choice((0.0, 0.0, 0.0, 0.3)),
        ranks_per_node=draw.choice(divisors(size)),
    )  # fmt: skip
    return case, size, draw.choice((torch.float32, torch.float64))


def test_random_documents(trials):
    """Long enough for strips and tiles of the kernels without a visible key between others."""
    for trial in range(15 if trials is None else trials):
        case, size, dtype = random_case(random.Random(trial))
        tensors = case.tensors(dtype)
        want = oracle(case, tensors)
        found = relative_errors(joined(case, run(case, size, tensors)), want)
        assert max(found) <= (1e-11 if dtype is torch.float64 else 2e-5), (
            f"trial {trial}, {size} ranks: {case}: {found}"
        )


@pytest.mark.parametrize("way", [{}, {"all_gather": True}, {"ulysses_degree": 2}])
def test_the_same_bits_in_any_interleaving(way):
    case = Case(45, heads=4, kv_heads=2, head_dim=8, dropout_p=0.2, **way)
    tensors = case.tensors(torch.bfloat16)
    first = run(case, 6, tensors)
    for seed, credits in ((1, 0), (2, 3)):
        for got, want in zip(run(case, 6, tensors, seed, credits), first, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
