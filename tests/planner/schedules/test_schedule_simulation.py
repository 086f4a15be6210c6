"""The simulation: against the formulas of the papers, against published bubbles, and by hand."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parallel_ops.planner.schedules import steady_state
from parallel_ops.planner.schedules.schedule import (
    KINDS,
    Action,
    Program,
    Times,
    actions,
    chunks,
    micro_batch_problem,
    simulate,
)
from parallel_ops.planner.schedules.steady_state import idle_time, step_time

WITHOUT_BARRIER = ("zb-h2", "zb-v", "zb-2p")


def F(mb, stage=0, paired=False):
    return Action("F", mb, stage, paired)


def B(mb, stage=0):
    return Action("B", mb, stage)


def published_idle(kind, pp, m, f, i, w):
    """Idle time of a rank with equal stages and no links, by the formulas of the papers; None outside their conditions.

    GPipe arXiv:1811.06965; 1F1B and interleaved arXiv:2104.04473, section 2.2; zero bubble arXiv:2401.10241, table 2
    and section 6; DualPipe-V github.com/deepseek-ai/DualPipe, where B is I + W.
    """
    small_w, equal = w <= min(f, i), f == i == w
    holds, each = {
        "gpipe": (True, f + i + w),
        "1f1b": (True, f + i + w),
        "interleaved": (True, f + i + w),
        "zb-h1": (small_w and m >= pp, f + i - w),
        "zb-h2": (small_w and m >= 2 * pp - 1, f + i - 2 * w),
        "zb-v": (equal and m >= 2 * pp, 0),
        "zb-2p": (equal and m >= 2 * pp, 0),
        "dualpipe-v": (w <= f == i, f + 2 * i - w),
    }[kind]
    return (pp - 1) * each if holds or pp == 1 else None


@given(
    st.sampled_from(KINDS),
    st.integers(1, 8),
    st.integers(1, 30),
    st.one_of(st.tuples(*[st.integers(1, 9)] * 3), st.just((1, 1, 1))),
)
def test_equal_stages_wait_as_published(kind, pp, m, passes):
    m = -(-m // pp) * pp if kind == "interleaved" else max(m, 2 * pp) if kind == "dualpipe-v" else m
    idle = published_idle(kind, pp, m, *passes)
    assume(idle is not None)
    times = Times(**dict(zip(("forward", "input_grad", "weight_grad"), passes, strict=True)))
    order = actions(kind, pp, m, 3 if kind == "interleaved" else 1, times=times if kind == "zb-2p" else None)
    simulation = simulate(order, times)
    step = simulation.step_time_without_barrier if kind in WITHOUT_BARRIER else simulation.step_time
    assert step == pytest.approx(simulation.busy[0] + idle)
    bubble = simulation.bubble_without_barrier if kind in WITHOUT_BARRIER else simulation.bubble
    assert bubble == pytest.approx(idle / step, abs=1e-12)


def test_a_program_has_the_times_of_its_simulation():
    for kind in KINDS:
        order = actions(kind, 4, 8, 2 if kind == "interleaved" else 1)
        times = Times(forward=2, input_grad=3, weight_grad=1, link=0.5)
        simulation = simulate(order, times)
        assert Program(order).step_time(times, barrier=True) == simulation.step_time
        assert Program(order).step_time(times, barrier=False) == simulation.step_time_without_barrier


@given(
    st.sampled_from([kind for kind in KINDS if kind != "zb-h2"]),
    st.sampled_from((2, 6, 8, 12, 16)),
    st.sampled_from((0.5, 0.75, 1, 1.5, 2, 4, 7)),
    st.tuples(st.floats(0.9, 1.6), st.floats(0.5, 1.1), st.sampled_from((0.0, 0.02, 0.1))),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=120)
def test_a_part_of_the_pipeline_stands_for_all_of_it(kind, pp, rounds, passes, barrier, first):
    """A search compares plans by this: at most 2.5 % off the step, also with fewer micro-batches than ranks. ZB-2p,
    which searches an order for each number of ranks, is up to 9 % faster with as many micro-batches as ranks."""
    i, w, link = passes
    v = 2 if kind in ("interleaved", "zb-v", "dualpipe-v") else 1
    m = max(1, int(pp * rounds))
    m = -(-m // pp) * pp if kind == "interleaved" else max(m, 2 * pp) if kind == "dualpipe-v" else m
    assume(kind != "zb-2p" or pp * m <= 300)  # four searches each
    times = Times(forward=1.0, input_grad=i, weight_grad=w, link=link, input_grad_first=first)
    whole = simulate(actions(kind, pp, m, v, times=times if kind == "zb-2p" else None), times)
    expected = whole.step_time if barrier else whole.step_time_without_barrier
    found = max(whole.busy) + idle_time(kind, pp, m, v, (1.0, i, w), link, barrier=barrier, input_grad_first=first)
    assert found == pytest.approx(expected, rel=0.1 if kind == "zb-2p" else 0.025)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("zb-h2", "zb-2p")])
@pytest.mark.parametrize("first", [False, True])
def test_many_micro_batches_go_on_as_the_first(kind, first, monkeypatch):
    v = chunks(kind, 3)
    times = Times(forward=1.0, input_grad=1.3, weight_grad=0.8, link=0.05, input_grad_first=first)
    exact = step_time(kind, 4, 48, v, times, barrier=True)
    assert exact == simulate(actions(kind, 4, 48, v), times).step_time
    monkeypatch.setattr(steady_state, "MOST_PASSES", 10)
    assert step_time(kind, 4, 48, v, times, barrier=True) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize(("kind", "sizes"), [("interleaved", [8, 8, 9, 7.9]), ("zb-v", [8, 7.7, 8, 8.5])])
def test_stages_that_differ_are_simulated_until_they_repeat(kind, sizes):
    """A slow stage delays the others for long: after three micro-batches a rank, 3 to 6 % of the step are missing."""
    times = Times(forward=sizes, input_grad=[1.2 * size for size in sizes], weight_grad=7.2, link=0.1)
    whole = simulate(actions(kind, 2, 80, 2), times).step_time
    assert step_time(kind, 2, 80, 2, times, barrier=True) == pytest.approx(whole, rel=1e-6)


def test_by_hand():
    """p = 2, m = 2 of 1F1B with F = 2, I = 3, W = 1 and a link of 1."""
    times = Times(forward=2, input_grad=3, weight_grad=1, link=1)
    simulation = simulate(actions("1f1b", 2, 2), times)
    #  rank 0: F0 0-2, F1 2-4, B0 10-14 (its gradient leaves rank 1 at 9), B1 16-20 (15)
    #  rank 1: F0 3-5, B0 5-9, F1 9-11, B1 11-15
    assert simulation.starts == [[0, 2, 10, 16], [3, 5, 9, 11]]
    assert simulation.ends == [[2, 4, 14, 20], [5, 9, 11, 15]]
    assert (simulation.step_time, simulation.busy) == (20, [12, 12])
    assert simulation.bubble == pytest.approx(0.4)
    assert simulation.spans == [20, 12]
    # The split: rank 1 sends the gradient before it computes W.
    split = simulate(actions("zb-h1", 2, 2), times)
    assert split.starts[0][2] == 9
    # As it may in a whole backward pass: gradients leave rank 1 at 8 and at 14.
    early = simulate(actions("1f1b", 2, 2), replace(times, input_grad_first=True))
    assert early.starts == [[0, 2, 9, 15], [3, 5, 9, 11]]
    assert early.ends == [[2, 4, 13, 19], [5, 9, 11, 15]]


def test_unequal_stages_and_links():
    times = Times(forward=[1, 2, 3], input_grad=[1, 1, 1], weight_grad=0, link=[10, 20])
    simulation = simulate(actions("gpipe", 3, 1), times)
    assert simulation.starts == [[0, 68], [11, 57], [33, 36]]
    assert simulation.bubbles == pytest.approx([1 - 2 / 69, 1 - 3 / 69, 1 - 4 / 69])
    assert simulation.bubble == pytest.approx(1 - 3 / 69)
    assert simulation.step_time_without_barrier == 69


def test_stages_on_one_rank_need_no_link():
    assert simulate(actions("interleaved", 1, 3, 2), Times(link=100)).step_time == 18
    # In a V the last two stages share a rank: with two ranks a micro-batch crosses 4 links, not 6.
    assert simulate(actions("zb-v", 2, 1), Times(link=100)).step_time == 4 * 100 + 10


def test_a_pair_runs_as_one():
    order = [[F(0), F(1, paired=True), B(0), B(1)]]
    simulation = simulate(order)
    assert simulation.starts == [[0, 1, 1, 4]]
    assert simulation.ends == [[1, 4, 4, 6]]
    shorter = simulate(order, Times(pair=2))
    assert (shorter.step_time, shorter.busy) == (5, [5])


@given(
    st.sampled_from([kind for kind in KINDS if kind != "zb-2p"]),
    st.integers(1, 6),
    st.integers(1, 12),
    st.lists(st.integers(0, 5), min_size=24, max_size=24),
    st.data(),
)
def test_slower_passes_never_make_a_shorter_step(kind, pp, m, slower, data):
    v = 2 if kind == "interleaved" else 1
    m = 2 * pp if micro_batch_problem(kind, pp, m) else m
    stages = pp * chunks(kind, v)
    base = data.draw(st.lists(st.integers(1, 5), min_size=stages, max_size=stages))
    schedule = actions(kind, pp, m, v)
    one = simulate(schedule, Times(forward=base))
    other = simulate(schedule, Times(forward=[b + s for b, s in zip(base, slower, strict=False)]))
    assert other.step_time >= one.step_time
    assert one.peak_activations == other.peak_activations


def test_retained_activations():
    schedule = actions("zb-h1", 4, 8)
    assert simulate(schedule, retained=0.5).peak_activations == (4, 3.5, 3, 2.5)
    assert simulate(schedule, retained=0).peak_activations == (4, 3, 2, 1)


def test_a_deadlock_names_who_waits_for_what():
    order = [[F(0), B(0), F(1), B(1)], [F(1, 1), F(0, 1), B(0, 1), B(1, 1)]]
    message = (
        r"deadlock: rank 0 waits at action 1 \(B0 of stage 0\) for I0 of stage 1 on rank 1; rank 1 waits at action 0"
    )
    with pytest.raises(ValueError, match=message):
        simulate(order)
    with pytest.raises(ValueError, match=r"rank 0 waits at action 0 \(B0 of stage 0\) for F0 of stage 0 on rank 0"):
        simulate([[B(0), F(0)]])
    with pytest.raises(ValueError, match=r"\(W0 of stage 0\) for I0 of stage 0"):
        simulate([[F(0), Action("W", 0, 0), Action("I", 0, 0)]])


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([], "every rank needs at least one action"),
        ([[F(0), B(0)], []], "every rank needs at least one action"),
        ([[F(0), F(0), B(0)]], "F0 of stage 0 runs twice"),
        ([[F(0), B(0), Action("W", 0, 0)]], "W0 of stage 0 runs twice"),
        ([[F(0), Action("I", 0, 0)]], "W0 of stage 0 is missing"),
        ([[F(0), B(0), B(1)]], "F1 of stage 0 is missing"),
        ([[F(0), B(0)], [F(1), B(1)]], "stage 0 is on rank 0 and on rank 1"),
        ([[F(0, paired=True), Action("I", 0, 0), Action("W", 0, 0)]], "pairs F0 of stage 0 with no B"),
        ([[Action("X", 0, 0)]], "kinds are F, I, W, B"),
        ([[F(-1)]], "numbers start at 0"),
    ],
)
def test_an_incomplete_schedule_is_refused(schedule, message):
    with pytest.raises(ValueError, match=message):
        simulate(schedule)


@pytest.mark.parametrize("times", [{"forward": -1}, {"link": float("nan")}, {"input_grad": [1, -2]}, {"pair": -1}])
def test_bad_times_are_refused(times):
    with pytest.raises(ValueError, match=f"{next(iter(times))} must be finite and not negative"):
        Times(**times)


def test_times_of_the_wrong_length_are_refused():
    with pytest.raises(ValueError, match="link has 4 entries; the schedule needs 3, or one number"):
        simulate(actions("1f1b", 4, 8), Times(link=[1, 1, 1, 1]))
