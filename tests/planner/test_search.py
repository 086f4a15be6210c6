"""Search: complete, fast, with a reason for each rejected plan and the sensitivity of the choice."""

import gc
import importlib
import time
from collections import Counter
from dataclasses import replace

import pytest

from parallel_ops.planner import Plan, SearchOptions, efficiency, estimate, memory, presets, search, smallest_cluster
from parallel_ops.planner.compute.efficiency import CONSTANTS
from parallel_ops.planner.export import systems
from parallel_ops.planner.feasibility import problem, quick_memory_problem
from parallel_ops.planner.results import GIB
from parallel_ops.planner.search import candidates
from parallel_ops.planner.search.losses import loss
from parallel_ops.planner.search.result import division, features, twins
from parallel_ops.planner.step import step_seconds
from parallel_ops.planner.validation.recipes import published_recipe

search_module = importlib.import_module("parallel_ops.planner.search.search")
GPT3 = presets.model("gpt3-175b")
LLAMA = presets.model("llama2-7b")
A100 = presets.cluster("a100-80x1024")
FEW = SearchOptions(schedules=("1f1b",), micro_batches=(1, 2), zero=(0, 1), offload=("none",))


@pytest.fixture(scope="module")
def large():
    start = time.process_time()
    found = search(GPT3, A100, batch=1536)
    return found, time.process_time() - start


def test_175b_on_1024_gpus_takes_less_than_10_seconds(large):
    assert large[1] < 10


def test_a_search_does_no_work_twice(monkeypatch):
    """Layers and memory are counted for plans that could run, layers once for all stages of ZeRO; ZeRO-2 in a pipeline
    is not timed again."""
    calls = Counter()

    def counted(module, name):
        call = getattr(module, name)

        def wrapper(*args, **kwargs):
            calls[name] += 1
            return call(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapper)

    counted(candidates, "balanced_chunks")
    counted(candidates, "MemoryCheck")
    counted(search_module, "step_seconds")
    model, cluster = presets.model("llama3-70b"), presets.cluster("h100x64")
    found = search(model, cluster, batch=512)
    plans = [plan for plan, _ in found.ranking]
    memory_only = {r.base for r in found.rejected if r.kind == "memory"}
    even = {replace(plan, layers_per_chunk=(), recompute="none", offload="none") for plan in plans}
    assert 0 < calls["balanced_chunks"] <= len(even | memory_only) / 2
    # Once for each plan, and once more for its uneven stages.
    assert len(even) < calls["MemoryCheck"] <= 2 * len(even | memory_only)
    repeated = sum(plan.pp > 1 and plan.zero == 2 for plan in plans)
    misses = min(2000, sum(r.kind == "memory" for r in found.rejected))
    assert repeated > 500
    assert calls["step_seconds"] <= len(plans) - repeated / 2 + misses


def test_zero_1_and_2_in_a_pipeline_take_the_same_time():
    plan = Plan(dp=16, tp=8, pp=8, zero=1, sequence_parallel=True, global_batch=1536)
    seconds = {step_seconds(GPT3, A100, replace(plan, zero=zero), efficiency("ampere")) for zero in (1, 2)}
    assert len(seconds) == 1


def test_all_plans_that_run_are_ranked(large):
    found = large[0]
    times = [seconds for _, seconds in found.ranking]
    assert times == sorted(times)
    assert len(found.plans) == 20
    # The first is the simplest of those within 2 % of the fastest. Plans that only just fit come last.
    order = [(plan.tight, plan.step) for plan in found.plans]
    assert order[1:] == sorted(order[1:]) and not found.best.tight
    assert found.best.step <= 1.02 * min(plan.step for plan in found.plans if not plan.tight)
    assert all(systems(GPT3, A100, plan.plan) for plan in found.plans)
    assert found.best is found.plans[0]
    assert len({plan for plan, _ in found.ranking}) == len(found.ranking)
    for plan, _ in found.ranking[::50]:
        assert problem(GPT3, A100, plan) is None
        assert max(stage.total for stage in memory(GPT3, plan)) <= A100.gpu.memory


