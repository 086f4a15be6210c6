"""The schedules of the overlapped linears over the loopback transport, for any number of ranks, and their choice."""

import dataclasses
import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_ops._internal import overlap_model as model
from parallel_ops._internal import overlap_schedule as schedule
from parallel_ops._internal.overlap_schedule import OFF, TAPERED
from parallel_ops.comm import device_rates
from parallel_ops.comm.sum_partials import sum_partials
from parallel_ops.planner import presets
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


TASK = plan.Task(
    phase="gather", rows=8192, columns=7168, inner=8192, sent=7 * 8192 * 1024 * 2, size=8,
    dtype=torch.bfloat16, transport="test",
)  # fmt: skip
RATES = model.rates_of_sheet(989.5e12, 132, 450e9, 3.35e12)


@st.composite
def works(draw):
    rows, columns, inner = (draw(st.integers(1, 10**5)) for _ in range(3))
    phase, size = draw(st.sampled_from(["gather", "scatter"])), draw(st.integers(2, 64))
    width = inner if phase == "gather" else columns
    return model.Work(
        phase, rows, columns, inner, sent=2 * width * rows * (size - 1) // size, size=size,
        exact=draw(st.booleans()), takes_processors=draw(st.booleans()), lanes=draw(st.integers(1, 2)),
    )  # fmt: skip


@st.composite
def device_of(draw):
    processors = draw(st.integers(4, 160))
    return model.Rates(
        flops=draw(st.floats(1e11, 2e13)), processors=processors, bandwidth=draw(st.floats(1e9, 1e12)),
        memory_bandwidth=draw(st.floats(1e11, 1e13)), latency=draw(st.floats(0, 1e-4)),
        taken=draw(st.integers(0, processors)), host_message=draw(st.floats(0, 1e-4)),
    )  # fmt: skip


def chosen(work, rates):
    return model.times(work, rates, model.choose(work, rates)).total


