"""The orders themselves: what every schedule promises, at every size."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_ops.planner.schedules.schedule import KINDS, Action, Times, actions, chunks, simulate

CHUNKS = {"interleaved": 2}
V_SHAPED = ("zb-v", "dualpipe-v")


def sizes(kind, pp, micro_batches, virtual_stages):
    """Arguments of ``actions``, with as many micro-batches as the schedule can run."""
    if kind == "interleaved":
        return kind, pp, -(-micro_batches // pp) * pp, virtual_stages
    return kind, pp, max(micro_batches, 2 * pp) if kind == "dualpipe-v" else micro_batches, 1


def check(kind, pp, micro_batches, virtual_stages, times=None):
    """Every pass once, on the rank of its stage, after what it needs; nothing at the same time on a rank."""
    schedule = actions(kind, pp, micro_batches, virtual_stages, times=times if kind == "zb-2p" else None)
    simulation = simulate(schedule, times)
    link = 0.0 if times is None else times.link
    ends = {}
    places = {}
    for rank, order in enumerate(schedule):
        free = 0.0
        for n, action in enumerate(order):
            start, end = simulation.starts[rank][n], simulation.ends[rank][n]
            partner = n > 0 and order[n - 1].paired
            assert start >= free - 1e-9 or (partner and start == simulation.starts[rank][n - 1])
            assert end >= start
            free = end
            places[action.stage] = rank
            for kind_done in "IW" if action.kind == "B" else action.kind:
                assert (kind_done, action.micro_batch, action.stage) not in ends
                ends[kind_done, action.micro_batch, action.stage] = (start, end)
    stages = pp * chunks(kind, virtual_stages)
    assert len(ends) == 3 * stages * micro_batches
    for stage in range(stages):
        down, at = divmod(stage, pp)
        assert places[stage] == (pp - 1 - at if kind in V_SHAPED and down else at)
        for mb in range(micro_batches):
            for kind_done, needs in needed(stage, stages).items():
                start = ends[kind_done, mb, stage][0]
                for before, other in needs:
                    delay = link if places[other] != places[stage] else 0.0
                    # W may be inside a B, which starts with I.
                    begun, ended = ends[before, mb, other]
                    same = kind_done == "W" and (begun, ended) == ends["W", mb, stage]
                    assert start >= ended + delay - 1e-9 or same, (kind_done, mb, stage)
    return simulation


def needed(stage, stages):
    backward = [("F", stage)] + ([("I", stage + 1)] if stage + 1 < stages else [])
    return {"F": [("F", stage - 1)] if stage else [], "I": backward, "W": [("I", stage)]}


@settings(max_examples=100)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(2, 5),
    st.tuples(*[st.integers(0, 9)] * 4),
)
def test_each_pass_runs_once_and_after_what_it_needs(kind, pp, micro_batches, virtual_stages, times):
    f, i, w, link = times
    times = Times(forward=f, input_grad=i, weight_grad=w, link=link)
    check(*sizes(kind, pp, micro_batches, virtual_stages), times)


@settings(max_examples=20)
@given(st.sampled_from(KINDS), st.integers(1, 64), st.integers(1, 512), st.integers(2, 3))
def test_large_pipelines(kind, pp, micro_batches, virtual_stages):
    # Long and wide at once is for the extremes below.
    check(*sizes(kind, pp, max(1, micro_batches // max(1, pp // 4)), virtual_stages))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 1), (1, 512), (64, 1)])
def test_the_extremes(kind, pp, micro_batches):
    check(*sizes(kind, pp, micro_batches, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest(kind):
    schedule = actions(kind, 64, 512, CHUNKS.get(kind, 1))
    # The simulation itself checks that the schedule is complete and that it ends.
    simulate(schedule)
    counts = Counter(action.kind for order in schedule for action in order)
    stages = 64 * chunks(kind, CHUNKS.get(kind, 1))
    assert counts["F"] == counts["I"] + counts["B"] == counts["W"] + counts["B"] == 512 * stages


@pytest.mark.parametrize("pp", [1, 2, 3, 8, 16])
def test_activations_stay_within_the_published_bounds(pp):
    m = 4 * pp

    def peaks(kind, virtual_stages=1, **options):
        return list(simulate(actions(kind, pp, m, virtual_stages, **options)).peak_activations)

    assert peaks("gpipe") == [m] * pp
    assert peaks("1f1b") == [pp - rank for rank in range(pp)]
    assert peaks("zb-h1") == [pp] * pp
    assert peaks("zb-h2") == [2 * pp - 1] * pp
    assert peaks("zb-v") == [pp] * pp
    assert peaks("dualpipe-v") == [pp + 0.5] * pp
    assert max(peaks("zb-2p")) <= 2 * pp
    assert max(peaks("zb-2p", memory_limit=pp)) <= pp
    for v in (2, 3, 4):
        # arXiv:2205.05198, section 4.2.3: 1 + (p - 1) / (p v) of 1F1B, on the first rank.
        assert peaks("interleaved", v)[0] == pytest.approx(pp * (1 + (pp - 1) / (pp * v)))


def test_the_orders_of_a_small_pipeline():
    def text(schedule, rank):
        order = schedule[rank]
        return " ".join(f"{a.kind}{a.micro_batch}{chr(39) * (a.stage >= len(schedule))}{'&' * a.paired}" for a in order)

    assert text(actions("1f1b", 2, 3), 0) == "F0 F1 B0 F2 B1 B2"
    assert text(actions("1f1b", 2, 3), 1) == "F0 B0 F1 B1 F2 B2"
    assert text(actions("zb-h1", 2, 3), 0) == "F0 F1 I0 W0 F2 I1 W1 I2 W2"
    assert text(actions("zb-h1", 2, 3), 1) == "F0 I0 F1 I1 W0 F2 I2 W1 W2"
    assert text(actions("interleaved", 2, 2, 2), 0) == "F0 F1 F0' F1' B0' B1' B0 B1"
    assert text(actions("zb-v", 1, 2), 0) == "F0 F0' I0' W0' F1 I0 W0 F1' I1' W1' I1 W1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 4, 8), "kind must be one of gpipe, 1f1b, .*got '2f2b'"),
        (("1f1b", 0, 8), "pp must be a whole number of at least 1, got 0"),
        (("1f1b", 4, -1), "micro_batches must be a whole number of at least 1, got -1"),
        (("1f1b", 4, 2.5), "micro_batches must be a whole number of at least 1, got 2.5"),
        (("interleaved", 4, 8), "interleaved needs virtual_stages of at least 2"),
        (("interleaved", 4, 6, 2), "interleaved 1F1B needs micro-batches in multiples of PP 4; there are 6"),
        (("dualpipe-v", 4, 7), "DualPipe-V needs 8 micro-batches for PP 4; there are 7"),
        (("zb-v", 4, 8, 3), r"virtual_stages is 3, but zb-v has 2 stage\(s\) a rank"),
    ],
)
def test_bad_sizes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        actions(*arguments)


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="times, memory_limit and retained are for zb-2p; 1f1b"):
        actions("1f1b", 4, 8, memory_limit=4)
    with pytest.raises(ValueError, match=r"memory_limit must be at least 1 micro-batch, got 0\.5"):
        actions("zb-2p", 4, 8, memory_limit=0.5)
    with pytest.raises(ValueError, match="retained must be between 0 and 1, got 2"):
        actions("zb-2p", 4, 8, retained=2)
    with pytest.raises(ValueError, match="forward has 3 entries; the schedule needs 4"):
        actions("zb-2p", 4, 8, times=Times(forward=[1, 1, 1]))


def test_v_shaped_schedules_take_the_number_of_stages_that_they_have():
    assert actions("zb-v", 2, 4, 2) == actions("zb-v", 2, 4)
    assert Action("F", 0, 3) in actions("zb-v", 2, 4)[0]