def test_every_rejected_plan_has_its_reason(large):
    found = large[0]
    kinds = {}
    for rejection in found.rejected:
        kinds.setdefault(rejection.kind, rejection)
    assert kinds["tp leaves the node"].reason == "TP 16 would leave the node of 8 GPUs"
    assert "stages, but the model has 96 layers; nearest: " in kinds["too few layers"].reason
    assert kinds["batch does not divide"].reason == "DP 1024 does not divide the batch of 1536"
    over = kinds["memory"]
    stage = max(memory(GPT3, over.plan), key=lambda stage: stage.total)
    needs, excess = stage.total / 2**30, stage.total / 2**30 - 80
    assert over.reason == f"stage {stage.stage} needs {needs:.1f} GiB of 80.0: {excess:.1f} too much"
    assert over.excess == pytest.approx(excess * 2**30)
    assert sum(found.reasons().values()) == len(found.rejected)
    assert not {rejection.plan for rejection in found.rejected} & {plan for plan, _ in found.ranking}


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


def test_sensitivity_tries_each_constant(large):
    found = {row.constant: row for row in large[0].sensitivity}
    # Experts, offload and fp8 have constants that this model does not need; "serial" is of CPUs.
    unused = {"fp8", "host_memory", "grouped", "dispatch", "expert_host", "expert_sync", "serial"}
    assert set(found) == set(CONSTANTS) - unused
    assert found["matmul"].seconds < -0.2  # a better constant, a shorter step
    assert found["interference"].seconds >= 0


def test_gains_are_estimates_with_more_of_one_resource(large):
    found = large[0]
    gains = {gain.resource: gain for gain in found.gains}
    assert set(gains) - {"memory"} == {"flops", "bandwidth", "intra", "inter", "gpus"}
    assert [gain.seconds for gain in found.gains[:-1]] == sorted(gain.seconds for gain in found.gains[:-1])
    for name in ("intra", "inter"):
        link = getattr(A100, name)
        quick = replace(A100, **{name: replace(link, bandwidth=link.bandwidth + gains[name].more)})
        assert gains[name].plan == found.best.plan
        assert found.best.step > gains[name].seconds == pytest.approx(estimate(GPT3, quick, found.best.plan).step)
    gpus = gains["gpus"]
    wider = estimate(GPT3, replace(A100, gpus=1024 + gpus.more), gpus.plan)
    assert found.best.step > gpus.seconds == pytest.approx(wider.step)
    assert wider.peak_memory.total < A100.gpu.memory


def test_gains_without_links_or_a_batch_to_divide():
    one = search(presets.model("qwen3-0.6b"), presets.cluster("h100x1"), batch=1, options=FEW)
    assert [gain.resource for gain in one.gains] == ["flops", "bandwidth"]


def test_where_nothing_fits_it_says_what_would():
    cluster = presets.cluster("rtx3090x8")
    found = search(GPT3, cluster, batch=64, options=FEW)
    assert found.plans == ()
    assert found.smallest == smallest_cluster(GPT3, cluster, batch=64, options=FEW) > 8
    with pytest.raises(ValueError, match=f"no plan of gpt3-175b fits on rtx3090x8; {found.smallest} of these GPUs"):
        _ = found.best
    nearest = min(rejection.excess for rejection in found.rejected if rejection.excess)
    assert "the nearest is " in found.nothing_fits() and f"{nearest / GIB:.1f} too much" in found.nothing_fits()
    enough = search(GPT3, replace(cluster, gpus=found.smallest), batch=64, options=replace(FEW, micro_batches=(1,)))
    assert enough.plans


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tp": (3,)}, "tp=3 does not divide the 8 GPUs"),
        ({"pp": (16,)}, "pp=16 does not divide the 8 GPUs"),
        ({"dp": (8,), "batch": 12}, "DP 8 does not divide the batch of 12"),
    ],
)
def test_where_nothing_runs_it_says_why(options, reason):
    """Not that memory is missing, nor that other GPUs would do."""
    batch = options.pop("batch", 64)
    found = search(LLAMA, presets.cluster("h100x8"), batch=batch, options=replace(FEW, **options))
    assert not found.plans
    assert reason in found.nothing_fits() and "fits" not in found.nothing_fits()


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


