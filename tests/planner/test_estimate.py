"""Step time: what it is made of, how it moves with the plan, and the rules of thumb."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops.planner import RULES, Efficiency, Plan, efficiency, estimate, presets
from parallel_ops.planner.compute import layer_passes, work_of
from parallel_ops.planner.plan import SCHEDULES, V_SHAPED
from parallel_ops.planner.step import Step

GPT3 = presets.model("gpt3-175b")
LLAMA = presets.model("llama3-8b")
A100 = presets.cluster("a100-80x64")
PLAN = Plan(dp=2, tp=8, pp=4, sequence_parallel=True, global_batch=64)


def chunks(kind):
    return 2 if kind in ("interleaved", *V_SHAPED) else 1


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_step_is_the_sum_of_its_parts(kind):
    plan = replace(PLAN, schedule=kind, virtual_stages=chunks(kind))
    found = estimate(GPT3, A100, plan)
    assert found.step == pytest.approx(found.compute + found.bubble + found.exposed + found.optimizer)
    assert found.tokens_per_second == pytest.approx(64 * GPT3.sequence / found.step)
    assert found.mfu == pytest.approx(found.tflops_per_gpu / 312)
    assert 0 < found.mfu < 1
    assert found.mfu == found.hfu
    assert found.days(300e9) == pytest.approx(300e9 / found.tokens_per_second / 86400)
    assert sum(t.exposed for t in found.transfers) <= sum(t.seconds for t in found.transfers) * (1 + 1e-9)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("pp", "m"), [(4, 16), (8, 32)])
def test_the_closed_form_is_near_the_simulation(kind, pp, m):
    plan = Plan(tp=8, pp=pp, schedule=kind, virtual_stages=chunks(kind), sequence_parallel=True, global_batch=m)
    cluster = replace(A100, gpus=plan.gpus)
    # Without the ends of the model, the stages are equal, as the closed forms have it.
    model = replace(GPT3, vocab=64)
    simulated, closed = (estimate(model, cluster, plan, simulated=on).step for on in (True, False))
    assert closed == pytest.approx(simulated, rel=0.04)


def test_recomputation_costs_a_forward_pass():
    none, full = (estimate(GPT3, A100, replace(PLAN, recompute=kind)) for kind in ("none", "full"))
    forward = Step(GPT3, A100, PLAN, efficiency("ampere")).ranks[0][0].forward * PLAN.micro_batches
    assert full.compute - none.compute == pytest.approx(forward)
    assert full.hardware_flops > none.hardware_flops == none.model_flops == full.model_flops


def test_overlap_hides_data_parallel_communication():
    plan = Plan(dp=64, zero=3, micro_batch=1, global_batch=64)
    hidden, exposed = (estimate(LLAMA, A100, replace(plan, overlap=on)) for on in (True, False))
    assert hidden.exposed < exposed.exposed
    assert hidden.compute == exposed.compute


def test_messages_that_wait_cost_more_than_those_that_overlap():
    """Scatter/gather divides the messages by tp, which matters where nothing hides them."""
    gains = []
    for overlap in (True, False):
        plan = replace(PLAN, overlap=overlap, sequence_parallel=False)
        whole, split = (estimate(GPT3, A100, replace(plan, scatter_gather=on)).step for on in (False, True))
        gains.append(whole / split)
    assert 1 < gains[0] < gains[1]


def test_price_and_power_give_cost_and_energy():
    found = estimate(GPT3, replace(A100, price=2.0), PLAN)
    assert found.cost == pytest.approx(2.0 * 64 * found.step / 3600)
    assert found.energy == pytest.approx(400 * 64 * found.step)
    assert estimate(GPT3, A100, PLAN).cost == 0


def test_a_weight_costs_two_flops_a_token_in_each_pass():
    ideal = Efficiency(matmul=1.0, network=1.0, interference=0.01, memory=1.0)
    gpu = replace(A100.gpu, bandwidth=1e30)
    passes = layer_passes(LLAMA, gpu, ideal, work_of(Plan()), sparse=False)
    weights = LLAMA.attention_weights + LLAMA.mlp_weights
    assert passes.weight_grad == pytest.approx(2 * weights * LLAMA.sequence / 312e12)
    scores = passes.forward - passes.weight_grad
    assert passes.input_grad == pytest.approx(passes.weight_grad + 2 * scores)


@given(
    name=st.sampled_from(["matmul", "network", "memory"]),
    value=st.floats(0.1, 0.9),
    kind=st.sampled_from(SCHEDULES),
)
def test_better_hardware_is_never_slower(name, value, kind):
    plan = replace(PLAN, schedule=kind, virtual_stages=chunks(kind))
    constants = replace(efficiency("ampere"), **{name: value})
    better = replace(constants, **{name: value * 1.1})
    seconds = [estimate(GPT3, A100, plan, constants=c, simulated=False).step for c in (constants, better)]
    assert seconds[1] <= seconds[0] * (1 + 1e-12)


def test_two_kinds_of_gpu_share_the_layers_by_speed():
    mixed = presets.cluster("a100-80x32+h100x32")
    plan = Plan(dp=1, tp=8, pp=8, sequence_parallel=True, global_batch=64)
    even = estimate(GPT3, mixed, plan)
    balanced = estimate(GPT3, mixed, replace(plan, layers_per_chunk=(6, 6, 6, 5, 18, 18, 18, 19)))
    assert balanced.step < even.step
    assert balanced.mfu > even.mfu
    assert Step(GPT3, mixed, plan, efficiency("ampere")).slowest < 4


@pytest.mark.parametrize(
    ("model", "cluster", "plan", "message"),
    [
        (LLAMA, A100, Plan(dp=32, global_batch=32), "is 32, but the cluster has 64 GPUs"),
        (LLAMA, A100, Plan(tp=16, dp=4, global_batch=4), "TP 16 would leave the node of 8 GPUs"),
        (LLAMA, A100, Plan(dp=8, pp=8, schedule="interleaved", virtual_stages=8, global_batch=64), "64 chunks"),
        (LLAMA, A100, Plan(dp=64, ep=8, global_batch=64), "EP 8 needs a model with experts"),
        (LLAMA, A100, Plan(dp=64, sequence_parallel=True, global_batch=64), "shards over TP, which is 1"),
        (LLAMA, presets.cluster("v100x64"), Plan(dp=64, global_batch=64), "v100 has no bf16 matrix products"),
        (LLAMA, A100, Plan(dp=8, pp=8, zero=3, schedule="zb-h1", global_batch=64), "ZeRO-3 has given up"),
        (LLAMA, A100, Plan(dp=8, pp=8, recompute="full", schedule="zb-h1", global_batch=64), "twice, for I and for W"),
        (
            LLAMA,
            A100,
            Plan(dp=8, pp=8, schedule="interleaved", virtual_stages=2, global_batch=32),
            "multiples of PP 8; there are 4",
        ),
    ],
)
def test_what_cannot_run_says_why(model, cluster, plan, message):
    with pytest.raises(ValueError, match=message):
        estimate(model, cluster, plan)


@pytest.mark.parametrize(
    ("rule", "plan", "reason"),
    [
        ("pipeline_across_nodes", Plan(dp=1, tp=4, pp=16, global_batch=64), "PP 16 crosses nodes while TP 4 leaves"),
        ("model_parallel_just_fits", Plan(dp=1, tp=8, pp=8, sequence_parallel=True, global_batch=64), "PP 4 with"),
        ("enough_micro_batches", Plan(dp=1, tp=8, pp=8, global_batch=16), "16 micro-batches for PP 8"),
        (
            "micro_batch_of_least_time",
            Plan(dp=1, tp=8, pp=8, micro_batch=8, global_batch=64),
            "micro-batches of 1 would",
        ),
        ("sequence_parallel_with_tensor_parallel", Plan(dp=8, tp=8, global_batch=8), "TP 8 without"),
        ("recompute_last", Plan(dp=8, tp=8, recompute="full", global_batch=8), "selective recomputation would fit"),
    ],
)
def test_a_plan_says_which_rule_it_breaks(rule, plan, reason):
    found = dict(estimate(presets.model("llama2-13b"), A100, plan).broken_rules)
    assert reason in found[rule]


def test_a_sensible_plan_breaks_no_rule():
    plan = Plan(dp=32, tp=2, zero=1, sequence_parallel=True, micro_batch=2, global_batch=64)
    assert "tensor_parallel_inside_node" not in dict(estimate(LLAMA, A100, plan).broken_rules)
    found = estimate(LLAMA, presets.cluster("a100-80x8"), Plan(dp=8, zero=1, global_batch=8))
    assert found.broken_rules == ()


def test_tensor_parallelism_across_nodes_breaks_a_rule():
    plan = Plan(tp=16, dp=4, global_batch=4)
    assert RULES["tensor_parallel_inside_node"](LLAMA, A100, plan) == "TP 16 leaves the node of 8 GPUs"
    assert RULES["tensor_parallel_inside_node"](LLAMA, presets.cluster("tpu-v4x64"), plan) is None
