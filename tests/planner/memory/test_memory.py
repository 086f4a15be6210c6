"""Memory: the formulas of the papers, and what states, activations and offload take."""

from dataclasses import replace

import pytest

from parallel_ops.planner import Plan, SearchOptions, estimate, memory, presets, search
from parallel_ops.planner.memory.activations import layer_activations
from parallel_ops.planner.memory.memory import PlanMemory
from parallel_ops.planner.memory.states import stage_parameters
from parallel_ops.planner.placement import stage_layers, stage_layout

GPT3 = presets.model("gpt3-175b")
LLAMA = presets.model("llama3-8b")


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(tp=4), lambda s, h, a, t: s * h * (10 + 24 / t + 5 * a * s / (h * t))),
        (Plan(tp=4, sequence_parallel=True), lambda s, h, a, t: s * h / t * (34 + 5 * a * s / h)),
        (Plan(tp=4, recompute="selective"), lambda s, h, a, t: s * h * (10 + 24 / t)),
        (Plan(tp=4, sequence_parallel=True, recompute="selective"), lambda s, h, a, t: 34 * s * h / t),
        (Plan(tp=4, recompute="full"), lambda s, h, a, t: 2 * s * h),
    ],
)
def test_a_gpt_layer_keeps_what_the_paper_says(plan, expected):
    kept = layer_activations(GPT3, replace(plan, flash_attention=False), plan.recompute)[0] * GPT3.seq_length
    assert kept == pytest.approx(expected(GPT3.seq_length, GPT3.hidden_size, GPT3.num_heads, 4), rel=1e-12)


@pytest.mark.parametrize(("grad_dtype", "bytes_each"), [("bf16", 16), ("fp32", 18)])
def test_states_take_16_bytes_a_parameter_and_18_with_fp32_gradients(grad_dtype, bytes_each):
    stage = memory(LLAMA, Plan(grad_dtype=grad_dtype))[0]
    assert stage.states == bytes_each * LLAMA.parameters


def test_states_in_fp32_take_16_bytes():
    assert memory(LLAMA, Plan(dtype="fp32"))[0].states == 16 * LLAMA.parameters


def test_zero_shards_one_state_after_the_other():
    stages = [memory(LLAMA, Plan(dp=8, zero=zero, global_batch=16))[0] for zero in range(4)]
    P = LLAMA.parameters
    assert [s.optimizer for s in stages] == [12 * P, 12 * P / 8, 12 * P / 8, 12 * P / 8]
    assert [s.gradients for s in stages] == [4 * P, 4 * P, 4 * P / 8, 4 * P / 8]
    assert [s.parameters for s in stages] == [2 * P, 2 * P, 2 * P, 0]
    assert memory(LLAMA, Plan(dp=8, zero=3, fsdp=False, global_batch=8))[0].parameters == 2 * P / 8
    # Gradients of a single micro-batch are reduced layer by layer.
    assert memory(LLAMA, Plan(dp=8, zero=1, global_batch=8))[0].gradients == 4 * P / 8


def test_fsdp_in_fp32_has_its_shards_beside_what_it_gathers():
    """And replicate, whose shards are whole."""
    plans = [Plan(dp=8, zero=zero, dtype="fp32", global_batch=8) for zero in range(4)]
    P = LLAMA.parameters
    assert [memory(LLAMA, p)[0].parameters for p in plans] == [8 * P, 4.5 * P, 4.5 * P, 0.5 * P]
    assert memory(LLAMA, replace(plans[1], fsdp=False))[0].parameters == 4 * P
    assert memory(LLAMA, replace(plans[3], dp_replicate=8))[0].parameters == 8 * P


def test_zero_2_adds_up_whole_gradients_over_the_micro_batches_of_a_pipeline():
    one, four = (memory(LLAMA, Plan(dp=8, zero=2, global_batch=8 * m))[0] for m in (1, 4))
    assert 8 * one.gradients == 8 * four.gradients == 4 * LLAMA.parameters
    one, four = (memory(LLAMA, Plan(dp=8, pp=2, zero=2, global_batch=8 * m))[0] for m in (1, 4))
    assert 8 * one.gradients == four.gradients
    assert one.optimizer == four.optimizer


def test_fp8_products_keep_16_bit_activations():
    kept = [layer_activations(LLAMA, Plan(dtype=dtype), "none") for dtype in ("bf16", "fp8")]
    assert kept[0] == kept[1]


def test_recomputing_every_second_product_keeps_what_torchtitan_keeps():
    """Input, Q, V, attention and its logsumexp, gate and down projection."""
    h, kv = LLAMA.hidden_size, LLAMA.num_kv_heads * LLAMA.head_dim
    (kept,) = layer_activations(LLAMA, Plan(), "operators")
    assert kept == 2 * (h + h + kv + h + LLAMA.ffn_hidden_size + h) + 4 * LLAMA.num_heads