def test_more_gpus_never_need_more_memory_each():
    """The most frugal plan, over every way to use twice the GPUs."""
    needs = []
    for gpus in (8, 16, 32, 64):
        cluster = presets.cluster(f"a100-80x{gpus}")
        found = search(LLAMA, cluster, batch=64, options=replace(FEW, micro_batches=(1,), recompute=("none",)))
        needs.append(min(max(s.total for s in memory(LLAMA, plan)) for plan, _ in found.ranking))
    assert needs == sorted(needs, reverse=True)


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


def test_near_misses_say_what_they_lack():
    """Without recomputation a step is much shorter, but takes 2 % more memory than there is."""
    cluster = presets.cluster("a100-80x8")
    options = replace(FEW, zero=(3,), tp=(1,), pp=(1,), cp=(1,), micro_batches=(1,), recompute=("none", "full"))
    best = search(LLAMA, cluster, batch=64, options=options).best
    assert best.plan.recompute == "none"
    needs = best.peak_memory.total
    smaller = replace(cluster, gpu=replace(cluster.gpu, memory=needs * 0.98))
    found = search(LLAMA, smaller, batch=64, options=options)
    assert (found.best.plan.recompute, found.misses[0].plan) == ("full", best.plan)
    assert found.misses[0].excess == pytest.approx(0.02 * needs)
    assert found.misses[0].seconds == pytest.approx(best.step)
    assert best.step < 0.9 * found.best.step
    memory_gain = next(gain for gain in found.gains if gain.resource == "memory")
    assert (memory_gain.more, memory_gain.seconds) == (found.misses[0].excess, found.misses[0].seconds)
    assert f"{0.02 * needs / 2**30:.1f} too much" in found.misses[0].reason
    much = search(LLAMA, replace(cluster, gpu=replace(cluster.gpu, memory=needs * 0.8)), batch=64, options=options)
    assert not much.misses


def test_each_division_of_the_ranks_is_shown_once():
    model, cluster = presets.model("llama3-70b"), presets.cluster("h100x64")
    found = search(model, cluster, batch=512, options=replace(FEW, zero=(1, 2), tp=(2, 4), micro_batches=(1, 2, 4)))
    roomy = [each for each in found.plans if not each.tight]
    assert len({division(plan) for plan, _ in found.ranking}) < len(found.ranking)
    assert len({division(each.plan) for each in roomy}) == len(roomy) > 5
    assert len({twins(each.plan) for each in roomy}) == len(roomy)
    # Each row is the fastest that has room of its division, but for the first, which may be simpler.
    for each in roomy[1:]:
        faster = [plan for plan, time in found.ranking if time < 0.97 * each.step]
        others = [plan for plan in faster if division(plan) == division(each.plan)]
        public = [plan for plan in others if set(systems(model, cluster, plan)) - {"parallel_ops"}]
        assert all(estimate(model, cluster, plan).tight for plan in public[:20])
    one = Plan(dp=2, cp=2, zero=1, micro_batch=1, global_batch=8)
    assert twins(one) == twins(replace(one, dp=1, cp=4, micro_batch=2, zero=2)) != twins(replace(one, micro_batch=2))
    assert division(one) == division(replace(one, zero=3, micro_batch=2)) != division(replace(one, dp=1, cp=4))


def test_losses_add_up_to_the_difference(large):
    result = large[0]
    first = result.best
    for other in result.plans[1:6]:
        found = loss(first, other)
        assert sum(found.parts.values()) == pytest.approx(other.step - first.step, abs=1e-9 * first.step)
        if found.excess:
            lighter = replace(other.plan, recompute=found.recompute, offload=found.offload)
            assert quick_memory_problem(GPT3, A100, lighter).excess == found.excess
        else:
            assert (other.plan.recompute, other.plan.offload) == ("none", "none")


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
