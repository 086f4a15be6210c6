"""Search: no work is done twice, no option hides a faster plan, each kind of parallelism is tried where it helps."""

import gc
import importlib
import os
import pickle
import signal
from collections import Counter
from dataclasses import replace

import pytest

from parallel_ops.planner import Plan, SearchOptions, efficiency, estimate, presets, search
from parallel_ops.planner.export import systems
from parallel_ops.planner.feasibility import problem
from parallel_ops.planner.plan import restored
from parallel_ops.planner.search import candidates, timing
from parallel_ops.planner.search.result import features
from parallel_ops.planner.step import step_seconds
from parallel_ops.planner.validation.recipes import published_recipe

search_module = importlib.import_module("parallel_ops.planner.search.search")
GPT3 = presets.model("gpt3-175b")
LLAMA = presets.model("llama2-7b")
A100 = presets.cluster("a100-80x1024")
FEW = SearchOptions(schedules=("1f1b",), micro_batches=(1, 2), zero=(0, 1), offload=("none",))


def test_a_search_does_no_work_twice(monkeypatch):
    """Layers and memory are counted for plans that could run, layers once for all stages of ZeRO."""
    calls = Counter()

    def counted(module, name):
        call = getattr(module, name)

        def wrapper(*args, **kwargs):
            calls[name] += 1
            return call(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapper)

    counted(candidates, "balanced_chunks")
    counted(candidates, "MemoryCheck")
    counted(timing, "step_seconds")  # of the plans
    counted(search_module, "step_seconds")  # of near misses
    model, cluster = presets.model("llama3-70b"), presets.cluster("h100x64")
    found = search(model, cluster, batch=512)
    plans = [plan for plan, _ in found.ranking]
    memory_only = {r.base for r in found.rejected if r.kind == "memory"}
    even = {replace(plan, layers_per_chunk=(), recompute="none", offload="none") for plan in plans}
    assert 0 < calls["balanced_chunks"] <= len(even | memory_only) / 2
    # Once for each plan, and once more for its uneven stages.
    assert len(even) < calls["MemoryCheck"] <= 2 * len(even | memory_only)
    misses = min(2000, sum(r.kind == "memory" for r in found.rejected))
    assert calls["step_seconds"] <= len(plans) + misses


def test_two_processes_find_what_one_does(monkeypatch):
    """Also if the other is killed; also if fewer than all sizes can run, so that rejections come in between."""
    monkeypatch.setattr(timing, "MANY", 2)
    model, cluster = presets.model("mixtral-8x7b"), presets.cluster("h100x16")
    options = replace(FEW, tp=(1, 2, 5), pp=(), cp=(1,))

    def found(processes):
        result = search(model, cluster, batch=24, options=options, processes=processes)
        return result.ranking, list(result.rejected), len(result.rejected), result.plans, result.misses

    alone = found(1)
    assert len(alone[0]) > 10 and len({rejection.kind for rejection in alone[1]}) > 3
    assert found(2) == alone
    monkeypatch.setattr(timing, "_send", _killed)
    assert found(2) == alone


def _killed(sender, request, reached):
    reached[1] -= 2
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_plan_is_the_same_in_another_process():
    plan = Plan.parse("dp=4,tp=2,pp=2,zero=1,layers_per_chunk=17:15,global_batch=64")
    for again in (pickle.loads(pickle.dumps(plan)), restored(tuple(vars(plan).values()))):
        assert again == plan and vars(again) == vars(plan) and hash(again) == hash(plan)


def test_zero_1_and_2_in_a_pipeline_take_the_same_time():
    plan = Plan(dp=16, tp=8, pp=8, zero=1, sequence_parallel=True, global_batch=1536)
    seconds = {step_seconds(GPT3, A100, replace(plan, zero=zero), efficiency("ampere")) for zero in (1, 2)}
    assert len(seconds) == 1


def test_no_option_hides_a_faster_plan():
    """Plans that fit without recomputation and offload are no slower without them."""
    options = replace(FEW, offload=("none", "optimizer"))
    cluster = presets.cluster("a100-80x8")
    fastest = search(LLAMA, cluster, batch=64, options=options).ranking[0][1]
    slower = []
    for recompute in ("none", "selective", "full"):
        for offload in ("none", "optimizer"):
            for plan, _ in search(
                LLAMA, cluster, batch=64, options=replace(options, recompute=(recompute,), offload=(offload,))
            ).ranking:
                slower.append(step_seconds(LLAMA, cluster, plan, efficiency("ampere")))
    assert min(slower) >= fastest * 0.98


