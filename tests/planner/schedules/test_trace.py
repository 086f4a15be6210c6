"""Pictures and traces of a measured pipeline."""

import importlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops.planner.pictures.bars import bars
from parallel_ops.planner.pictures.trace import chrome_trace, measured, trace_svg
from parallel_ops.planner.schedules.schedule import KINDS, Action, Times, actions, simulate

TIMES = Times(forward=0.010, input_grad=0.013, weight_grad=0.009, link=0.0005, input_grad_first=True)
SLOWER = replace(TIMES, forward=0.012, link=0.002)
# Seconds since some start.
LATER = 12345.5


def ran(kind, pp=4, micro_batches=8):
    """A planned pipeline, and a slower one as a run would measure it."""
    schedule = actions(kind, pp, micro_batches, 2 if kind == "interleaved" else 1)
    found = simulate(schedule, SLOWER)
    starts, ends = ([[time + LATER for time in row] for row in rows] for rows in (found.starts, found.ends))
    return simulate(schedule, TIMES), measured(schedule, starts, ends)


@pytest.mark.parametrize("kind", KINDS)
def test_a_measured_pipeline_is_a_simulation(kind):
    planned, found = ran(kind)
    expected = simulate(planned.schedule, SLOWER)
    assert found.schedule == expected.schedule
    assert min(row[0] for row in found.starts) == 0
    for rows, others in ((found.starts, expected.starts), (found.ends, expected.ends)):
        assert [*map(list, rows)] == [pytest.approx(row, abs=1e-8) for row in others]
    assert found.busy == pytest.approx(expected.busy, abs=1e-8)
    assert found.step_time == pytest.approx(expected.step_time, abs=1e-8)
    assert found.bubble == pytest.approx(expected.bubble, abs=1e-8)
    assert found.peak_activations == expected.peak_activations


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=12))
def test_time_in_which_actions_overlap_is_busy_once(spans):
    spans.sort()
    schedule = [[Action("F", n, 0) for n in range(len(spans))]]
    found = measured(schedule, [[start for start, _ in spans]], [[start + length for start, length in spans]])
    covered = {second for start, length in spans for second in range(start, start + length)}
    assert found.busy == [len(covered)]


@pytest.mark.parametrize(
    ("starts", "ends", "message"),
    [
        ([[0, 1]], [[1, 2], [2, 3]], r"actions a rank are \[2, 2\], but starts \[2\] and ends \[2, 2\]"),
        ([[0, 1], [1]], [[1, 2], [2, 3]], r"but starts \[2, 1\] and ends \[2, 2\]"),
        ([[0, 1], [1, 2]], [[1, 2], [2, 3, 4]], r"ends \[2, 3\]"),
        ([[0, 1], [1, 2]], [[1, 2], [2, 1]], "rank 1 has B0 of stage 1 from 2 to 1: it ends before it starts"),
        ([[3, 1], [1, 2]], [[4, 5], [2, 3]], "rank 0 has B0 of stage 0 from 1 to 5: its predecessor starts at 3"),
        ([[0, math.nan], [1, 2]], [[1, 2], [2, 3]], "from nan to 2; times must be finite"),
    ],
)
def test_times_that_are_no_measurement(starts, ends, message):
    schedule = actions("1f1b", 2, 1)
    with pytest.raises(ValueError, match=f"measured: .*{message}"):
        measured(schedule, starts, ends)


def test_a_rank_without_actions():
    for empty in ([], [[]]):
        with pytest.raises(ValueError, match="every rank needs at least one action"):
            measured(empty, empty, empty)


@pytest.mark.parametrize("kind", KINDS)
def test_both_pipelines_have_every_action(kind):
    """Each over the full width."""
    pytest.importorskip("matplotlib")
    both = ran(kind)
    figure = importlib.import_module("parallel_ops.planner.pictures.figure").figure_of_both(both, ("", ""), "a run")
    for axes, pipeline in zip(figure.axes, both, strict=True):
        assert axes.get_xlim() == (0, pipeline.step_time)
        drawn = [corners for bars in axes.collections[1:] for corners in bars.get_paths()]  # after the bubble
        assert len(drawn) == sum(map(len, pipeline.schedule))


def test_the_captions_have_the_figures():
    pytest.importorskip("matplotlib")
    planned, found = ran("1f1b")
    root = ElementTree.fromstring(trace_svg(planned, found, title="1f1b of <llama> & co"))
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "1f1b of <llama> & co" in words
    captions = [text for text in words if "bubble " in text]
    for caption, pipeline in zip(captions, (planned, found), strict=True):
        assert f"step {1e3 * pipeline.step_time:.3g} ms, bubble {pipeline.bubble:.1%}" in caption
    assert "scaled to the full width" in captions[0] and "scaled to the same width" in captions[1]
    longer = found.step_time / planned.step_time - 1
    assert captions[1].endswith(f"though its step is {longer:.1%} longer")
    assert {"forward", "whole backward", "bubble"} <= set(words)
    assert "is 20.0% shorter" in trace_svg(found, measured(found.schedule, *faster(found, 0.8)), title="")


def faster(simulation, factor):
    return ([[factor * time for time in row] for row in rows] for rows in (simulation.starts, simulation.ends))


def test_a_pair_that_ran_one_after_the_other_has_whole_rows():
    order = [[Action("F", 0, 0), Action("F", 1, 0, True), Action("B", 0, 0), Action("B", 1, 0)]]
    together = measured(order, [[0, 1, 1, 4]], [[1, 4, 4, 6]])
    assert [bar.half for bar in bars(together, 0)] == [0, 1, 2, 0]
    apart = measured(order, [[0, 1, 2, 4]], [[1, 2, 4, 6]])
    assert [bar.half for bar in bars(apart, 0)] == [0, 0, 0, 0]
    assert together.busy == apart.busy == [6]


def test_pipelines_that_do_not_compare():
    planned, found = ran("1f1b")
    with pytest.raises(ValueError, match="the planned pipeline has 2 ranks, the measured one 4"):
        trace_svg(ran("1f1b", 2)[0], found, title="")
    with pytest.raises(ValueError, match="takes no time"):
        trace_svg(simulate(planned.schedule, Times(forward=0, input_grad=0, weight_grad=0)), found, title="")


@pytest.mark.parametrize("kind", KINDS)
def test_a_chrome_trace_has_every_action_once(kind):
    _, found = ran(kind)
    data = json.loads(json.dumps(chrome_trace(found), allow_nan=False))
    events = [event for event in data["traceEvents"] if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in data["traceEvents"] if event["name"] == "thread_name"}
    assert names == {rank: f"pipeline rank {rank}" for rank in range(4)}
    for rank, rows in enumerate(zip(found.schedule, found.starts, found.ends, strict=True)):
        own = [event for event in events if event["tid"] == rank]
        assert len(own) == len(found.schedule[rank])
        for event, action, start, end in zip(own, *rows, strict=True):
            assert event["name"] == f"{action.kind}{action.micro_batch} of stage {action.stage}"
            assert (event["pid"], event["ts"]) == (0, pytest.approx(1e6 * start))
            assert event["ts"] + event["dur"] == pytest.approx(1e6 * end)
            assert event["args"] == {"kind": action.kind, "micro_batch": action.micro_batch, "stage": action.stage}
    assert len({(event["name"], event["tid"]) for event in events}) == len(events)


def test_it_needs_no_extra():
    """Recording a pipeline, and its events, need no package of the command line."""
    extras = {"rich", "matplotlib", "torch"}
    script = f"import sys; import parallel_ops.planner.pictures.trace; print({extras} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
