"""The schedules of the overlapped linears over the loopback transport, for any number of ranks, and their choice."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_ops.comm import device_rates
from parallel_ops.comm.sum_partials import sum_partials
from parallel_ops.planner import presets
from parallel_ops.tensor_parallel.linear import call, choose
from parallel_ops.tensor_parallel.linear.all_gather_linear import column_backward, column_forward
from parallel_ops.tensor_parallel.linear.choose import OFF
from parallel_ops.tensor_parallel.linear.chunked import (
    gather,
    gather_order,
    scatter,
    scatter_order,
    split,
    start_gather,
    start_scatter,
)
from parallel_ops.tensor_parallel.linear.linear_reduce_scatter import row_backward, row_forward
from support.parallelism.parallel_linear import integers
from support.transports.loopback import LoopbackGroup

groups = st.lists(st.integers(0, 4), min_size=1, max_size=16)
cuts = st.integers(1, 4)


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
@given(sizes=groups, chunks=cuts, seed=st.integers(0, 10**6), credits=st.integers(0, 2))
def test_gather_hands_out_every_row_once_own_rows_first(sizes, chunks, seed, credits):
    whole = torch.arange(sum(sizes) * 3).view(-1, 3)

    def run(transport):
        handed = []
        shard = whole.split(sizes)[transport.rank].clone()
        recorded = Recorded(transport)
        got = gather("test", recorded, shard, sizes, chunks, lambda span, rows: handed.append((span, rows.clone())))
        assert torch.equal(got, whole)
        assert [span for span, _ in handed] == list(gather_order(transport.rank, sizes, chunks))
        assert all(torch.equal(rows, whole[slice(*span)]) for span, rows in handed)
        assert sum(n for kind, _, n in recorded.log if kind == "send") == sizes[transport.rank] * (len(sizes) - 1)
        first = sum(sizes[: transport.rank])
        mine = split((first, first + sizes[transport.rank]), chunks)
        assert [span for span, _ in handed[: len(mine)]] == mine
        return True

    assert all(LoopbackGroup(len(sizes), seed=seed, credits=credits).run(run))


@settings(max_examples=30)
@given(sizes=groups, chunks=cuts, seed=st.integers(0, 10**6), credits=st.integers(0, 2))
def test_scatter_sends_every_part_once_and_sums_in_rank_order(sizes, chunks, seed, credits):
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
        parts = scatter("test", recorded, sizes, chunks, torch.empty(0, 3), produce)
        assert asked == list(scatter_order(transport.rank, sizes, chunks))
        sent = [n for kind, _, n in recorded.log if kind == "send"]
        assert sum(sent) == sum(sizes) - sizes[transport.rank]
        return sum_partials(parts)

    totals = LoopbackGroup(size, seed=seed, credits=credits).run(run)
    for rank, total in enumerate(totals):
        want = torch.zeros_like(total)
        for source in range(size):
            want = want + part(source).split(sizes)[rank]
        assert torch.equal(total, want)


@settings(max_examples=20)
@given(sizes=groups, seed=st.integers(0, 10**6))
def test_whole_exchanges(sizes, seed):
    whole = torch.arange(sum(sizes) * 2.0).view(-1, 2)

    def run(transport):
        got, arriving = start_gather("test", transport, whole.split(sizes)[transport.rank].clone(), sizes)
        arriving.wait()
        parts, shape = whole * (transport.rank + 1), (sizes[transport.rank], 2)
        scattered = start_scatter("test", transport, parts, sizes, shape, exact=True)
        return got, scattered.total()

    scale = len(sizes) * (len(sizes) + 1) / 2
    for rank, (got, total) in enumerate(LoopbackGroup(len(sizes), seed=seed).run(run)):
        assert torch.equal(got, whole)
        assert torch.equal(total, scale * whole.split(sizes)[rank])


@settings(max_examples=20)
@given(
    sizes=groups,
    chunks=st.sampled_from([OFF, 1, 2, 3]),
    needs_x=st.booleans(),
    needs_weight=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_both_linears_at_any_size(sizes, chunks, needs_x, needs_weight, seed):
    """On integers, so that the sums are exact: every rank gets its part of the linear of one process."""
    size, s = len(sizes), sum(sizes)
    x, dy = integers(s, 4, seed=seed), integers(s, 3, seed=seed + 1)
    weights = [integers(3, 4, seed=seed + 2 + rank) for rank in range(size)]

    def run(transport):
        rank, weight = transport.rank, weights[transport.rank]
        shard, kept = x.split(sizes)[rank].clone(), []
        (y,) = column_forward(transport, shard, sizes, [weight], [None], chunks)
        assert torch.equal(y, x @ weight.t())
        dx = column_backward(
            transport, [dy], shard, sizes, [weight],
            needs_x=needs_x, products=kept.append if needs_weight else None,
        )  # fmt: skip
        assert all(torch.equal(whole, x) for whole in kept) and len(kept) == needs_weight
        want = sum(dy @ w for w in weights).split(sizes)[rank]
        assert torch.equal(dx, want) if needs_x else dx is None

        z = row_forward(transport, x, sizes, weight, integers(3, seed=9), chunks)
        assert torch.equal(z, sum(x @ w.t() for w in weights).split(sizes)[rank] + integers(3, seed=9))
        dx, whole = row_backward(transport, dy.split(sizes)[rank].clone(), sizes, weight, chunks, needs_x=needs_x)
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


def test_cpu_tensors_are_not_timed():
    assert not choose.may_measure(torch.device("cpu"))
    words = ["off", "auto", "symmetric", 3]
    assert [call.encode("op", word) for word in words] == [OFF, call.AUTO, call.SYMMETRIC, 3]


H100 = device_rates.rates_of_sheet(989.5e12, 450e9)
FC1 = choose.Product("gather", 8192, 7168, 8192, 7 * 8192 * 1024 * 2, 8, True, torch.bfloat16, "c10d")


class TestRule:
    """What decides in deterministic mode: bytes and the time of the matmul."""

    @pytest.mark.parametrize("phase", ["gather", "scatter"])
    def test_cuts_where_messages_and_products_hide_each_other(self, phase):
        assert choose.by_rule(dataclasses.replace(FC1, phase=phase), H100) > OFF

    def test_leaves_whole_what_has_little_to_hide(self):
        assert choose.by_rule(dataclasses.replace(FC1, sent=FC1.sent // 20), H100) == OFF  # less than chunks cost
        assert choose.by_rule(dataclasses.replace(FC1, rows=64, sent=FC1.sent // 128), H100) == OFF  # latencies
        assert choose.by_rule(dataclasses.replace(FC1, columns=8), H100) == OFF  # hardly a matmul
        assert choose.by_rule(FC1, None) == OFF  # an unknown device, or a CPU

    @given(
        rows=st.integers(1, 10**5), columns=st.integers(1, 10**5), sent=st.integers(1, 10**9), size=st.integers(2, 64),
        phase=st.sampled_from(["gather", "scatter"]),
    )  # fmt: skip
    def test_is_one_of_the_candidates(self, rows, columns, sent, size, phase):
        product = dataclasses.replace(FC1, rows=rows, columns=columns, sent=sent, size=size, phase=phase)
        assert choose.by_rule(product, H100) in choose.CANDIDATES

    def test_data_sheets_are_those_of_the_planner(self):
        for major, gpu in ((8, "a100-80"), (9, "h100"), (10, "b200")):
            assert device_rates._SHEETS[major] == (presets.gpu(gpu).bf16, presets.cluster(gpu).intra.bandwidth)


def test_the_measured_choice_wants_a_margin():
    assert choose.pick([1.0, 1.1, 0.99, 0.985]) == OFF
    assert choose.pick([1.0, 1.1, 0.9, 0.99]) == 2
    assert choose.pick([1.0, 1.5, 1.5, 1.5]) == OFF


def test_sequences_of_about_one_length_share_a_choice():
    assert [choose.roughly(n) for n in (0, 1, 5, 7, 8, 9, 100, 1023)] == [0, 1, 5, 7, 8, 8, 96, 896]
