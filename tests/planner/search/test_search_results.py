"""What a search answers: the ranking, a reason for each rejected plan, losses, gains, sensitivity and near misses."""

import time
from dataclasses import replace

import pytest

from parallel_ops.planner import Plan, SearchOptions, estimate, memory, presets, search, smallest_cluster
from parallel_ops.planner.compute.efficiency import CONSTANTS
from parallel_ops.planner.export import systems
from parallel_ops.planner.feasibility import problem, quick_memory_problem
from parallel_ops.planner.plan import unchecked
from parallel_ops.planner.results import GIB
from parallel_ops.planner.search.losses import loss
from parallel_ops.planner.search.options import default_options
from parallel_ops.planner.search.result import division, twins

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
    assert found.best is found.plans[0] and found.simplest in found.plans[: found.ties]
    for each in found.plans:
        room = A100.gpu.memory / (1 + each.error_band.memory / 2)
        assert each.tight == (each.peak_memory.total > room)
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


def test_the_smallest_cluster_has_whole_nodes():
    """Of six GPUs each, as of eight: powers of two are rounded up."""
    cluster = replace(presets.cluster("rtx3090x8"), gpus=6, gpus_per_node=6)
    found = search(GPT3, cluster, batch=96, options=FEW)
    assert not found.plans and found.smallest > 6 and found.smallest % 6 == 0
    assert f"{found.smallest} of these GPUs would do" in found.nothing_fits()


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


def test_where_no_system_runs_what_fits_it_says_so():
    """The optimizer of one GPU fits in host memory alone, which systems offload with ZeRO."""
    found = search(LLAMA, presets.cluster("h100x1"), batch=8, options=SearchOptions(zero=(0,)))
    assert found.ranking and not found.plans
    assert found.nothing_fits().startswith(
        "no known system runs the plans of llama2-7b that fit on h100x1, such as dp1"
    )


def test_one_gpu_offloads_as_systems_do():
    short, roomy = (search(LLAMA, presets.cluster(name), batch=8).plans for name in ("h100x1", "b200x1"))
    assert short and all("optimizer" in each.plan.offload and each.plan.zero for each in short)
    assert roomy and not any(each.plan.zero for each in roomy)


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


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "target"),
    [
        ("mixtral-8x7b", "h100x8", 32, ""),
        ("llama3-8b", "h100x16", 64, "megatron"),
        ("llama2-7b", "a100-40x8+h100x8", 16, ""),
    ],
)
def test_plans_whose_memory_is_not_counted_are_no_near_misses(model, cluster, batch, target):
    """The memory that is counted when a rejection is read is at least that of the smaller micro-batch before it."""
    shape, machine = presets.model(model), presets.cluster(cluster)
    options = replace(default_options(machine), target=target, micro_batches=(1, 2, 4, 8))
    found = search(shape, machine, batch=batch, options=options)
    large = [each for each in found.rejected if each.kind == "memory"]
    least = {}
    for each in large:
        plan = unchecked(each.plan, micro_batch=1)
        least[plan] = min(each.excess, least.get(plan, each.excess))
        if each.plan.micro_batches > 1 and least[plan] > 0.1 * machine.gpu.memory:
            assert each.excess >= least[plan]
    assert found.rejected.near(len(large)) == sorted(
        (each for each in large if each.excess <= 0.1 * machine.gpu.memory), key=lambda each: each.excess
    )
    nearest = min(each.excess for each in large)
    assert found.rejected.nearest()["memory"][1].excess == nearest
    assert found.rejected.nearest()["memory"][0] == len(large)


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
