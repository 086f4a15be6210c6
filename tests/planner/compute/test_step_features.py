"""What features of training software change in a step: overlap, graphs, dispatchers, formats, recomputation."""

from dataclasses import replace

import pytest

from parallel_ops.planner import Model, Plan, efficiency, estimate, presets
from parallel_ops.planner.communication.traffic import copies
from parallel_ops.planner.compute.attention import attention_seconds
from parallel_ops.planner.compute.software import (
    CURRENT,
    constants_of,
)
from parallel_ops.planner.compute.work import PassTimes, work_of
from parallel_ops.planner.export import TARGETS
from parallel_ops.planner.feasibility import problem
from parallel_ops.planner.memory.memory import memory
from parallel_ops.planner.passes import launched, layer_costs, softmax_falls_back
from parallel_ops.planner.placement import expert_replicas
from parallel_ops.planner.precision import FORMATS
from parallel_ops.planner.step import StepTime

H100, LLAMA, QWEN = presets.cluster("h100x64"), presets.model("llama3-70b"), presets.model("qwen3-30b-a3b")
SHARDED = Plan(dp=2, tp=8, pp=4, zero=1, sequence_parallel=True, global_batch=64)


def step(plan, model=LLAMA, cluster=H100, software=CURRENT, **constants):
    found = replace(constants_of(cluster, software), **constants)
    return StepTime(model, cluster, plan, found).seconds()


def test_tensor_parallel_overlap_is_bounded_by_the_products_and_can_be_off():
    full = step(SHARDED, tp_overlap=1.0)
    assert full < step(SHARDED, tp_overlap=0.5) < step(SHARDED, tp_overlap=0.0)
    assert step(replace(SHARDED, tp_overlap=False)) == step(SHARDED, tp_overlap=0.0)
    # Without sequence parallelism there is nothing that a matmul could overlap with piece by piece.
    whole = replace(SHARDED, sequence_parallel=False)
    assert step(whole, tp_overlap=1.0) == step(whole, tp_overlap=0.0)
    slow = replace(H100, intra=replace(H100.intra, bandwidth=1e8))
    constants = replace(efficiency("hopper"), tp_overlap=1.0)
    compute, waits = layer_costs(LLAMA, slow, slow.gpu, constants, work_of(SHARDED), sparse=False)
    assert waits.total > 10 * compute.total


def test_the_estimate_of_exposed_traffic_is_that_of_the_step():
    for software in ("megatron-2021", "megatron-bridge-2025"):
        found = estimate(LLAMA, H100, SHARDED, software=software)
        exposed = sum(transfer.exposed for transfer in found.transfers if transfer.group == "tp")
        inside = sum(StepTime(LLAMA, H100, SHARDED, efficiency("hopper", software)).passes[1]) * SHARDED.micro_batches
        assert exposed == pytest.approx(inside, rel=0.02)


def test_what_is_exposed_in_a_micro_batch_delays_those_that_fill_the_pipeline():
    """Eight micro-batches on four stages take as long as eleven on one: those of 1F1B's idle time, too."""
    plan = Plan(dp=16, pp=4, zero=3, global_batch=128, overlap=False)
    found = StepTime(LLAMA, H100, plan, constants_of(H100, CURRENT))
    assert found.data_parallel() == pytest.approx(11 * sum(found.sharding.each) + found.sharding.copies, rel=0.03)


def test_copies_of_offload_and_gathers_run_at_the_same_time():
    """On links that take longer than the GPU a step takes the time of the slower one, however fast the GPU is."""
    slow = replace(H100, gpus=8, intra=replace(H100.intra, bandwidth=2e9), gpu=replace(H100.gpu, host_link=2e9))
    fast = replace(slow, gpu=replace(slow.gpu, bf16=2 * slow.gpu.bf16))
    plan = Plan(dp=8, zero=3, micro_batch=2, global_batch=64, offload="activations")
    assert step(plan, cluster=fast) <= step(plan, cluster=slow)


def test_an_offloaded_optimizer_takes_the_rate_of_the_host():
    """7B on 8 A800 took 20.1 and 16.8 s a step longer with the optimizer on the host."""
    model, cluster = presets.model("llama2-7b"), presets.cluster("a800x8")
    for zero in (2, 3):
        plan = Plan(dp=8, zero=zero, fsdp=False, fused_ops=False, recompute="full", global_batch=64)
        there, back = (
            step(replace(plan, offload=kind), model, cluster, "deepspeed-2024") for kind in ("optimizer", "none")
        )
        assert there - back == pytest.approx(18.4, rel=0.2)


