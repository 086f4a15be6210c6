"""When overlap pays, and in how many pieces: the model behind ``overlap="auto"``."""

import dataclasses
import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops._internal import overlap_model as model
from parallel_ops._internal import overlap_schedule as schedule
from parallel_ops._internal.overlap_schedule import OFF, TAPERED
from parallel_ops.comm import device_rates
from parallel_ops.planner import presets
from parallel_ops.tensor_parallel.linear import overlap_plan as plan

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