def test_the_simplest_of_nearly_equal_plans_comes_first():
    """Data parallelism alone before tensor parallelism that is as fast."""
    model, cluster = presets.model("llama2-7b"), presets.cluster("h100x8")
    found = search(model, cluster, batch=1024, options=SearchOptions(target="megatron", micro_batches=(1, 2)))
    fastest = min(found.plans, key=lambda each: each.step)
    assert found.best.step <= 1.02 * fastest.step
    near = [each for each in found.plans if each.step <= 1.02 * fastest.step and not each.tight]
    assert features(found.best.plan) == min(features(each.plan) for each in near)
    others = [each.step for each in found.plans[1:] if not each.tight]
    assert others == sorted(others)


def test_experts_are_spread_where_that_helps():
    mixtral = replace(presets.model("mixtral-8x7b"), seq_length=4096)
    found = search(mixtral, presets.cluster("h100x64"), batch=256, options=FEW)
    assert {plan.ep for plan, _ in found.ranking} == {1, 2, 4, 8}
    assert found.best.plan.ep > 1


def test_stages_of_two_kinds_of_gpu_get_layers_by_speed():
    mixed = presets.cluster("a100-80x8+h100x8")
    best = search(LLAMA, mixed, batch=64, options=replace(FEW, zero=(1,))).best.plan
    assert best.pp > 1
    half = len(best.layers_per_chunk) // 2
    assert sum(best.layers_per_chunk[:half]) < sum(best.layers_per_chunk[half:])
    assert sum(best.layers_per_chunk) == LLAMA.num_layers


def test_uneven_stages_are_found_where_they_are_faster():
    """The last stage of eight has four layers and an output embedding that costs more than two."""
    model, cluster = presets.model("llama3-8b"), presets.cluster("h100x8")
    options = replace(FEW, pp=(8,), zero=(1,), micro_batches=(1,))
    best = search(model, cluster, batch=128, options=options).best
    layers = best.plan.layers_per_chunk
    assert sum(layers) == 32 and layers[-1] < max(layers)
    assert "layers " in best.plan.describe()
    even = estimate(model, cluster, replace(best.plan, layers_per_chunk=()))
    assert best.step < 0.95 * even.step
    # DeepSpeed takes no number of layers per stage.
    plans = search(model, cluster, batch=128, options=replace(options, target="deepspeed")).plans
    assert plans and not any(found.plan.layers_per_chunk for found in plans)


def test_shards_that_stay_in_a_node_are_tried():
    """With one adapter a node, ZeRO-3 gathers no parameters between them."""
    cluster = replace(presets.cluster("h100x32"), rails=1)
    options = replace(FEW, zero=(0, 3), tp=(1,), pp=(1,), cp=(1,), micro_batches=(1,))
    found = search(LLAMA, cluster, batch=128, options=options)
    assert {(plan.zero, plan.dp_replicate) for plan, _ in found.ranking} == {(3, 1), (3, 4)}
    times = {plan.dp_replicate: seconds for plan, seconds in found.ranking}
    assert times[4] < 0.8 * times[1] and found.best.plan.dp_shard == 8
    one = replace(options, dp_replicate=(1,))
    assert {p.dp_replicate for p, _ in search(LLAMA, cluster, batch=128, options=one).ranking} == {1}
    # On one node there is nothing to save.
    inside = search(LLAMA, presets.cluster("h100x8"), batch=128, options=options)
    assert {plan.dp_replicate for plan, _ in inside.ranking} == {1}


def test_replicas_that_are_asked_for():
    cluster = presets.cluster("h100x16")
    options = replace(FEW, zero=(0, 1, 3), pp=(1,), cp=(1,), micro_batches=(1,), dp_replicate=(2, 4))
    found = search(LLAMA, cluster, batch=64, options=options)
    assert {(p.zero, p.dp_replicate) for p, _ in found.ranking} == {(z, r) for z in (1, 3) for r in (2, 4)}
    reasons = {r.reason for r in found.rejected if r.kind == "replicas"}
    assert reasons >= {"ZeRO-0 has no shards to have 2 replicas of", "4 replicas do not divide DP 2"}
    with pytest.raises(ValueError, match=r"megatron: it shards over all data-parallel ranks, not dp_replicate=2:4"):
        search(LLAMA, cluster, batch=64, options=replace(options, target="megatron"))