def test_all_to_alls_overlap_with_another_micro_batch_that_recomputes_no_experts():
    """Megatron-core's ``TransformerConfig`` asserts it, and that a layer with a CUDA graph inside is not recomputed."""
    cluster, plan = presets.cluster("b200x8"), Plan(dp=8, ep=8, zero=1, fsdp=False, ep_overlap=True, global_batch=16)
    alone = replace(plan, micro_batch=2)
    assert plan.hides_dispatch and not alone.hides_dispatch
    assert step(alone, QWEN, cluster) == step(replace(alone, ep_overlap=False), QWEN, cluster)
    megatron = TARGETS["megatron"]
    assert megatron.runs(QWEN, cluster, plan) and megatron.runs(QWEN, cluster, replace(plan, recompute="layernorm"))
    for recompute in ("full", "moe", "layernorm+moe"):
        assert "does not recompute" in str(megatron.problem(QWEN, cluster, replace(plan, recompute=recompute)))
        graph = replace(plan, ep_overlap=False, cuda_graph="attention", recompute=recompute)
        assert "CUDA graph" in str(megatron.problem(QWEN, cluster, graph))
    assert "--overlap-moe" in megatron.write(QWEN, cluster, plan)
    assert "--overlap-moe" not in megatron.write(QWEN, cluster, replace(plan, ep=1))


def test_dropless_experts_wait_for_the_host_in_every_layer():
    """The host launches a sparse layer only once it has read the numbers of tokens, so nothing hides its time."""
    cluster = presets.cluster("b200x8")
    plan = Plan(dp=8, ep=8, zero=1, dtype="fp8", grad_dtype="bf16", global_batch=512)
    found = efficiency("blackwell", CURRENT)
    dropped, dropless = (step(replace(plan, capacity_factor=factor), QWEN, cluster) for factor in (1.0, 0.0))
    # Some of it the GPU would have waited for launches anyway.
    assert 0 < dropless - dropped < 64 * 48 * 2 * (found.host + found.expert_host)
    assert step(plan, QWEN, cluster, expert_sync=0.0) == dropped
    assert step(replace(plan, capacity_factor=1.0), QWEN, cluster, expert_host=0.0) < dropped
    # In a graph of the whole step nothing waits for the host.
    for factor in (1.0, 0.0):
        graph = replace(plan, capacity_factor=factor, cuda_graph="full")
        assert step(graph, QWEN, cluster) == step(graph, QWEN, cluster, host=0.0, expert_host=0.0) < dropped


def test_a_graph_of_the_step_helps_dense_models_that_the_host_limits():
    node = presets.cluster("h100x8")
    small = Model(name="small", num_layers=12, hidden_size=1024, num_heads=16, vocab_size=51200, seq_length=2048)
    plan = Plan(dp=8, zero=1, global_batch=64)
    assert step(replace(plan, cuda_graph="full"), small, node) < 0.95 * step(plan, small, node)


