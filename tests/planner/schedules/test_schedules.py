"""The orders themselves: what every schedule promises, at every size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops.planner.schedules.schedule import KINDS, Action, Times, actions, chunks, simulate

V_SHAPED = ("zb-v", "dualpipe-v")


def check(kind, pp, micro_batches, virtual_stages):
    """Every pass once, on the rank of its stage, in an order that ends: ``simulate`` refuses others. That its times are
    those of an event simulation, ``test_input_grad_first.py`` says."""
    if kind == "interleaved":
        micro_batches = -(-micro_batches // pp) * pp
    else:
        virtual_stages = 1
        micro_batches = max(micro_batches, 2 * pp) if kind == "dualpipe-v" else micro_batches
    schedule = actions(kind, pp, micro_batches, virtual_stages)
    simulate(schedule)
    places = {action.stage: rank for rank, order in enumerate(schedule) for action in order}
    assert sorted(places) == list(range(pp * chunks(kind, virtual_stages)))
    for stage, rank in places.items():
        down, at = divmod(stage, pp)
        assert rank == (pp - 1 - at if kind in V_SHAPED and down else at)
    assert {action.micro_batch for order in schedule for action in order} == set(range(micro_batches))


@given(st.sampled_from(KINDS), st.integers(1, 12), st.integers(1, 40), st.integers(2, 5))
def test_each_pass_runs_once_and_after_what_it_needs(kind, pp, micro_batches, virtual_stages):
    check(kind, pp, micro_batches, virtual_stages)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 1), (1, 512), (64, 1), (64, 512)])
def test_the_extremes(kind, pp, micro_batches):
    check(kind, pp, micro_batches, 2)


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
