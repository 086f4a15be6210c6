"""Step time: what it is made of, how it moves with the plan, and the rules of thumb."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops.planner import RULES, Model, Plan, efficiency, estimate, presets
from parallel_ops.planner.compute.attention import attention_seconds
from parallel_ops.planner.compute.compute import head_passes, layer_passes
from parallel_ops.planner.compute.efficiency import SHARES
from parallel_ops.planner.compute.matmuls import Engine, product
from parallel_ops.planner.compute.work import work_of
from parallel_ops.planner.passes import layer_costs
from parallel_ops.planner.plan import SCHEDULES, V_SHAPED
from parallel_ops.planner.step import StepTime, step_seconds

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
    assert found.tokens_per_second == pytest.approx(64 * GPT3.seq_length / found.step)
    assert found.mfu == pytest.approx(found.tflops_per_gpu / 312)
    assert 0 < found.mfu < 1
    assert found.mfu == found.hfu
    assert found.days(300e9) == pytest.approx(300e9 / found.tokens_per_second / 86400)
    assert sum(t.exposed for t in found.transfers) <= sum(t.seconds for t in found.transfers) * (1 + 1e-9)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("pp", "m"), [(4, 16), (8, 32)])
def test_what_a_search_compares_is_near_the_simulation(kind, pp, m):
    plan = Plan(tp=8, pp=pp, schedule=kind, virtual_stages=chunks(kind), sequence_parallel=True, global_batch=m)
    cluster = replace(A100, gpus=plan.gpus)
    # Without the ends of the model the stages are equal.
    model = replace(GPT3, vocab_size=64)
    quick = step_seconds(model, cluster, plan, efficiency("ampere"))
    assert quick == pytest.approx(estimate(model, cluster, plan).step, rel=0.02)


def test_a_pipeline_fills_through_the_stages_without_the_output_embedding():
    """The last stage, which has the output embedding, is much slower: the pipeline does not fill at its rate."""
    model = Model(name="small", num_layers=16, hidden_size=1024, num_heads=16, vocab_size=51200, seq_length=1024)
    cluster = presets.cluster("a100-80x4")
    for m in (2, 4):
        plan = Plan(pp=4, micro_batch=8, global_batch=8 * m, recompute="full", flash_attention=False)
        quick = step_seconds(model, cluster, plan, efficiency("ampere", "megatron-2021"))
        assert quick == pytest.approx(estimate(model, cluster, plan, software="megatron-2021").step, rel=0.02)


def test_without_a_barrier_zero_bubble_schedules_gain_and_others_do_not():
    for kind, gains in (("1f1b", False), ("zb-h1", False), ("zb-v", True), ("zb-2p", True)):
        plan = replace(PLAN, schedule=kind, virtual_stages=chunks(kind))
        with_barrier, without = (estimate(GPT3, A100, replace(plan, optimizer_barrier=on)).step for on in (True, False))
        assert (without < with_barrier * 0.994) == gains, kind


def test_recomputation_costs_a_forward_pass():
    none, full = (estimate(GPT3, A100, replace(PLAN, recompute=kind)) for kind in ("none", "full"))
    layer, _ = layer_costs(GPT3, A100, A100.gpu, efficiency("ampere"), work_of(PLAN), sparse=False)
    forward = layer.forward * GPT3.num_layers / PLAN.pp * PLAN.micro_batches
    assert full.compute - none.compute == pytest.approx(forward, rel=0.01)  # but for what the host's launches hide
    assert full.hardware_flops > none.hardware_flops == none.model_flops == full.model_flops


def test_offloaded_parameters_are_read_in_every_pass():
    plan = Plan(dp=64, zero=3, fsdp=False, global_batch=256, offload="optimizer")
    optimizer, both = (
        estimate(LLAMA, A100, replace(plan, offload=kind)) for kind in ("optimizer", "optimizer+parameters")
    )
    copied = [sum(t.bytes for t in found.transfers if t.group == "host") for found in (optimizer, both)]
    shard = 2 * LLAMA.parameters / 64
    assert copied[1] - copied[0] == pytest.approx((2 * 4 - 1) * shard)  # in place of once, after the update
    assert both.step >= optimizer.step
    with pytest.raises(ValueError, match="needs zero=3"):
        estimate(LLAMA, A100, replace(plan, zero=2, offload="optimizer+parameters"))


def test_recomputed_experts_cost_their_products():
    mixtral = replace(presets.model("mixtral-8x7b"), seq_length=4096)
    kinds = ("none", "selective", "experts", "full")
    plans = [Plan(dp=64, ep=8, zero=3, global_batch=64, recompute=kind) for kind in kinds]
    found = [estimate(mixtral, A100, plan) for plan in plans]
    more = [each.compute - found[0].compute for each in found]
    # Two of the matrices that a token uses in a layer's forward are not those of its experts, attention and the router.
    share = 2 * mixtral.experts_per_token * mixtral.expert_weights / mixtral.layer_flops(True)
    assert 0 < more[1] < more[2] < more[3]
    assert more[2] == pytest.approx(share * more[3], rel=0.15)
    sent = [sum(t.bytes for t in each.transfers if t.group == "ep") for each in found]
    assert sent[0] == sent[2] < sent[3]


def test_overlap_hides_data_parallel_communication():
    plan = Plan(dp=64, zero=3, micro_batch=1, global_batch=64)
    hidden, exposed = (estimate(LLAMA, A100, replace(plan, overlap=on)) for on in (True, False))
    assert hidden.exposed < exposed.exposed
    assert hidden.compute == exposed.compute
    # Of stages of a layer everything is exposed, once.
    model, plan = replace(LLAMA, num_layers=2), Plan(dp=32, pp=2, zero=3, schedule="gpipe", global_batch=64)
    hidden, exposed = (estimate(model, A100, replace(plan, overlap=on)) for on in (True, False))
    assert hidden.exposed == pytest.approx(exposed.exposed)


def test_an_offloaded_optimizer_takes_as_long_as_on_the_rank_that_owns_most():
    """Of 9 layers with the embedding, though a stage of 11 layers computes longer."""
    plan = Plan(pp=4, tp=4, dp=4, offload="optimizer", global_batch=64)
    layer = LLAMA.layer_parameters(False)
    ends, inner = (
        estimate(LLAMA, A100, replace(plan, layers_per_chunk=sizes)) for sizes in ((9, 11, 8, 4), (6, 11, 11, 4))
    )
    more = (9 * layer + LLAMA.embedding_parameters) / (11 * layer)
    assert more > 1 and ends.optimizer / inner.optimizer == pytest.approx(more, rel=1e-3)
    host = [next(t for t in found.transfers if t.group == "host").bytes for found in (ends, inner)]
    assert host[0] / host[1] == pytest.approx(more, rel=1e-3)


def test_messages_that_wait_cost_more_than_those_that_overlap():
    """Scatter/gather divides the messages by tp, which matters where nothing hides them."""
    gains = []
    for overlap in (True, False):
        plan = replace(PLAN, overlap=overlap, sequence_parallel=False)
        whole, split = (estimate(GPT3, A100, replace(plan, scatter_gather=on)).step for on in (False, True))
        gains.append(whole / split)
    assert gains[0] < gains[1]
    assert gains[1] > 1


def test_price_and_power_give_cost_and_energy():
    found = estimate(GPT3, replace(A100, price=2.0), PLAN)
    assert found.cost == pytest.approx(2.0 * 64 * found.step / 3600)
    assert found.energy == pytest.approx(400 * 64 * found.step)
    assert estimate(GPT3, A100, PLAN).cost == 0


IDEAL = replace(efficiency("ampere"), **dict.fromkeys(SHARES, 1.0), host=0.0, collective=0.0)


def test_a_weight_costs_two_flops_a_token_in_each_pass():
    gpu = replace(A100.gpu, bandwidth=1e30, multiprocessors=0)
    passes = layer_passes(LLAMA, gpu, IDEAL, work_of(Plan()), sparse=False)
    weights = LLAMA.attention_weights + LLAMA.mlp_weights
    assert passes.weight_grad == pytest.approx(2 * weights * LLAMA.seq_length / 312e12, rel=2e-3)
    # Causal: half of the blocks and the diagonal; backward five matmuls in place of two.
    scores = LLAMA.seq_length * LLAMA.attention_flops * 0.5 * (1 + 128 / LLAMA.seq_length) / 312e12
    assert passes.forward - passes.weight_grad == pytest.approx(scores, rel=2e-3)
    assert passes.input_grad - passes.weight_grad == pytest.approx(2.5 * scores, rel=2e-3)


def test_a_product_takes_whole_waves_of_tiles():
    engine = Engine(flops=1e12, bandwidth=1e30, multiprocessors=4)
    four, five = (product(engine, 256 * tiles, 128, 1 << 20) for tiles in (4, 5))
    assert four == pytest.approx(2 * 256 * 4 * 128 * (1 << 20) / 1e12, rel=1e-3)
    # A fifth large tile would take a second wave; smaller ones fill up half of it.
    assert 1.25 * four < five < 2 * four
    # An output row that is no whole number of 16 bytes feeds the tensor cores at less than half of their rate.
    assert product(engine, 1024, 121, 1 << 20) > 2 * product(engine, 1024, 128, 1 << 20)
    # Small matmuls take what the memory takes.
    slow = engine._replace(bandwidth=1e6)
    assert product(slow, 1, 64, 64) == pytest.approx((64 + 64 + 64 * 64) * 2 / 1e6, rel=1e-2)


def test_fp8_makes_linears_faster_and_nothing_else():
    h100 = presets.cluster("h100x8").gpu
    times = {}
    for dtype in ("bf16", "fp8"):
        work = work_of(Plan(dtype=dtype, micro_batch=4, global_batch=4))
        head = head_passes(LLAMA, h100, efficiency("hopper"), work).total
        attention = attention_seconds(LLAMA, h100, efficiency("hopper"), work, LLAMA.seq_length)
        times[dtype] = layer_passes(LLAMA, h100, efficiency("hopper"), work, sparse=False).total, head, attention
    assert times["fp8"][0] < times["bf16"][0]
    assert times["fp8"][1:] == times["bf16"][1:]


def test_the_host_is_the_floor_of_a_small_layer():
    small, cluster = replace(presets.model("megatron-1.7b"), seq_length=128), presets.cluster("a100-80x1")
    seconds = []
    for host in (0.0, 1e-3):
        constants = replace(efficiency("ampere"), host=host)
        compute, _ = layer_costs(small, cluster, cluster.gpu, constants, work_of(Plan()), sparse=False)
        seconds.append(compute.total)
    assert seconds[0] < 1.5e-3
    assert 2e-3 <= seconds[1] < 2.3e-3


@given(
    name=st.sampled_from(["matmul", "network", "memory"]),
    value=st.floats(0.1, 0.9),
    kind=st.sampled_from(SCHEDULES),
)
def test_better_hardware_is_never_slower(name, value, kind):
    plan = replace(PLAN, schedule=kind, virtual_stages=chunks(kind))
    constants = replace(efficiency("ampere"), **{name: value})
    better = replace(constants, **{name: value * 1.1})
    seconds = [step_seconds(GPT3, A100, plan, c) for c in (constants, better)]
    assert seconds[1] <= seconds[0] * (1 + 1e-12)


def test_two_kinds_of_gpu_share_the_layers_by_speed():
    mixed = presets.cluster("a100-80x32+h100x32")
    plan = Plan(dp=1, tp=8, pp=8, sequence_parallel=True, global_batch=64)
    even = estimate(GPT3, mixed, plan)
    balanced = estimate(GPT3, mixed, replace(plan, layers_per_chunk=(6, 6, 6, 5, 18, 18, 18, 19)))
    assert balanced.step < even.step
    assert balanced.mfu > even.mfu
    assert StepTime(GPT3, mixed, plan, efficiency("ampere")).slowest < 4


@pytest.mark.parametrize(
    ("model", "cluster", "plan", "message"),
    [
        (LLAMA, A100, Plan(dp=32, global_batch=32), "is 32, but the cluster has 64 GPUs"),
        (LLAMA, A100, Plan(tp=16, dp=4, global_batch=4), "TP 16 would leave the node of 8 GPUs"),
        (LLAMA, A100, Plan(dp=64, ep=8, global_batch=64), "EP 8 needs a model with experts"),
        (LLAMA, A100, Plan(dp=64, sequence_parallel=True, global_batch=64), "shards over TP, which is 1"),
        (LLAMA, presets.cluster("v100x64"), Plan(dp=64, global_batch=64), "v100 has no bf16 matrix products"),
        (LLAMA, A100, Plan(dp=8, pp=8, zero=3, schedule="zb-h1", global_batch=64), "ZeRO-3 has released"),
        (LLAMA, A100, Plan(dp=8, pp=8, recompute="full", schedule="zb-h1", global_batch=64), "twice, for I and for W"),
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
    assert (
        RULES["tensor_parallel_inside_node"](LLAMA, A100, plan, efficiency("ampere"))
        == "TP 16 leaves the node of 8 GPUs"
    )
    assert RULES["tensor_parallel_inside_node"](LLAMA, presets.cluster("tpu-v4x64"), plan, efficiency("ampere")) is None
