"""Ring, all-to-all, hybrid and gathered attention over the loopback transport: up to 16 ranks in any interleaving."""

import dataclasses
import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_ops.comm.transport.base import Send
from parallel_ops.context_parallel import AttentionShape, cost, token_ranges
from parallel_ops.context_parallel.schedule import blocks as _blocks
from support.parallelism.context_parallel import Case, joined, oracle, shared
from support.transports.loopback import LoopbackGroup

KINDS = ("zigzag", "striped", "contiguous")
ANY = (*KINDS, "balanced", "scattered")
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


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def cases(draw):
    """Any attention, shared out in any way: (case, ranks)."""
    size = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16]))
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    ulysses_degree = draw(st.sampled_from([n for n in divisors(size) if kv_heads % n == 0]))
    length = draw(st.integers(0, 40))
    documents = None
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
        documents = tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))
    ranges = None
    if documents is None and draw(st.booleans()):
        bounds = st.lists(st.integers(0, length), min_size=length, max_size=length)
        first, end = sorted(draw(bounds)), sorted(draw(bounds))
        ranges = tuple(first), tuple(n - 1 for n in end)
    causal = draw(st.booleans())
    case = Case(
        length,
        batch=draw(st.sampled_from([1, 2])),
        heads=kv_heads * draw(st.sampled_from([1, 2])),
        kv_heads=kv_heads,
        head_dim_v=draw(st.sampled_from([None, 3, 6])),
        causal=causal,
        window=draw(st.one_of(st.none(), st.integers(1, 45))) if causal else None,
        sink=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        dropout_p=draw(st.sampled_from([0.0, 0.3])),
        documents=documents,
        ranges=ranges,
        layout=draw(st.sampled_from(ANY)),
        ulysses_degree=ulysses_degree,
        all_gather=ulysses_degree == 1 and draw(st.booleans()),
        ranks_per_node=draw(st.sampled_from(divisors(size))),
    )
    return case, size


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