class TestModel:
    def test_hides_what_can_be_hidden(self):
        assert schedule.is_cut(plan.modelled(TASK, RATES))
        whole, best = (model.times(TASK, RATES, n).total for n in (OFF, plan.modelled(TASK, RATES)))
        assert best < 0.98 * whole

    def test_a_second_stream_fills_the_last_waves(self):
        """Pieces of 224 tiles on 132 processors are two waves each, and 14 together, where one after another has 16."""
        task = dataclasses.replace(TASK, takes_processors=False)
        two, one = (model.times(dataclasses.replace(task, lanes=n), RATES, 1) for n in (2, 1))
        tile = (two.product - RATES.launch) / two.waves
        assert (two.tiles, two.waves, two.products) == (one.tiles, one.waves, one.products) == (224, 2, 8)
        assert two.computing == pytest.approx(14 * tile, rel=0.01)
        assert one.computing == pytest.approx(8 * one.product)
        assert model.times(task, RATES, OFF).total > 1.15 * two.total

    def test_larger_products_where_messages_are_fast(self):
        """On one stream, where each product ends on a wave that is not full."""
        task = dataclasses.replace(TASK, takes_processors=False, columns=3584, lanes=1)
        assert plan.modelled(task, RATES) == TAPERED
        whole, tapered, one = (model.times(task, RATES, way) for way in (OFF, TAPERED, 1))
        assert (one.products, tapered.products) == (8, 5)
        assert tapered.communication == one.communication
        assert whole.computing < tapered.computing < one.computing
        slow = dataclasses.replace(RATES, bandwidth=RATES.bandwidth / 8)  # the last messages are not hidden
        assert model.times(task, slow, TAPERED).total > model.times(task, slow, 1).total

    @given(
        data=st.data(),
        lanes=st.integers(1, 3),
        processors=st.integers(1, 9),
        launch=st.sampled_from([0.0, 0.25]),
        late=st.sampled_from([0.0, 0.5, 3.0, 7.25]),
    )
    def test_tiles_take_the_first_processors_that_are_free(self, data, lanes, processors, launch, late):
        products = data.draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40)), min_size=1, max_size=6))
        products = list(zip(accumulate(ready for ready, _ in products), (n for _, n in products), strict=True))
        found = schedule.Processors(lanes, [(0.0, processors), (late, 2)], launch, 1.0, {n: n for _, n in products})
        free, ends = [0.0] * processors + [late] * 2, [0.0] * lanes
        for ready, tiles in products:
            start, last = max(ready, ends.pop(0)) + launch, 0.0
            for _ in range(tiles):
                free.sort()
                free[0] = max(free[0], start) + 1.0
                last = max(last, free[0])
            ends.append(last)
            assert found.run(tiles, float(ready)) == pytest.approx(last)

    def test_does_not_overlap_where_it_does_not_pay(self):
        small = dataclasses.replace(TASK, rows=64, sent=7 * 8 * 8192 * 2)  # every piece costs as much as the whole
        assert plan.modelled(small, RATES) == OFF
        free = dataclasses.replace(RATES, bandwidth=math.inf, latency=0.0)
        assert plan.modelled(TASK, free) == OFF
        assert plan.modelled(TASK, None) == OFF

    def test_what_pieces_cost(self):
        """Each of it alone is enough to leave a task whole that is cut without it."""
        task = dataclasses.replace(TASK, takes_processors=False)
        assert model.choose(task, RATES) != OFF
        assert model.choose(task, dataclasses.replace(RATES, host_message=1e-3)) == OFF
        assert "the host" in model.reason(task, dataclasses.replace(RATES, host_message=1e-3))
        assert model.choose(task, dataclasses.replace(RATES, latency=1e-3)) == OFF
        assert model.choose(task, dataclasses.replace(RATES, memory_bandwidth=1e10)) == OFF
        kernels = dataclasses.replace(task, takes_processors=True)
        assert model.choose(kernels, dataclasses.replace(RATES, taken=131)) == OFF
        fewer_tiles = dataclasses.replace(task, columns=1024, lanes=1)
        assert model.choose(fewer_tiles, RATES) == OFF
        assert "waves that are not full" in model.reason(fewer_tiles, RATES)

    @given(work=works(), rates=device_of())
    def test_never_slower_than_the_plain_way_nor_faster_than_its_parts(self, work, rates):
        plain = model.times(work, rates, OFF)
        assert chosen(work, rates) <= plain.total
        for way in model.CANDIDATES[1:]:
            cut = model.times(work, rates, way)
            assert cut.total >= 0.999 * max(cut.computing, cut.communication, cut.host)
            assert cut.products * cut.product >= 0.999 * cut.computing >= 0.998 * (plain.product - rates.launch)
        assert model.choose(work, rates) in model.CANDIDATES
        assert model.reason(work, rates).startswith("hides" if chosen(work, rates) < plain.total else "pieces take")

    @given(work=works(), rates=device_of(), factor=st.floats(1.0, 10.0))
    def test_what_is_faster_makes_the_choice_faster(self, work, rates, factor):
        before = chosen(work, rates)
        for name in ("bandwidth", "memory_bandwidth", "flops"):
            better = dataclasses.replace(rates, **{name: getattr(rates, name) * factor})
            assert chosen(work, better) <= before / model.MARGIN
        for name in ("latency", "launch", "host_message", "host_product"):
            worse = dataclasses.replace(rates, **{name: getattr(rates, name) * factor})
            assert chosen(work, worse) >= before * model.MARGIN

    def test_data_sheets_are_those_of_the_planner(self):
        for major, gpu in ((8, "a100-80"), (9, "h100"), (10, "b200")):
            sheet, link = presets.gpu(gpu), presets.cluster(gpu).intra.bandwidth
            assert device_rates._SHEETS[major] == (sheet.bf16, link, sheet.bandwidth)

    def test_sequences_of_about_one_length_share_a_choice(self):
        same, other = (dataclasses.replace(TASK, rows=rows, sent=rows * 100) for rows in (9001, 7000))
        assert plan._alike(same) == plan._alike(dataclasses.replace(same, rows=8200, sent=8800 * 100))
        assert plan._alike(same) != plan._alike(other)
        assert [plan._roughly(n) for n in (0, 1, 5, 7, 8, 9, 100, 1023)] == [0, 1, 5, 7, 8, 8, 96, 896]

    def test_the_measured_choice_wants_a_margin(self):
        assert plan.pick(model.CANDIDATES, [1.0, 1.1, 0.99, 0.985, 1.2]) == plan.OFF
        assert plan.pick(model.CANDIDATES, [1.0, 1.1, 0.99, 0.9, 1.2]) == 2
        assert plan.pick(model.CANDIDATES, [1.0, 1.5, 1.5, 1.5, 1.5]) == plan.OFF


def test_cpu_tensors_are_not_timed():
    assert not plan.may_measure(torch.device("cpu"))
    assert [plan.encode("op", word) for word in ("off", "bulk", "auto", 3)] == [plan.OFF, plan.BULK, plan.AUTO, 3]
    assert [plan.decode(plan.encode("op", word)) for word in ("off", "bulk", "auto", 3)] == ["off", "bulk", "auto", 3]
