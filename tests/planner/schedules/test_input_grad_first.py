"""Schedules whose B sends the gradient of the input before it computes those of the weights."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_ops.planner import Plan, efficiency, estimate, presets
from parallel_ops.planner.estimate import simulation
from parallel_ops.planner.export import TARGETS
from parallel_ops.planner.feasibility import problem
from parallel_ops.planner.schedules.schedule import KINDS, WHOLE_BACKWARD, Action, Times, actions, chunks, simulate
from parallel_ops.planner.step import StepTime, step_seconds

LLAMA, H100 = presets.model("llama3-70b"), presets.cluster("h100x64")
PLAN = Plan(tp=8, pp=4, dp=2, zero=1, sequence_parallel=True, global_batch=64)


def runnable(kind, pp, micro_batches):
    """The most micro-batches that the schedule can run."""
    if kind == "interleaved":
        return -(-micro_batches // pp) * pp
    return max(micro_batches, 2 * pp) if kind == "dualpipe-v" else micro_batches


def events(schedule, forward, input_grad, weight_grad, link, *, first, pair):
    """Start and end of each action, rank by rank, from what each stage has sent so far."""
    owner = {action.stage: rank for rank, order in enumerate(schedule) for action in order}
    last, free, at = len(owner) - 1, [0.0] * len(schedule), [0] * len(schedule)
    sent, own, times = {}, set(), [[] for _ in schedule]

    def arrival(action):
        """When the message that the action needs is there; None if it is not sent yet."""
        kind, mb, stage, _ = action
        if kind == "W" or (kind == "F" and stage == 0) or (kind != "F" and stage == last):
            return None if kind == "W" and ("I", mb, stage) not in own else 0.0
        before = stage - 1 if kind == "F" else stage + 1
        if kind != "F" and ("F", mb, stage) not in own:
            return None
        key = ("F" if kind == "F" else "I", mb, before)
        across = 0.0 if owner[before] == owner[stage] else link[min(before, stage)]
        return sent[key] + across if key in sent else None

    def run(rank, group):
        arrivals = [arrival(action) for action in group]
        if None in arrivals:
            return False
        start = max(free[rank], *arrivals)
        cost = {"F": lambda s: forward[s], "I": lambda s: input_grad[s], "W": lambda s: weight_grad[s]}
        cost["B"] = lambda s: input_grad[s] + weight_grad[s]
        length = sum(cost[a.kind](a.stage) for a in group) if len(group) == 1 or pair is None else pair
        for kind, mb, stage, _ in group:
            early = weight_grad[stage] if kind == "B" and first else 0.0
            name = "I" if kind == "B" else kind
            sent[name, mb, stage] = max(start, start + length - early)
            own.add((name, mb, stage))
            times[rank].append((start, start + length))
        free[rank] = start + length
        return True

    while any(n < len(order) for n, order in zip(at, schedule, strict=True)):
        moved = False
        for rank, order in enumerate(schedule):
            group = order[at[rank] : at[rank] + 2][: 2 if at[rank] < len(order) and order[at[rank]].paired else 1]
            if group and run(rank, group):
                at[rank] += len(group)
                moved = True
        assert moved
    return times


@settings(max_examples=150)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 6),
    st.integers(1, 14),
    st.booleans(),
    st.none() | st.integers(0, 9),
    st.data(),
)
def test_times_are_those_of_an_event_simulation(kind, pp, m, first, pair, data):
    v = data.draw(st.integers(2, 3)) if kind == "interleaved" else 1
    m = runnable(kind, pp, m)
    stages = pp * chunks(kind, v)
    durations = [data.draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages)) for _ in range(3)]
    link = data.draw(st.lists(st.integers(0, 4), min_size=stages - 1, max_size=stages - 1))
    names = ("forward", "input_grad", "weight_grad")
    pair = None if kind == "zb-2p" else pair
    times = Times(**dict(zip(names, durations, strict=True)), link=link, pair=pair, input_grad_first=first)
    schedule = actions(kind, pp, m, v, times=times if kind == "zb-2p" else None)
    found = simulate(schedule, times)
    expected = events(schedule, *durations, link, first=first, pair=pair)
    assert [list(zip(*rows, strict=True)) for rows in zip(found.starts, found.ends, strict=True)] == expected


@given(
    st.sampled_from(("gpipe", "1f1b", "interleaved")),
    st.integers(1, 10),
    st.integers(1, 30),
    st.tuples(*[st.floats(0, 9)] * 3),
)
def test_the_bubble_has_no_weight_gradient(kind, pp, m, passes):
    """(p - 1) (F + I), where (p - 1) (F + I + W) is published; of interleaved 1F1B if W takes no longer than F."""
    f, i, w = passes
    w = min(f, w) if kind == "interleaved" else w
    times = Times(forward=f, input_grad=i, weight_grad=w, input_grad_first=True)
    v = 3 if kind == "interleaved" else 1
    m = runnable(kind, pp, m)
    schedule = actions(kind, pp, m, v)
    found = simulate(schedule, times)
    assert found.step_time == pytest.approx(m * v * (f + i + w) + (pp - 1) * (f + i))
    later = simulate(schedule, replace(times, input_grad_first=False))
    assert later.step_time == pytest.approx(m * v * (f + i + w) + (pp - 1) * (f + i + w))
    assert found.peak_activations == later.peak_activations


def test_stages_on_one_rank_run_one_after_the_other():
    order = [[Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 1), Action("B", 0, 0)]]
    assert simulate(order, Times(weight_grad=5, input_grad_first=True)).starts == [[0, 1, 2, 8]]


def test_schedules_with_a_whole_backward_pass():
    found = set()
    for kind in KINDS:
        schedule = actions(kind, 2, 4, 2 if kind == "interleaved" else 1)
        found |= {kind for order in schedule for action in order if action.kind == "B"}
    assert found == set(WHOLE_BACKWARD)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("schedule", "virtual_stages"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_a_plan_waits_as_its_simulation(schedule, virtual_stages, overlap):
    late = replace(PLAN, schedule=schedule, virtual_stages=virtual_stages, overlap=overlap)
    plan = replace(late, input_grad_first=True)
    constants = efficiency("hopper")
    found, before = (StepTime(LLAMA, H100, each, constants) for each in (plan, late))
    assert found.times() == replace(before.times(), input_grad_first=True)
    assert found.pipeline() - found.gathers() == simulation(LLAMA, H100, plan).step_time
    # Without the messages: (p - 1) W of one chunk, up to the ends of the model.
    gain = before.pipeline() - found.pipeline()
    assert gain == pytest.approx(3 * found.passes[0].weight_grad / virtual_stages, rel=0.2)
    assert estimate(LLAMA, H100, plan).step == pytest.approx(estimate(LLAMA, H100, late).step - gain)
    # The time that a search compares falls as much.
    searched = [step_seconds(LLAMA, H100, each, constants) for each in (late, plan)]
    assert searched[0] - searched[1] == pytest.approx(gain, rel=0.2)


def test_schedules_without_a_whole_backward_pass_are_as_before():
    for kind, v in (("zb-h1", 1), ("zb-2p", 1), ("zb-v", 2)):
        plan = replace(PLAN, schedule=kind, virtual_stages=v)
        first = replace(plan, input_grad_first=True)
        assert estimate(LLAMA, H100, plan).step == estimate(LLAMA, H100, first).step
        constants = efficiency("hopper")
        assert step_seconds(LLAMA, H100, plan, constants) == step_seconds(LLAMA, H100, first, constants)


def test_a_plan_names_it():
    plan = replace(PLAN, input_grad_first=True)
    assert Plan.parse(plan.text) == plan and "input_grad_first=true" in plan.text
    assert "input grad first" in plan.describe() and "input grad first" not in PLAN.describe()
    assert replace(plan, pp=1, dp=8).describe() == replace(PLAN, pp=1, dp=8).describe()


@pytest.mark.parametrize("name", ["deepspeed", "megatron", "torchtitan"])
def test_other_systems_send_it_at_the_end(name):
    target = TARGETS[name]
    plan = replace(PLAN, zero=0, grad_dtype="bf16" if name == "deepspeed" else "fp32", **target.own(PLAN))
    assert target.problem(LLAMA, H100, plan) is None
    first = replace(plan, input_grad_first=True)
    reason = "its backward pass sends the gradient of the input at its end, not input_grad_first=true"
    assert target.problem(LLAMA, H100, first) == reason
    # Without a pipeline it has no effect.
    assert target.problem(LLAMA, H100, replace(first, pp=1, dp=8)) is None
    assert problem(LLAMA, H100, first) is None
