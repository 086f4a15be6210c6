"""Ranks in one process: schedules, credits, and every deadlock an error."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops.comm.errors import PeerError
from parallel_ops.comm.transport.base import Receive, Send
from support.transports.loopback import LoopbackGroup

sizes = st.integers(1, 16)
seeds = st.none() | st.integers(0, 1000)


def shard(rank, n):
    return torch.arange(n, dtype=torch.float32) + 1000 * rank


def gather_directly(transport, lengths):
    """Every shard from its owner, own shard first."""
    rank, size = transport.rank, transport.size
    parts = [shard(rank, lengths[rank]) if r == rank else torch.empty(lengths[r]) for r in range(size)]
    peers = [(rank + step) % size for step in range(1, size)]
    receives = transport.post("gather", [Receive(parts[p], p) for p in peers])
    sends = transport.post("gather", [Send(parts[rank], p) for p in reversed(peers)])
    for handle in (*receives, *sends):
        handle.wait()
    return torch.cat(parts)


def gather_in_a_ring(transport, lengths):
    """Each shard from the neighbour, which got it a step before."""
    rank, size = transport.rank, transport.size
    parts = [shard(rank, lengths[rank]) if r == rank else torch.empty(lengths[r]) for r in range(size)]
    for step in range(size - 1):
        send, receive = (rank - step) % size, (rank - step - 1) % size
        chunks = [Send(parts[send], (rank + 1) % size), Receive(parts[receive], (rank - 1) % size)]
        for handle in transport.post("ring", chunks):
            handle.wait()
    return torch.cat(parts)


@pytest.mark.parametrize("gather", [gather_directly, gather_in_a_ring])
@given(size=sizes, seed=seeds, credits=st.integers(0, 2), data=st.data())
def test_schedules_in_any_interleaving(gather, size, seed, credits, data):
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    group = LoopbackGroup(size, seed=seed, credits=credits)
    whole = torch.cat([shard(r, n) for r, n in enumerate(lengths)])
    for result in group.run(lambda transport: gather(transport, lengths)):
        assert torch.equal(result, whole)


def programs(draw, size):
    """Transfers between ranks in an order that all ranks follow, in batches, each waited for at the end or at once."""
    ends = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).filter(lambda e: e[0] != e[1])
    return draw(st.lists(st.lists(ends, min_size=1, max_size=4), max_size=8)), draw(st.booleans())


def follow(transport, batches, at_once):
    """Each batch posted whole; the sum of what arrived."""
    held, total = [], 0.0
    for number, batch in enumerate(batches):
        chunks = []
        for source, target in batch:
            if transport.rank == source:
                chunks.append(Send(torch.tensor([float(number)]), target))
            elif transport.rank == target:
                chunks.append(Receive(torch.empty(1), source))
        handles = transport.post(f"batch {number}", chunks)
        held += zip(handles, chunks, strict=True)
        if at_once:
            for handle in handles:
                handle.wait()
    for handle, chunk in held:
        handle.wait()
        total += chunk.tensor.item() if isinstance(chunk, Receive) else 0.0
    return total


@given(size=st.integers(2, 16), seed=seeds, credits=st.integers(0, 2), data=st.data())
def test_ranks_that_follow_one_order_never_deadlock(size, seed, credits, data):
    batches, at_once = programs(data.draw, size)
    totals = LoopbackGroup(size, seed=seed, credits=credits).run(lambda t: follow(t, batches, at_once))
    for rank, total in enumerate(totals):
        assert total == sum(n for n, batch in enumerate(batches) for _, target in batch if target == rank)


@given(size=st.integers(2, 16), seed=seeds, credits=st.integers(0, 2), data=st.data())
def test_a_rank_that_leaves_something_out_is_found(size, seed, credits, data):
    """Whatever chunk one rank forgets, the run ends, and with an error."""
    batches, at_once = programs(data.draw, size)
    chunks = [(n, i) for n, batch in enumerate(batches) for i in range(len(batch))]
    if not chunks:
        return
    number, index = data.draw(st.sampled_from(chunks))
    forgetful = data.draw(st.sampled_from(batches[number][index]))

    def main(transport):
        if transport.rank != forgetful:
            return follow(transport, batches, at_once)
        mine = [[e for i, e in enumerate(b) if (n, i) != (number, index)] for n, b in enumerate(batches)]
        return follow(transport, mine, at_once)

    with pytest.raises(PeerError, match=r"rank \d+"):
        LoopbackGroup(size, seed=seed, credits=credits).run(main)


@given(size=st.integers(2, 16), seed=seeds)
def test_a_cycle_of_receives_is_a_deadlock_on_every_rank(size, seed):
    def main(transport):
        left, right = (transport.rank - 1) % size, (transport.rank + 1) % size
        (handle,) = transport.post("ring", [Receive(torch.empty(1), left)])
        handle.wait()
        transport.post("ring", [Send(torch.ones(1), right)])

    outcomes = LoopbackGroup(size, seed=seed).outcomes(main)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, PeerError)
        assert f"ring: rank {rank} waits for a chunk from rank {(rank - 1) % size}, in vain" in str(outcome)


@given(size=st.integers(2, 16), seed=seeds, credits=st.integers(0, 4), ahead=st.integers(1, 4))
def test_credits_allow_that_many_chunks_ahead(size, seed, credits, ahead):
    """Each rank sends `ahead` chunks, waits for them, and only then receives."""

    def main(transport):
        left, right = (transport.rank - 1) % size, (transport.rank + 1) % size
        for i in range(ahead):
            (handle,) = transport.post("push", [Send(torch.tensor([float(i)]), right)])
            handle.wait()
        got = [torch.empty(1) for _ in range(ahead)]
        for handle in transport.post("push", [Receive(t, left) for t in got]):
            handle.wait()
        return torch.cat(got).tolist()

    group = LoopbackGroup(size, seed=seed, credits=credits)
    if ahead <= credits:
        assert group.run(main) == [[float(i) for i in range(ahead)]] * size
    else:
        with pytest.raises(PeerError, match=r"push: rank \d+ waits for a chunk to be received by rank \d+, in vain"):
            group.run(main)


def pair(first, second, **options):
    return LoopbackGroup(2, **options).outcomes(lambda t: (first, second)[t.rank](t))


def test_a_chunk_is_not_there_before_its_wait():
    def receive(transport):
        x = torch.zeros(3)
        (handle,) = transport.post("test", [Receive(x, 0)])
        transport.barrier("test")
        early = x.clone()
        transport.barrier("test")
        handle.wait()
        return early, x

    def send(transport):
        x = torch.ones(3)
        (handle,) = transport.post("test", [Send(x, 1)])
        transport.barrier("test")
        x.fill_(2)  # too early: the handle was not waited for
        transport.barrier("test")
        handle.wait()
        x.fill_(3)

    early, late = pair(send, receive, seed=0)[1]
    assert early.isnan().all()
    assert torch.equal(late, torch.full((3,), 2.0))


def test_sizes_that_differ():
    def one(transport, kind, n):
        (handle,) = transport.post("test", [kind(torch.ones(n), 1 - transport.rank)])
        handle.wait()

    outcomes = pair(lambda t: one(t, Send, 2), lambda t: one(t, Receive, 3))
    for outcome in outcomes:
        assert isinstance(outcome, PeerError)
        assert "8 bytes sent, 12 expected" in str(outcome)


def test_a_handle_that_is_never_waited_for():
    def send(transport):
        transport.post("test", [Send(torch.ones(1), 1)])

    def receive(transport):
        transport.post("test", [Receive(torch.ones(1), 0)])[0].wait()

    outcomes = pair(send, receive)
    assert str(outcomes[0]) == "test: rank 0 ended without waiting for a chunk to be received by rank 1"
    assert outcomes[1] is None


def test_a_rank_that_raises_ends_the_others():
    def fails(transport):
        raise KeyError("broken")

    def waits(transport):
        transport.barrier("sync")

    outcomes = pair(fails, waits)
    assert isinstance(outcomes[0], KeyError)
    assert str(outcomes[1]) == "sync: rank 1 waits at a barrier, in vain: rank 0 raised KeyError"
    with pytest.raises(KeyError):
        LoopbackGroup(2).run(lambda t: (waits, fails)[t.rank](t))


@given(size=sizes, seed=st.integers(0, 1000))
def test_the_same_seed_gives_the_same_run(size, seed):
    def trace():
        order = []

        def main(transport):
            for _ in range(3):
                order.append(transport.rank)
                transport.barrier("test")

        LoopbackGroup(size, seed=seed).run(main)
        return order

    first = trace()
    assert first == trace()
    assert sorted(first) == sorted(itertools.chain(*[range(size)] * 3))


@pytest.mark.parametrize(
    ("chunk", "error", "message"),
    [
        (lambda: Send(torch.ones(1), 0), ValueError, "chunks[0].peer is 0, but must be another rank of the 2"),
        (lambda: Send(torch.ones(1), 2), ValueError, "chunks[0].peer is 2"),
        (lambda: Receive(torch.ones(4, 4).t(), 1), ValueError, "chunks[0] must be contiguous, got strides (1, 4)"),
        (
            lambda: Send(torch.ones(1, device="meta"), 1),
            ValueError,
            "chunks[0] is on meta, but loopback sends from cpu",
        ),
        (lambda: Send(3, 1), TypeError, "chunks[0].tensor must be a tensor, got int"),
        (lambda: torch.ones(1), TypeError, "chunks[0] must be a Send or a Receive, got Tensor"),
    ],
)
def test_chunks_that_cannot_be_sent(chunk, error, message):
    outcome = pair(lambda t: t.post("test", [chunk()]), lambda t: None)[0]
    assert isinstance(outcome, error)
    assert f"test: {message}" in str(outcome)
