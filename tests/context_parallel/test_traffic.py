"""Messages, bytes and calls of the block op of attention that ranks share, over the loopback transport."""

import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_ops.comm.transport.base import Send
from parallel_ops.context_parallel import AttentionShape, cost, token_ranges
from parallel_ops.context_parallel.schedule import blocks as _blocks
from support.parallelism.context_parallel import KINDS, Case, cases, joined, oracle, shared
from support.transports.loopback import LoopbackGroup


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