def test_products_of_experts_with_few_rows_are_slower():
    """Measured on a B200: 128 rows reach about half of what 2,460 do (github.com/MooreThreads/SimuMax)."""
    cluster = presets.cluster("b200x8")
    plan = Plan(dp=8, ep=8, zero=1, capacity_factor=1.0, cuda_graph="full", micro_batch=1, global_batch=512)
    one_rate = [step(plan, QWEN, cluster, grouped_rows=0.0)]
    by_rows = [step(plan, QWEN, cluster)]
    for batch in (2, 8):
        larger = replace(plan, micro_batch=batch)
        one_rate.append(step(larger, QWEN, cluster, grouped_rows=0.0))
        by_rows.append(step(larger, QWEN, cluster))
    losses = [slow / fast for slow, fast in zip(by_rows, one_rate, strict=True)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[2] > 1
    assert step(plan, QWEN, cluster, grouped=0.5) > by_rows[0]
    # A tile that is not full takes as long as a full one, not longer.
    spread = replace(plan, ep=1)
    short = [step(spread, replace(QWEN, seq_length=tokens), cluster) for tokens in (128, 256, 512, 1024, 2048)]
    assert short == sorted(short)


def test_experts_may_be_spread_over_tensor_parallel_ranks():
    model = presets.model("qwen3-235b-a22b")
    plan = Plan(dp=16, tp=2, pp=8, ep=32, expert_tp=1, zero=1, sequence_parallel=True, global_batch=2048)
    assert problem(model, presets.cluster("h100x256"), plan) is None
    assert expert_replicas(plan) == 1 and expert_replicas(replace(plan, ep=16)) == 2
    split = replace(plan, ep=16, expert_tp=0)
    # The same experts a GPU, in whole ones or in halves of twice as many.
    both = [max(stage.parameters for stage in memory(model, each)) for each in (plan, split)]
    assert both[0] == pytest.approx(both[1])
    with pytest.raises(ValueError, match=r"ep must divide dp \* cp \(16\), got 32"):
        replace(plan, expert_tp=0)
    with pytest.raises(ValueError, match=r"expert_tp must divide tp \(2\), got 3"):
        replace(plan, expert_tp=3)


def test_a_token_is_sent_to_as_many_nodes_as_its_experts_are_on():
    model, cluster = presets.model("kimi-k2"), presets.cluster("h100x256")
    plan = Plan(dp=32, pp=8, ep=32, zero=1, global_batch=256)
    assert copies(model, cluster, plan, "deepep") == pytest.approx(4 * (1 - 0.75**8))
    # Inside a node to as many ranks.
    assert copies(model, cluster, replace(plan, ep=8), "hybridep") == pytest.approx(8 * (1 - 0.875**8))
    wide = replace(plan, dp=256, pp=1, ep=256, global_batch=256)
    assert copies(presets.model("deepseek-v3"), cluster, wide, "deepep") == 4
    # An all-to-all sends a copy to each expert.
    assert {copies(model, cluster, each, "all_to_all") for each in (plan, wide, replace(plan, ep=8))} == {8}


def test_dispatchers_and_graphs_of_attention_save_what_they_replace():
    cluster = presets.cluster("h100x64")
    plan = Plan(dp=64, ep=64, zero=1, global_batch=512)
    plain, deepep = (step(replace(plan, dispatcher=name), QWEN, cluster) for name in ("all_to_all", "deepep"))
    assert deepep < 0.9 * plain
    none, attention, full = (
        step(replace(plan, cuda_graph=name), QWEN, cluster) for name in ("none", "attention", "full")
    )
    assert full < attention < none
    # Left are the launches of routing and experts.
    assert attention == pytest.approx(step(plan, QWEN, cluster, host=0.0), rel=0.01)


def test_windows_leave_scores_out_and_heads_of_64_wait_for_exponentials():
    model, node = presets.model("gpt-oss-120b"), presets.cluster("b200x8")
    whole = replace(model, window=0)
    (near, _), (all_keys, _) = model.kinds
    assert model.kind_counts == (18, 18) and near.attended(4096) == pytest.approx(2 * 128 * (4096 - 64) / 4096**2)
    assert near.attended(64) == all_keys.attended(4096) == whole.attended(4096) == 1
    plan = work_of(Plan(dp=8, global_batch=8))
    for gpu, slower in (("b200x8", 1.5), ("h100x8", 1.0)):
        node = presets.cluster(gpu)
        found = constants_of(node)
        wide = replace(whole, num_heads=32, num_kv_heads=4, head_dim=128)
        narrow, wide_ = (attention_seconds(each, node.gpu, found, plan, 4096)[0] for each in (whole, wide))
        assert narrow / wide_ == pytest.approx(slower)


def test_biases_of_experts_are_added_one_by_one():
    model, node = presets.model("gpt-oss-120b"), presets.cluster("b200x8")
    plan = Plan(dp=8, ep=8, zero=1, cuda_graph="full", global_batch=64)
    without = replace(model, bias="qkv")
    assert 1.05 < step(plan, model, node) / step(plan, without, node) < 1.5


def test_low_precision_formats_differ_in_rate_and_conversions():
    model, node = presets.model("llama3-70b"), presets.cluster("gb200x64")
    plan = Plan(dp=16, pp=4, zero=1, global_batch=256)
    seconds = {dtype: step(replace(plan, dtype=dtype), model, node) for dtype in ("bf16", *FORMATS)}
    assert seconds["nvfp4"] < seconds["mxfp8"] < seconds["fp8"] < seconds["fp8_rowwise"] < seconds["bf16"]
    assert 1.2 < seconds["mxfp8"] / seconds["nvfp4"] < 1.6
    with pytest.raises(ValueError, match="h100 has no nvfp4 matrix products"):
        estimate(model, H100, replace(SHARDED, dtype="nvfp4"))
    assert Plan(dtype="mxfp8", grad_dtype="bf16").grad_dtype == "bf16"
    with pytest.raises(ValueError, match=r"grad_dtype must be one of .fp32., .bf16."):
        Plan(dtype="mxfp8", grad_dtype="mxfp8")


def test_recomputing_some_layers_is_between_none_and_all():
    plan = replace(SHARDED, recompute="full")
    for measure in (step, lambda each: max(stage.total for stage in memory(LLAMA, each))):
        none, some, every = (
            measure(each) for each in (replace(plan, recompute="none"), replace(plan, recompute_layers=40), plan)
        )
        assert some == pytest.approx((none + every) / 2, rel=0.06)
        assert measure(replace(plan, recompute_layers=80)) == every
    count = {
        t.collective: t.count
        for t in estimate(LLAMA, H100, replace(plan, recompute_layers=40)).transfers
        if t.group == "tp"
    }
    whole = {t.collective: t.count for t in estimate(LLAMA, H100, plan).transfers if t.group == "tp"}
    assert count["reduce-scatter"] < whole["reduce-scatter"]


def test_smaller_states_and_activations():
    def most(**changes):
        return max(stage.total for stage in memory(LLAMA, replace(SHARDED, **changes)))

    parameters = memory(LLAMA, SHARDED)[0].parameters / 2
    saved = most() - most(zero=0), most(zero=0) - most(zero=0, moment_dtype="bf16")
    assert saved[1] == pytest.approx(4 * parameters * 1.05, rel=0.1)
    assert most(zero=0) - most(zero=0, master_bytes=0) == pytest.approx(saved[1])
    assert most(zero=0, master_bytes=2) == pytest.approx((most(zero=0) + most(zero=0, master_bytes=0)) / 2)
    assert most(dtype="fp8", activation_dtype="fp8") < most(dtype="fp8")
    last = [memory(LLAMA, replace(SHARDED, inplace_loss=on))[-1].logits for on in (False, True)]
    assert last[1] < 0.4 * last[0]
    # Systems that reduce in every micro-batch shard gradients in a pipeline too, and send more often.
    sharded = replace(SHARDED, zero=2, fsdp=False)
    assert memory(LLAMA, sharded)[1].gradients == pytest.approx(
        memory(LLAMA, replace(sharded, zero=1))[1].gradients / 2
    )
    assert step(sharded) > step(replace(sharded, zero=1))


def test_the_fused_softmax_takes_sequences_and_heads_by_fours():
    model = presets.model("megatron-1.7b")  # 24 heads
    plan = Plan(tp=8, sequence_parallel=True, flash_attention=False, global_batch=4)
    assert softmax_falls_back(model, work_of(plan))
    assert not softmax_falls_back(model, work_of(replace(plan, micro_batch=4)))
    assert not softmax_falls_back(model, work_of(replace(plan, flash_attention=True)))
    # Short sequences, in which the host limits every layer.
    model = replace(model, seq_length=512)
    node, four_a_rank = presets.cluster("a100-80x8"), replace(model, num_heads=32, head_dim=72, num_kv_heads=32)
    slow, fast = (step(plan, each, node, "megatron-2021") for each in (model, four_a_rank))
    assert slow - fast > 0.5 * 4 * 24 * efficiency("ampere", "megatron-2021").host


def test_the_slower_of_host_and_gpu_sets_the_time_of_a_pass():
    passes, waits = PassTimes(1.0, 2.0, 1.0), PassTimes(0.25, 0.25, 0.0)
    assert launched(passes, waits, 1.0, 2) == passes
    assert launched(passes, waits, 1.5, 2) == PassTimes(1.25, 2.0, 1.0)
    assert (launched(passes, waits, 2.0, 2) + waits).total == 2.0 * 3