def test_the_nearest_published_run_divides_the_cluster():
    model = presets.model("llama3-405b")
    run = published_recipe(model, presets.cluster("h100x16384"))
    assert run.run.startswith("llama 3, 405B on 16384 H100") and run[1:] == (8, 16, 1, 1)
    experts = presets.model("qwen3-30b-a3b")
    assert published_recipe(experts, presets.cluster("h100x16")).ep == 16
    assert published_recipe(experts, presets.cluster("h100x8")).ep == 8
    assert published_recipe(replace(model, seq_length=2**20), presets.cluster("h100x64")) is None
    assert published_recipe(replace(model, name="mine"), presets.cluster("h100x64")) is None


def test_a_target_without_what_is_asked_for():
    with pytest.raises(ValueError, match=r"torchtitan: it shards gradients with the optimizer: .*, not zero=1"):
        search(LLAMA, presets.cluster("h100x8"), batch=64, options=SearchOptions(target="torchtitan", zero=(1,)))
    with pytest.raises(ValueError, match="unknown system 'jax'"):
        search(LLAMA, presets.cluster("h100x8"), batch=64, options=SearchOptions(target="jax"))


def test_the_garbage_collector_runs_after_a_search():
    options = replace(FEW, tp=(1,), pp=(1,), cp=(1,), micro_batches=(1,))
    search(LLAMA, presets.cluster("h100x8"), batch=8, options=options, keep=1)
    assert gc.isenabled()
    with pytest.raises(ValueError, match="batch must be"):
        search(LLAMA, A100, batch=0)
    assert gc.isenabled()
    gc.disable()
    try:
        search(LLAMA, presets.cluster("h100x8"), batch=8, options=options, keep=1)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["batch", "keep"])
def test_counts_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        search(LLAMA, A100, **{"batch": 64, name: 0})


@pytest.mark.filterwarnings("ignore:no measured efficiencies of volta")
def test_a_gpu_without_bf16_is_searched_in_fp16():
    cluster = presets.cluster("v100x32")
    assert search(LLAMA, cluster, batch=64, keep=1).best.plan.dtype == "fp16"
    with pytest.raises(ValueError, match="v100 has no bf16 matrix products; it has fp32, fp16"):
        search(LLAMA, cluster, batch=64, options=FEW)


@pytest.mark.filterwarnings("ignore:no measured efficiencies of volta")
def test_base_gives_the_other_fields():
    options = replace(FEW, base=Plan(dtype="fp16", fused_loss=False))
    best = search(LLAMA, presets.cluster("v100x32"), batch=64, options=options).best.plan
    assert (best.dtype, best.fused_loss) == ("fp16", False)


def test_dtypes_are_values_of_one_search():
    model, cluster = presets.model("llama3-8b"), presets.cluster("h100x8")
    options = SearchOptions(target="megatron", zero=(0, 1), micro_batches=(1, 2))
    alone = {dtype: search(model, cluster, batch=128, options=replace(options, dtype=(dtype,))) for dtype in FORMATS}
    both = search(model, cluster, batch=128, options=replace(options, dtype=FORMATS))
    for dtype, found in alone.items():
        assert {each.plan.dtype for each in found.plans} == {dtype}
    assert sorted(both.ranking, key=lambda found: found[1]) == sorted(
        (*alone["bf16"].ranking, *alone["fp8"].ranking), key=lambda found: found[1]
    )
    assert both.best.plan == alone["fp8"].best.plan and both.best.step < alone["bf16"].best.step
    assert len(both.rejected) == sum(len(found.rejected) for found in alone.values())
    for each in both.plans:
        assert problem(model, cluster, each.plan) is None
        assert each.peak_memory.total <= cluster.gpu.memory
        assert "megatron" in systems(model, cluster, each.plan)
    # A GPU or a system without fp8 matmuls says so.
    with pytest.raises(ValueError, match="a100-80 has no fp8 matrix products"):
        search(model, presets.cluster("a100-80x8"), batch=128, options=replace(options, dtype=FORMATS))
    with pytest.raises(ValueError, match=r"deepspeed: .*not dtype=fp8"):
        search(model, cluster, batch=128, options=replace(options, target="deepspeed", zero=(1,), dtype=("fp8",)))


FORMATS = ("bf16", "fp8")
