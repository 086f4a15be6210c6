"""The schedules of the overlapped linears over the loopback transport, for any number of ranks, and their choice."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_ops._internal import overlap_schedule as schedule
from parallel_ops._internal.overlap_schedule import OFF, TAPERED
from parallel_ops.comm.sum_partials import sum_partials
from parallel_ops.tensor_parallel.linear import overlap_plan as plan
from parallel_ops.tensor_parallel.linear.all_gather_linear import column_backward, column_forward
from parallel_ops.tensor_parallel.linear.linear_reduce_scatter import row_backward, row_forward
from parallel_ops.tensor_parallel.linear.overlap import (
    gather,
    gather_order,
    scatter,
    scatter_order,
    split,
    start_gather,
    start_scatter,
)
from support.loopback import LoopbackGroup
from support.parallel_linear import integers

groups = st.lists(st.integers(0, 4), min_size=1, max_size=16)
cuts = st.sampled_from([TAPERED, 1, 2, 3, 4])


class Recorded:
    """A transport that keeps what goes through it, in order: ("send" or "receive", peer, rows)."""

    def __init__(self, transport):
        self._transport, self.log = transport, []

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def post(self, op, chunks):
        self.log += [(type(c).__name__.lower(), c.peer, c.tensor.shape[0]) for c in chunks]
        return self._transport.post(op, chunks)


@settings(max_examples=30)
@given(sizes=groups, pieces=cuts, seed=st.integers(0, 10**6), credits=st.integers(0, 2))
def test_gather_hands_out_every_row_once_own_rows_first(sizes, pieces, seed, credits):
    whole = torch.arange(sum(sizes) * 3).view(-1, 3)

    def run(transport):
        handed = []
        shard = whole.split(sizes)[transport.rank].clone()
        recorded = Recorded(transport)
        got = gather("test", recorded, shard, sizes, pieces, lambda span, rows: handed.append((span, rows.clone())))
        assert torch.equal(got, whole)
        assert [span for span, _ in handed] == list(gather_order(transport.rank, sizes, pieces))
        assert all(torch.equal(rows, whole[slice(*span)]) for span, rows in handed)
        assert sum(n for kind, _, n in recorded.log if kind == "send") == sizes[transport.rank] * (len(sizes) - 1)
        first = sum(sizes[: transport.rank])
        mine = split((first, first + sizes[transport.rank]), max(1, pieces))
        assert [span for span, _ in handed[: len(mine)]] == mine
        return True

    assert all(LoopbackGroup(len(sizes), seed=seed, credits=credits).run(run))


@settings(max_examples=30)
@given(sizes=groups, pieces=cuts, seed=st.integers(0, 10**6), credits=st.integers(0, 2))
def test_scatter_sends_every_part_once_and_sums_in_rank_order(sizes, pieces, seed, credits):
    size = len(sizes)

    def part(rank):
        return torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(rank))

    def run(transport):
        mine, asked = part(transport.rank), []

        def produce(span, out):
            asked.append(span)
            rows = mine[slice(*span)].clone()
            return rows if out is None else out.copy_(rows)

        recorded = Recorded(transport)
        parts = scatter("test", recorded, sizes, pieces, torch.empty(0, 3), produce)
        assert asked == list(scatter_order(transport.rank, sizes, pieces))
        sent = [n for kind, _, n in recorded.log if kind == "send"]
        assert sum(sent) == sum(sizes) - sizes[transport.rank]
        return sum_partials(parts)

    totals = LoopbackGroup(size, seed=seed, credits=credits).run(run)
    for rank, total in enumerate(totals):
        want = torch.zeros_like(total)
        for source in range(size):
            want = want + part(source).split(sizes)[rank]
        assert torch.equal(total, want)


@pytest.mark.parametrize(
    ("rank", "size", "gathers", "scatters"),
    [
        (0, 8, [1, 2, 4], [4, 2, 1]),
        (5, 8, [1, 1, 3, 2], [2, 2, 2, 1]),
        (6, 8, [1, 2, 4], [1, 3, 2, 1]),
        (7, 8, [1, 2, 4], [4, 2, 1]),
        (1, 2, [1], [1]),
        (0, 1, [], []),
    ],
)
def test_tapered_products_take_what_lies_side_by_side(rank, size, gathers, scatters):
    sizes = [2] * size
    for phase, spans, own, counts in (
        ("gather", list(gather_order(rank, sizes, TAPERED)), 0, gathers),
        ("scatter", list(scatter_order(rank, sizes, TAPERED)), -1, scatters),
    ):
        assert schedule.order(phase, size, rank, TAPERED) == tuple(counts)
        assert tuple(counts) in schedule.orders(phase, size, TAPERED)
        assert spans.pop(own) == (2 * rank, 2 * rank + 2)
        assert [(stop - start) // 2 for start, stop in spans] == counts
        assert [n for span in spans for n in range(*span)] == [
            n for k in range(1, size) for n in range(2 * ((rank + k) % size), 2 * ((rank + k) % size) + 2)
        ]


@settings(max_examples=20)
@given(sizes=groups, seed=st.integers(0, 10**6))
def test_whole_exchanges(sizes, seed):
    whole = torch.arange(sum(sizes) * 2.0).view(-1, 2)

    def run(transport):
        got, arriving = start_gather("test", transport, whole.split(sizes)[transport.rank].clone(), sizes)
        arriving.wait()
        parts, shape = whole * (transport.rank + 1), (sizes[transport.rank], 2)
        scattered = start_scatter("test", transport, parts, sizes, shape, exact=True)
        scattered.wait()
        scattered.wait()  # again, for nothing
        return got, scattered.total()

    scale = len(sizes) * (len(sizes) + 1) / 2
    for rank, (got, total) in enumerate(LoopbackGroup(len(sizes), seed=seed).run(run)):
        assert torch.equal(got, whole)
        assert torch.equal(total, scale * whole.split(sizes)[rank])


@settings(max_examples=20)
@given(
    sizes=groups,
    pieces=st.sampled_from([OFF, TAPERED, 1, 2, 3]),
    bulk=st.booleans(),
    needs_x=st.booleans(),
    needs_weight=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_both_linears_at_any_size(sizes, pieces, bulk, needs_x, needs_weight, seed):
    """On integers, so that the sums are exact: every rank gets its part of the linear of one process."""
    size, s = len(sizes), sum(sizes)
    x, dy = integers(s, 4, seed=seed), integers(s, 3, seed=seed + 1)
    weights = [integers(3, 4, seed=seed + 2 + rank) for rank in range(size)]

    def run(transport):
        rank, weight = transport.rank, weights[transport.rank]
        shard, kept = x.split(sizes)[rank].clone(), []
        (y,) = column_forward(transport, shard, sizes, [weight], [None], pieces)
        assert torch.equal(y, x @ weight.t())
        dx = column_backward(
            transport, [dy], shard, sizes, [weight],
            bulk=bulk, needs_x=needs_x, products=kept.append if needs_weight else None,
        )  # fmt: skip
        assert all(torch.equal(whole, x) for whole in kept) and len(kept) == needs_weight
        want = sum(dy @ w for w in weights).split(sizes)[rank]
        assert torch.equal(dx, want) if needs_x else dx is None

        z = row_forward(transport, x, sizes, weight, integers(3, seed=9), pieces)
        assert torch.equal(z, sum(x @ w.t() for w in weights).split(sizes)[rank] + integers(3, seed=9))
        dx, whole = row_backward(transport, dy.split(sizes)[rank].clone(), sizes, weight, pieces, needs_x=needs_x)
        assert torch.equal(whole, dy)
        assert torch.equal(dx, dy @ weight) if needs_x else dx is None
        return True

    assert all(LoopbackGroup(size, seed=seed).run(run))


class StreamOrdered(Recorded):
    """As a transport on CUDA says of itself."""

    @property
    def capabilities(self):
        return dataclasses.replace(self._transport.capabilities, stream_ordered=True)


@pytest.mark.parametrize(("queues", "ahead"), [("1", 1), ("8", 2), (None, 2)])
def test_with_one_hardware_queue_no_exchange_waits_in_front_of_a_product(queues, ahead, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if queues is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    whole = torch.arange(24.0).view(8, 3)

    def run(transport):
        recorded, posted = StreamOrdered(transport), []
        got = gather(
            "test", recorded, whole.chunk(4)[transport.rank].clone(), [2] * 4, 1,
            lambda span, rows: posted.append(sum(kind == "receive" for kind, _, _ in recorded.log)),
        )  # fmt: skip
        assert torch.equal(got, whole)
        return posted

    for posted in LoopbackGroup(4, seed=0).run(run):
        assert posted == [min(3, ahead + i) for i in range(4)]


def test_16_bit_partial_sums_are_added_in_fp32_and_rounded_once():
    parts = torch.tensor([[256.0, 1.0], *[[1.0, 2.0**-9]] * 4]).bfloat16()
    total = sum_partials(parts)
    assert total.tolist() == [260.0, 1.0078125]  # one by one in bfloat16 256 + 1 is 256, and 1 + 2^-9 is 1
    assert sum_partials(parts[1:2], torch.tensor([0.5, 0.0]).bfloat16()).tolist() == [1.5, 2.0**-9]
    assert parts[0].tolist() == [256.0, 1.0]


def test_cpu_tensors_are_not_timed():
    assert not plan.may_measure(torch.device("cpu"))
    assert [plan.encode("op", word) for word in ("off", "bulk", "auto", 3)] == [plan.OFF, plan.BULK, plan.AUTO, 3]
    assert [plan.decode(plan.encode("op", word)) for word in ("off", "bulk", "auto", 3)] == ["off", "bulk", "auto", 3]