class Counted:
    """A transport that counts the bytes that it sends to each rank, its messages by batch and whom it receives from."""

    def __init__(self, transport):
        self._transport, self.sources, self.messages, self.to = transport, set(), [], {}

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def sent(self, ranks_per_node):
        """Bytes to ranks of other nodes, and to those of the same."""
        here = self._transport.rank // ranks_per_node
        inside = sum(n for peer, n in self.to.items() if peer // ranks_per_node == here)
        return sum(self.to.values()) - inside, inside

    def post(self, op, chunks):
        for chunk in chunks:
            if isinstance(chunk, Send):
                self.to[chunk.peer] = self.to.get(chunk.peer, 0) + chunk.tensor.nbytes
        self.sources |= {c.peer for c in chunks if not isinstance(c, Send)}
        self.messages.append(sum(isinstance(c, Send) for c in chunks))
        return self._transport.post(op, chunks)


def counted(case, size, dtype):
    """For each rank: bytes sent forward, between nodes and inside, those sent backward, ranks received from forward."""
    tensors, m = case.tensors(dtype), case.ranks_per_node

    def of_rank(transport):
        counting, forward = Counted(transport), []
        shared(case, counting, tensors, lambda: forward.extend((counting.sent(m), len(counting.sources))))
        sent, sources = forward
        return sent, tuple(after - before for after, before in zip(counting.sent(m), sent, strict=True)), sources

    return LoopbackGroup(size).run(of_rank)


@pytest.mark.parametrize("window", [None, 10, 40])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", KINDS)
def test_a_step_of_the_ring_is_one_message(layout, causal, window):
    """Of both parts of a zigzag shard, too; a window leaves out what is between the two, or all of it."""
    case = Case(93, layout=layout, causal=causal, window=window)
    tensors = case.tensors(torch.float32)

    def of_rank(transport):
        counting = Counted(transport)
        shared(case, counting, tensors, lambda: counting.messages.append(None))
        return counting.messages

    for messages in LoopbackGroup(4).run(of_rank):
        forward = messages.index(None)
        assert forward == 3 and len(messages) == 1 + 3 * 3  # keys; keys again, and their gradients
        assert {*messages} <= {None, 0, 1}
        assert window is not None or not causal or layout == "contiguous" or sum(m or 0 for m in messages) == 9


def shape_of(case, size, itemsize):
    return AttentionShape(
        length=case.length, ranks=size, batch=case.batch, heads=case.heads, kv_heads=case.kv_heads,
        head_dim=case.head_dim, itemsize=itemsize, cp_layout=case.shared_by(size).cp_layout, causal=case.causal,
        window_size=(-1 if case.window is None else case.window - 1, -1), documents=case.documents or False,
        ranks_per_node=case.ranks_per_node,
    )  # fmt: skip


@settings(max_examples=25)
@given(drawn=cases(), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_the_cost_is_what_is_sent(drawn, dtype):
    case, size = drawn
    # Counts of documents are exact for adjacent tokens on ranks that share no heads.
    exact = case.causal and case.layout != "striped" and case.ulysses_degree == 1
    documents = case.documents if exact else None
    case = dataclasses.replace(case, documents=documents, ranges=None, dropout_p=0.0, head_dim_v=None)
    algorithm = cost.Algorithm(case.ulysses_degree, case.all_gather)
    want, found = cost.sent_by_level(shape_of(case, size, dtype.itemsize), algorithm), counted(case, size, dtype)
    two_levels = case.ulysses_degree == 1 < case.ranks_per_node < size
    for (*directions, _), levels in zip(found, want, strict=True):
        assert directions == list(zip(*levels, strict=True)) or not two_levels
        assert [sum(pair) for pair in directions] == [sum(pair) for pair in zip(*levels, strict=True)]


LINKED = [
    (4, Case(45, ranks_per_node=2)),
    (6, Case(61, ranks_per_node=3, layout="contiguous", causal=False, documents=(3, 20, 0, 30, 8))),
    (8, Case(96, ranks_per_node=4, layout="scattered", documents=(5, 40, 1, 20, 30), dropout_p=0.2)),
    (8, Case(96, ranks_per_node=2, layout="balanced", documents=(60, 6, 30))),
    (6, Case(33, ranks_per_node=2, layout="striped", heads=4, kv_heads=2)),
    (8, Case(80, ranks_per_node=4, window=9, sink=True)),
    (4, Case(3, ranks_per_node=2)),
]


def seen_by_other_nodes(case, size):
    """Keys of other nodes that any query of a node sees, of all nodes."""
    m, ranges, layout = case.ranks_per_node, case.options().ranges(case.length), case.shared_by(size)
    places = torch.arange(case.length)
    mask = torch.ones(case.length, case.length, dtype=torch.bool)
    if ranges is not None:
        mask = (places >= ranges[0][:, None]) & (places <= ranges[1][:, None])
    mask &= places <= places[:, None] + (0 if case.causal else case.length)
    mask &= places > places[:, None] - (case.window or case.length)
    owner = torch.empty(case.length, dtype=torch.int64)
    for rank in range(size):
        owner[layout.positions(rank)] = rank // m
    return sum(int(mask[owner == node][:, owner != node].any(0).sum()) for node in range(size // m))


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (size, dataclasses.replace(case, **way))
        for size, case in LINKED
        for way in ({}, {"all_gather": True}, {"ulysses_degree": 2})
        # Heads are exchanged between nodes otherwise.
        if not way.get("ulysses_degree") or (case.ranks_per_node % 2 == 0 and case.layout != "striped")
    ],
)
def test_keys_cross_the_link_between_nodes_once_a_node(size, case):
    """Results of one process, and the bytes of keys that any query of a node sees, each once, and their gradients."""
    m, tensors = case.ranks_per_node, case.tensors()

    def of_rank(transport, case):
        counting = Counted(transport)
        return shared(case, counting, tensors), counting.sent(m)[0]

    results = LoopbackGroup(size, seed=7).run(lambda transport: of_rank(transport, case))
    for got, want in zip(joined(case, [found for found, _ in results]), oracle(case, tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    one_level = dataclasses.replace(case, ranks_per_node=1)
    flat = sum(sent for _, sent in LoopbackGroup(size).run(lambda transport: of_rank(transport, one_level)))
    least = 3 * 8 * case.batch * case.kv_heads * 2 * case.head_dim * seen_by_other_nodes(case, size)
    assert sum(sent for _, sent in results) == least <= flat
    assert case.length != 45 or case.ulysses_degree > 1 or flat > 1.4 * least


def test_a_window_ends_the_ring_after_the_hops_that_it_needs():
    """8 ranks of 16 adjacent tokens: a window of 17 reaches the rank before, one of 18 the one before that."""
    for window, hops in ((1, 0), (2, 1), (17, 1), (18, 2), (128, 7)):
        case = Case(128, layout="contiguous", window=window)
        assert [sources for *_, sources in counted(case, 8, torch.float32)] == [min(rank, hops) for rank in range(8)]
    # And of the rank before only the tokens within the window travel: 3 of 16.
    sent = [sum(forward) for forward, *_ in counted(Case(128, layout="contiguous", window=4), 8, torch.float32)]
    assert sent == [3 * 2 * 2 * 4 * 4] * 7 + [0]


@pytest.mark.parametrize("layout", KINDS)
def test_steps_that_are_masked_are_not_computed(layout, monkeypatch):
    """8 ranks, causal: one call of the block op a step, in contiguous layout none for ranks behind this one."""
    calls, block = [], _blocks.block_attention
    monkeypatch.setattr(_blocks, "block_attention", lambda *args, **kwargs: calls.append(0) or block(*args, **kwargs))
    case, shards = Case(64, layout=layout), [token_ranges.shard_ranges(layout, 64, 8, rank) for rank in range(8)]
    for rank, own in enumerate(shards):
        calls.clear()
        q, kv = torch.randn(8, 1, 2, 4), torch.randn(8, 1, 2, 8)
        carry = _blocks.SoftmaxAccumulator(q, 4, own, case.options())
        for shard in shards:
            parts = token_ranges.visible_keys(shard, own, None, 0)
            carry.add(kv[: token_ranges.count_tokens(parts)], parts)
        assert len(calls) == (rank + 1 if layout == "contiguous" else 8)


def test_a_balanced_step_is_one_call_whose_spans_are_made_once(monkeypatch):
    """However many ranges a rank has; the layers of a batch and their backwards share spans."""
    counts = dict.fromkeys(("block_attention", "block_attention_backward", "range_bounds"), 0)

    def counted_call(name, call, *args, **options):
        counts[name] += 1
        return call(*args, **options)

    for name in counts:
        monkeypatch.setattr(_blocks, name, functools.partial(counted_call, name, getattr(_blocks, name)))
    case, size = Case(160, documents=(70, 3, 40, 9, 1, 37), layout="scattered"), 4
    assert (
        max(len(token_ranges.shard_ranges(case.shared_by(size).cp_layout, 160, size, rank)) for rank in range(size)) > 2
    )
    options, tensors = case.options(), case.tensors()
    for _ in range(3):  # layers
        LoopbackGroup(size).run(lambda transport: shared(case, transport, tensors, options=options))
    assert counts["range_bounds"] <= size * size
    assert counts["block_attention"] == counts["block_attention_backward"] <= 3 * size * size
