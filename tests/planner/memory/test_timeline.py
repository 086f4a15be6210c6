"""The memory of a rank over a step, beside the estimate's peak."""

import pytest

from parallel_ops.planner import Plan, estimate, presets
from parallel_ops.planner.estimate import simulation
from parallel_ops.planner.memory.timeline import memory_timeline
from parallel_ops.planner.pictures.drawing import memory_text

MODEL, CLUSTER = presets.model("llama2-7b"), presets.cluster("h100x8")
V = {"virtual_stages": 2}


def timelines(model, cluster, plan):
    steps = simulation(model, cluster, plan)
    return steps, [memory_timeline(model, cluster, plan, steps, rank) for rank in range(plan.pp)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"recompute": "full", "fused_loss": False},
        {"schedule": "gpipe", "dp": 1, "tp": 2, "sequence_parallel": True},
        {"schedule": "interleaved", **V},
        {"schedule": "zb-h1", "fused_loss": False},
        {"schedule": "zb-2p"},
        {"schedule": "zb-v", **V, "fused_loss": False},
        {"schedule": "zb-v", **V, "micro_batch": 2},
        {"schedule": "dualpipe-v", **V},
        {"offload": "activations", "fused_loss": False},
        {"offload": "optimizer", "zero": 1},
        {"dp": 8, "pp": 1, "zero": 3, "recompute": "full"},
    ],
    ids=str,
)
def test_the_maximum_is_the_peak_of_the_estimate(fields):
    plan = Plan(**{"dp": 2, "pp": 4, "micro_batch": 1, "global_batch": 16, **fields})
    found = estimate(MODEL, CLUSTER, plan)
    for stage, timeline in zip(found.memory, timelines(MODEL, CLUSTER, plan)[1], strict=True):
        assert max(timeline.totals) == pytest.approx(stage.total, rel=1e-12)
        assert max(timeline.parts["states"]) == min(timeline.parts["states"]) == stage.states
        assert min(values := timeline.parts["activations"]) >= 0 and max(values) > 0 == timeline.times[0]
        assert any(timeline.parts["recomputed"]) == (plan.recompute == "full")
        assert timeline.limit == CLUSTER.gpu.memory


def test_experts_and_stages_of_different_layers():
    model, cluster = presets.model("mixtral-8x7b"), presets.cluster("h100x16")
    plan = Plan(dp=4, pp=4, ep=4, zero=1, micro_batch=1, global_batch=32, layers_per_chunk=(9, 8, 8, 7))
    for stage, timeline in zip(estimate(model, cluster, plan).memory, timelines(model, cluster, plan)[1], strict=True):
        assert max(timeline.totals) == pytest.approx(stage.total, rel=1e-12)


def test_activations_follow_the_passes():
    """1F1B on rank 1 of 2 holds one micro-batch from F to B; rank 0 two."""
    plan = Plan(dp=4, pp=2, micro_batch=1, global_batch=16)
    steps, (first, last) = timelines(MODEL, CLUSTER, plan)
    each = max(last.parts["activations"])
    assert max(first.parts["activations"]) == pytest.approx(2 * each)
    held = dict(zip(last.times, last.parts["activations"], strict=False))
    forwards = [start for action, start in zip(steps.schedule[1], steps.starts[1], strict=True) if action.kind == "F"]
    assert forwards and all(held[start] == each for start in forwards)
    assert last.times[-1] == steps.step_time and last.parts["activations"][-1] == 0 == held[0]
    backward = [index for index, size in enumerate(last.parts["working"]) if size]
    assert backward and not any(last.parts["logits"][index] for index in backward)


def test_a_rank_that_is_not_there():
    plan = Plan(dp=8, global_batch=16)
    with pytest.raises(ValueError, match=r"rank must be from 0 to 0 for pp=1, got 1"):
        memory_timeline(MODEL, CLUSTER, plan, simulation(MODEL, CLUSTER, plan), 1)


def test_the_picture_follows_memory_below_its_first_value():
    """Without a pipeline a step begins with its peak: the logits of a large vocabulary."""
    plan = Plan(dp=8, zero=2, recompute="full", global_batch=64)
    steps, (timeline,) = timelines(presets.model("llama3-1b"), CLUSTER, plan)
    assert timeline.totals[0] == max(timeline.totals) > 1.5 * timeline.totals[1]
    rows = memory_text(steps, timeline, width=400).plain.split("\n")[:10]
    lowest = min(sum(row[column] != " " for row in rows) for column in range(len("rank 0 "), len(rows[0])))
    assert lowest == sum(row + 0.5 <= 10 * min(timeline.totals) / timeline.totals[0] for row in range(10))