def test_recomputed_experts_keep_the_rows_that_they_get():
    mixtral = replace(presets.model("mixtral-8x7b"), seq_length=4096)
    mixtral = replace(mixtral, dense_layers=1)
    (dense, none), (same, experts) = (layer_activations(mixtral, Plan(), kind) for kind in ("none", "experts"))
    assert none - experts == 2 * 3 * mixtral.expert_ffn * mixtral.experts_per_token
    assert dense == same


def test_the_stages_together_hold_the_model():
    for plan in (
        Plan(pp=4, global_batch=8),
        Plan(pp=4, global_batch=8, schedule="interleaved", virtual_stages=2),
        Plan(pp=4, global_batch=8, schedule="zb-v", virtual_stages=2),
        Plan(pp=5, global_batch=8),
    ):
        total = sum(stage.parameters for stage in memory(LLAMA, plan))
        assert total == 2 * LLAMA.parameters
        assert sorted(sum(stage_layers(LLAMA.num_layers, *stage_layout(plan)), ())) == list(range(LLAMA.num_layers))


def test_expert_parallelism_shards_experts_alone():
    mixtral = replace(presets.model("mixtral-8x7b"), seq_length=4096)
    one, eight = (memory(mixtral, Plan(dp=8, ep=ep, global_batch=8))[0] for ep in (1, 8))
    experts = 2 * mixtral.num_layers * mixtral.experts * mixtral.expert_weights
    assert one.parameters - eight.parameters == experts * 7 / 8


def test_zero_shards_experts_over_the_ranks_that_share_them():
    mixtral = replace(presets.model("mixtral-8x7b"), seq_length=4096)
    stage = memory(mixtral, Plan(dp=16, ep=8, zero=1, global_batch=16))[0]
    experts = mixtral.num_layers * mixtral.experts * mixtral.expert_weights
    assert stage.optimizer == 12 * ((mixtral.parameters - experts) / 16 + experts / 8 / 2)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_ends_of_a_gpt_keep_what_the_paper_says(sequence_parallel):
    plan = Plan(tp=4, sequence_parallel=sequence_parallel, flash_attention=False)
    stage = memory(GPT3, plan)[0]
    sbh, t = GPT3.seq_length * GPT3.hidden_size, 4 if sequence_parallel else 1
    layers = GPT3.num_layers * layer_activations(GPT3, plan, plan.recompute)[0] * GPT3.seq_length
    # One layer at work needs less than the logits, whose place it takes.
    assert stage.activations - layers == pytest.approx(sbh / 4 + 4 * sbh / t)
    # 16-bit logits, and in fp32 their copy, shifted, their log-softmax and its gradient.
    gathered = 4 * sbh if sequence_parallel else 0
    assert stage.logits == pytest.approx(18 * GPT3.seq_length * GPT3.vocab_size / 4 + gathered)


def test_the_fused_loss_keeps_no_logits():
    plan = Plan(micro_batch=8, global_batch=8)
    unfused, fused = (memory(LLAMA, replace(plan, fused_loss=on))[0] for on in (False, True))
    tokens = 8 * LLAMA.seq_length
    assert unfused.logits == 14 * tokens * LLAMA.vocab_size
    assert fused.logits < 3 * 2**30


def test_offload_moves_parameters_to_the_host():
    kinds = ("optimizer", "optimizer+parameters")
    plans = [Plan(dp=8, zero=3, fsdp=False, global_batch=8, offload=kind) for kind in kinds]
    here, there = (memory(LLAMA, plan)[0] for plan in plans)
    shard = 2 * LLAMA.parameters / 8
    assert (here.parameters, there.parameters) == (shard, 0)
    assert there.host - here.host == shard
    counted = PlanMemory(LLAMA, plans[1])
    assert counted.total(counted.needs(0, "none", kinds[1]), kinds[1]) == pytest.approx(there.total)
    assert there.total < here.total


def test_offload_moves_the_optimizer_to_the_host():
    here, there = (memory(LLAMA, Plan(offload=offload))[0] for offload in ("none", "optimizer"))
    assert here.optimizer == there.host
    assert there.optimizer == 0


