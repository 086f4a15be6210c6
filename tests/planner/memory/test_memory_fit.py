"""Whether a plan fits: micro-batches in flight, what a process takes, and the quick check of a search."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops.planner import Plan, memory, presets
from parallel_ops.planner.feasibility import memory_problem, quick_memory_problem
from parallel_ops.planner.memory.communicators import CHANNEL_BYTES, CONTEXT_BYTES, process_bytes
from parallel_ops.planner.memory.memory import PlanMemory, process_memory
from parallel_ops.planner.placement import in_flight
from parallel_ops.planner.plan import OFFLOAD, SCHEDULES, V_SHAPED
from parallel_ops.planner.schedules.schedule import actions, simulate

GPT3 = presets.model("gpt3-175b")
LLAMA = presets.model("llama3-8b")


def test_a_plan_fits_when_its_fullest_stage_does():
    plan = Plan(pp=4, global_batch=8)
    stages = memory(LLAMA, plan)
    fullest = max(stages, key=lambda stage: stage.total)
    cluster = presets.cluster("a100-80x4")
    just = replace(cluster, gpu=replace(cluster.gpu, memory=fullest.total))
    assert memory_problem(just, plan, stages) is None
    short = replace(cluster, gpu=replace(cluster.gpu, memory=fullest.total - 1))
    kind, reason = memory_problem(short, plan, stages)[:2]
    size = f"{fullest.total / 2**30:.1f}"
    assert (kind, reason) == ("memory", f"stage {fullest.stage} needs {size} GiB of {size}: less than 0.1 too much")


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("pp", "m"), [(4, 16), (4, 8), (8, 16)])
def test_micro_batches_in_flight_are_those_of_the_schedule(kind, pp, m):
    v = 2 if kind in ("interleaved", *V_SHAPED) else 1
    plan = Plan(pp=pp, schedule=kind, virtual_stages=v, global_batch=m)
    simulated = simulate(actions(kind, pp, m, v)).peak_activations
    planned = [in_flight(plan, stage) for stage in range(pp)]
    if kind in ("gpipe", "1f1b", "interleaved", "zb-v"):
        assert planned == pytest.approx(simulated)
    else:  # of these the formula gives the most that any rank holds
        assert max(simulated) <= max(planned) + 1e-9
        assert max(planned) <= max(simulated) + 1


@pytest.mark.parametrize("pp", [2, 3, 8])
def test_zb_v_holds_fewer_micro_batches_where_a_step_has_few(pp):
    for m in range(1, 2 * pp + 3):
        plan = Plan(pp=pp, schedule="zb-v", virtual_stages=2, global_batch=m)
        held = [in_flight(plan, stage) for stage in range(pp)]
        assert held == pytest.approx(simulate(actions("zb-v", pp, m, 2)).peak_activations)
        stages = memory(LLAMA, plan)
        cluster = replace(presets.cluster(f"a100-80x{pp}"), gpu=replace(presets.gpu("a100-80"), memory=1.0))
        worst = max(stage.total for stage in stages)
        assert quick_memory_problem(LLAMA, cluster, plan).excess == pytest.approx(worst - 1.0, rel=1e-9)


PLANS = st.builds(
    Plan,
    dp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    micro_batch=st.sampled_from([1, 2]),
    global_batch=st.just(64),
    recompute=st.sampled_from(["none", "selective", "full"]),
    flash_attention=st.booleans(),
    fused_loss=st.booleans(),
)


def peak(model, plan):
    return max(stage.total - stage.buffers for stage in memory(model, plan, runtime=0.0))


@given(plan=PLANS, name=st.sampled_from(["dp", "tp", "cp", "pp"]), model=st.sampled_from([GPT3, LLAMA]))
def test_more_gpus_never_need_more_memory_each(plan, name, model):
    """Communication buffers apart, which only exist where there is communication."""
    larger = replace(plan, **{name: 2 * getattr(plan, name)})
    assert peak(model, larger) <= peak(model, plan) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("plan", "cluster", "peers", "channels"),
    [
        (Plan(), "h100x8", 0, 0),
        (Plan(dp=8, zero=3, global_batch=8), "h100x8", 2, 24),  # a ring, and one for the norm
        (Plan(dp=8, global_batch=8), "h100x8", 3, 24),  # sums also have a tree
        (Plan(dp=8, zero=3, global_batch=8), "rtx4090x8", 2, 2),
    ],
)
def test_rings_take_a_channel_a_neighbour(plan, cluster, peers, channels):
    found = process_bytes(plan, presets.cluster(cluster)) - CONTEXT_BYTES
    assert found == peers * channels * CHANNEL_BYTES


def test_groups_that_exchange_take_channels_for_every_peer_in_the_node():
    """An all-to-all among eight H100 took 4.34 - 1.06 GB (github.com/NVIDIA/nccl/issues/1685)."""
    node, several = presets.cluster("h100x8"), presets.cluster("h100x64")
    plan = Plan(dp=8, zero=1, global_batch=8)
    exchange = process_bytes(replace(plan, ep=8), node) - process_bytes(plan, node)
    assert exchange == 7 * 32 * CHANNEL_BYTES == pytest.approx(3.28e9, rel=0.15)
    plan = Plan(dp=64, zero=1, global_batch=64)
    wide = process_bytes(replace(plan, ep=64), several) - process_bytes(plan, several)
    assert exchange < wide < 1.1 * exchange  # peers on other nodes share a buffer
    pipeline, ring = Plan(pp=8, global_batch=8), Plan(cp=8)
    assert process_bytes(pipeline, node) == process_bytes(replace(ring, zero=1), node) - 24 * CHANNEL_BYTES
    assert process_bytes(Plan(pp=2, tp=8, global_batch=8)) < process_bytes(Plan(pp=2, tp=4, global_batch=8)) + 2**28
    assert process_bytes(replace(ring, cp_kind="all_to_all")) > process_bytes(ring)


def test_the_packages_own_transport_takes_more():
    plan = Plan(dp=2, tp=4, global_batch=2)
    assert process_bytes(plan, own_transport=True) - process_bytes(plan) == 3 * 16 * CHANNEL_BYTES


@given(plan=PLANS)
def test_each_way_of_saving_memory_saves(plan):
    used = [memory(GPT3, replace(plan, recompute=kind)) for kind in ("none", "selective", "full")]
    kept = [max(stage.activations for stage in stages) for stages in used]
    assert kept[0] >= kept[1]
    states = [memory(GPT3, replace(plan, zero=zero))[0].states for zero in range(4)]
    assert states == sorted(states, reverse=True)


@pytest.mark.parametrize(
    ("model", "cluster", "plan", "worst"),
    [
        (
            presets.model("llama2-13b"),
            "h200x8+h100x8",
            Plan(pp=16, micro_batch=4, global_batch=256, fused_loss=True),
            8,
        ),
        (replace(presets.model("glm-4.5"), dense_layers=24), "h100x64", Plan(dp=4, pp=16, ep=4, global_batch=128), 5),
    ],
)
def test_the_quick_check_looks_at_all_stages(model, cluster, plan, worst):
    """The first on smaller GPUs, or the first without dense layers, may be in the middle of the pipeline."""
    cluster = presets.cluster(cluster)
    found = memory_problem(cluster, plan, memory(model, plan, **process_memory(cluster, plan)))
    assert found and found.reason.startswith(f"stage {worst} ")
    quick = quick_memory_problem(model, cluster, plan)
    assert quick and quick._replace(excess=pytest.approx(found.excess)) == found


@given(
    plan=PLANS, layers=st.integers(8, 40), room=st.floats(0.3, 1.1), offload=st.sampled_from((*OFFLOAD, "activations"))
)
def test_the_quick_check_finds_the_stage_that_lacks_most(plan, layers, room, offload):
    model, plan = replace(LLAMA, num_layers=layers), replace(plan, offload=offload)
    every = PlanMemory(model, plan)
    needs = [every.needs(stage, plan.recompute, offload) for stage in range(plan.pp)]
    needed = max(every.total(each, offload) for each in needs)
    cluster = presets.cluster("a100-80x8")
    cluster = replace(cluster, gpu=replace(cluster.gpu, memory=room * needed))
    found = quick_memory_problem(model, cluster, plan)
    assert (found.excess if found else 0.0) == max(0.0, needed - room * needed)


@given(plan=PLANS)
def test_the_layer_at_work_is_not_offloaded(plan):
    """Of more layers in flight more is offloaded, but what one of them needs at work stays."""
    plan = replace(plan, offload="activations")
    few, many = (memory(replace(LLAMA, num_layers=layers), plan) for layers in (32, 64))
    for one, other in zip(few, many, strict=True):
        assert other.activations >= one.activations * (1 - 1e-9)
        assert other.host > one.host