def test_parameters_gathered_one_by_one_are_few():
    """DeepSpeed keeps at most 1e9 gathered parameters, or one larger matrix, and reduces gradients in buckets."""
    layers = Plan(dp=64, zero=3, fsdp=False, global_batch=64)
    alone = replace(layers, gather_parameters=True)
    wide = replace(presets.model("megatron-529.6b"), dropout=False)

    def work(model, plan):
        return memory(model, plan)[0].activations

    # Two layers and the gradients of one, against one matrix [h, 4 h] and its gradient.
    h = wide.hidden_size
    layer, matrix = wide.attention_parameters + wide.mlp_parameters, 4 * h * h
    assert matrix > 1e9
    # The logits are freed before; they are within the difference.
    difference = (layer * (4 + 2 * 2) - matrix * (4 + 2)) if layers.grad_dtype == "fp32" else 0
    assert work(wide, layers) - work(wide, alone) == pytest.approx(difference, rel=1e-6)
    # A small model stays whole, as long as it has fewer parameters than the limits.
    small = replace(LLAMA, num_layers=2, vocab_size=256, ffn_hidden_size=4096)
    whole = sum(stage_parameters(small, alone, 0))
    assert whole < 5e8
    layer = small.attention_parameters + small.mlp_parameters
    assert work(small, alone) - work(small, layers) == pytest.approx(whole * (4 + 2) - layer * (4 + 2 * 2), rel=1e-6)
    # Without ranks to gather from there is nothing to gather.
    single = replace(layers, dp=1)
    assert memory(small, single) == memory(small, replace(single, gather_parameters=True))


def test_transformer_engine_keeps_one_gradient_a_shape():
    """In Megatron-LM's runs; as measured on a B200 (validation/runs/simumax_b200.csv)."""
    model = presets.model("llama3-405b")
    plan = Plan(tp=2, dp=4, zero=1, fsdp=False, sequence_parallel=True, global_batch=8)
    h, ffn = model.hidden_size, model.ffn_hidden_size / 2
    shapes = h * (model.query_width + model.key_value_width) / 2 + model.value_width / 2 * h + 2 * h * ffn + ffn * h
    with_it, without = (memory(replace(model, num_layers=4), replace(plan, fsdp=on))[0].buffers for on in (False, True))
    assert with_it - without == pytest.approx(2 * shapes)
    # It does not grow with the layers, and is small where the optimizer's own gradients are sharded away.
    assert memory(replace(model, num_layers=8), plan)[0].buffers == pytest.approx(with_it)
    experts = presets.model("deepseek-v2")
    few, many = (
        memory(replace(experts, num_layers=4, experts=count), replace(plan, tp=1, dp=8, ep=8))[0].buffers
        for count in (8, 160)
    )
    assert few == pytest.approx(many)


def test_activations_are_offloaded_without_the_optimizer():
    """FSDP recipes of 2026 do so on GPUs with a fast link to the host."""
    plan = Plan(dp=8, zero=3, global_batch=8)
    none, alone, optimizer, both = (
        memory(LLAMA, replace(plan, offload=kind))[0]
        for kind in ("none", "activations", "optimizer", "optimizer+activations")
    )
    assert alone.optimizer == none.optimizer > 0 == both.optimizer
    assert alone.activations == both.activations < none.activations == optimizer.activations
    assert alone.host == pytest.approx(both.host - optimizer.host) and alone.total < none.total
    node = presets.cluster("h100x8")
    steps = {kind: estimate(LLAMA, node, replace(plan, offload=kind)) for kind in ("none", "activations")}
    assert steps["activations"].optimizer == steps["none"].optimizer
    (copied,) = [each for each in steps["activations"].transfers if each.group == "host"]
    assert copied.bytes == pytest.approx(2 * alone.host / (1 - 2 / LLAMA.num_layers), rel=1e-6)
    assert steps["none"].step < steps["activations"].step
    few = SearchOptions(offload=("activations",), recompute=("none",), zero=(3,), tp=(1,), pp=(1,), any_system=True)
    assert search(LLAMA, presets.cluster("h100x64"), batch=64, options=few).best.plan.offload == "activations"


@pytest.mark.parametrize("tp", [1, 4])
def test_megatrons_output_embedding_has_a_gradient_that_autograd_gets(tp):
    """One of 16 bits; torch's own gradient is the accumulated one, and a fused loss makes none for autograd."""
    model = presets.model("llama3-8b")
    megatron, torch = (memory(model, Plan(tp=tp, fsdp=fsdp))[0] for fsdp in (False, True))
    assert megatron.logits - torch.logits == 2 * model.hidden_size * model.vocab_size / tp
    fused = [memory(model, Plan(tp=tp, fsdp=fsdp, fused_loss=True))[0].logits for fsdp in (False, True)]
    assert fused[0] == fused[1]


def test_dispatched_tokens_are_gone_when_the_loss_is_at_its_peak():
    model = replace(presets.model("mixtral-8x7b"), vocab_size=2**20)
    plan = Plan(dp=8, global_batch=8, zero=1)
    alone, spread = (PlanMemory(model, replace(plan, ep=ep)).stage(0) for ep in (1, 8))
    assert (spread.activations, spread.buffers) == (alone.activations, alone.buffers)
