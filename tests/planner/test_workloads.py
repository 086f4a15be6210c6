"""Workloads: masked tokens, multi-token prediction and uneven experts, against published sizes and counts by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest

from parallel_ops.planner import Plan, SearchOptions, communication, estimate, memory, presets, search
from parallel_ops.planner.cli import inputs, workload
from parallel_ops.planner.export import export, systems
from parallel_ops.planner.memory.activations import layer_activations
from parallel_ops.planner.model.imbalance import dropped, rank_load
from parallel_ops.planner.placement import layer_counts, stage_layout
from parallel_ops.planner.training_run import TrainingRun, expected

DEEPSEEK, LLAMA = presets.model("deepseek-v3"), presets.model("llama3-8b")
AHEAD, LLAMA_AHEAD = (replace(model, prediction_layers=1) for model in (DEEPSEEK, LLAMA))
H, VOCAB = DEEPSEEK.hidden_size, DEEPSEEK.vocab_size
STAGES = Plan(dp=16, pp=16, ep=8, zero=1, global_batch=2048, fsdp=False, recompute="selective")


def test_multi_token_prediction_has_the_published_parameters():
    """11.5B, 14B with the copies of both embeddings (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md)."""
    more = AHEAD.parameters - DEEPSEEK.parameters
    assert more == pytest.approx(11.5e9, rel=0.01) and more + 2 * H * VOCAB == pytest.approx(14e9, rel=0.04)
    # A layer with experts, three norms, and the projection of twice the width.
    assert more == DEEPSEEK.layer_parameters(True) + 256 * DEEPSEEK.expert_weights + 3 * H + 2 * H * H
    layer = DEEPSEEK.kinds[1].shape.layer_flops(True)
    assert AHEAD.forward_flops - DEEPSEEK.forward_flops == layer + 2 * 2 * H * H + 2 * H * VOCAB
    # Megatron-Bridge counts half of the scores: 961 TFLOP/s at 3,848 tokens/s without, 557 at 2,139 with it.
    counted = [model.forward_flops - model.all_attention_flops / 2 for model in (AHEAD, DEEPSEEK)]
    assert counted[0] / counted[1] == pytest.approx((557 / 2139) / (961 / 3848), rel=0.005)
    hybrid = replace(presets.model("qwen3-next-80b-a3b"), prediction_layers=2)
    assert hybrid.kind_counts == (36, 12, 2) and hybrid.kinds[2].shape.mixer == "full" and hybrid.kinds[2].sparse


def test_multi_token_prediction_is_on_the_last_stage():
    for plan in (STAGES, replace(STAGES, schedule="interleaved", virtual_stages=2)):
        stages = [layer_counts(model, stage_layout(plan)) for model in (AHEAD, DEEPSEEK)]
        assert [sum(more) - sum(fewer) for more, fewer in zip(*stages, strict=True)] == [0] * 15 + [1]
    v_shaped = stage_layout(replace(STAGES, schedule="zb-v", virtual_stages=2))
    assert [counts[2] for counts in layer_counts(AHEAD, v_shaped)] == [1] + [0] * 15
    more, fewer = memory(AHEAD, STAGES), memory(DEEPSEEK, STAGES)
    for stage in range(1, 15):
        assert more[stage].states == fewer[stage].states and more[stage].activations == fewer[stage].activations
    # The stage has a table of tokens of its own, where it has neither the first layer nor tied embeddings.
    layer = DEEPSEEK.layer_parameters(True) + 32 * DEEPSEEK.expert_weights + 3 * H + 2 * H * H
    assert more[15].parameters - fewer[15].parameters == 2 * (layer + H * VOCAB)
    one = Plan(dp=8, ep=8, zero=0, fsdp=False, global_batch=8)
    assert memory(AHEAD, one)[0].parameters - memory(DEEPSEEK, one)[0].parameters == 2 * layer
    tied, tied_ahead = (replace(model, tied_embeddings=True) for model in (LLAMA, LLAMA_AHEAD))
    pair = Plan(pp=2, global_batch=2, fsdp=False)
    layer = LLAMA.layer_parameters(False) + 3 * 4096 + 2 * 4096**2
    assert memory(tied_ahead, pair)[1].parameters - memory(tied, pair)[1].parameters == 2 * layer


def test_multi_token_prediction_keeps_the_inputs_of_its_projection_and_its_logits():
    """Per token: a layer's activations, hidden vector and embedding, both normed; of the loss, input and output of the
    norm, and the softmax, or the fp32 gradient of the output embedding."""
    plan = Plan(global_batch=1)
    layer = layer_activations(LLAMA, plan, "none")[0]
    assert layer_activations(LLAMA_AHEAD, plan, "none") == (layer, layer + 8 * 4096)
    assert layer_activations(LLAMA_AHEAD, plan, "full") == (2 * 4096, 2 * 2 * 4096)
    tokens, logits = 8192, 8192 * 128256
    for changes, more in (
        ({}, 4 * logits),
        ({"inplace_loss": True}, 2 * logits),
        ({"fused_loss": True}, 4 * 4096 * 128256),
    ):
        found, alone = (memory(model, replace(plan, **changes))[0] for model in (LLAMA_AHEAD, LLAMA))
        assert found.logits - alone.logits == more
        working = found.logits - alone.logits  # what a layer needs beside freed logits
        kept = tokens * (layer + 8 * 4096 + 4 * 4096)
        assert kept - working <= found.activations - alone.activations <= kept


def test_the_last_stage_takes_longer_and_gets_fewer_layers():
    cluster = presets.cluster("h100x256")
    more, fewer = (estimate(model, cluster, STAGES) for model in (AHEAD, DEEPSEEK))
    assert 1.2 < more.step / fewer.step < 1.5
    given = replace(STAGES, layers_per_chunk=(*[4] * 15, 1))
    assert estimate(AHEAD, cluster, given).step < 1.05 * estimate(DEEPSEEK, cluster, given).step
    # Layers of the stages as in Megatron-Bridge's recipe for DeepSeek-V3 with PP 16.
    options = SearchOptions(tp=(1,), pp=(16,), ep=(8,), zero=(1,), schedules=("1f1b",), micro_batches=(1,), cp=(1,))
    found = search(AHEAD, presets.cluster("h100x1024"), batch=4096, options=options, keep=1).best
    assert found.plan.layers_per_chunk == given.layers_per_chunk
    assert found.bubble_fraction < 0.25
    # The loss and its sums are there twice.
    plan = Plan(tp=8, sequence_parallel=True, fused_loss=True, global_batch=1)
    sums = [
        sum(t.count for t in communication(model, presets.cluster("h100x8"), plan) if t.collective == "reduce-scatter")
        for model in (LLAMA, LLAMA_AHEAD)
    ]
    # Two in a layer and its backward pass each, that of the embedding and that of the loss.
    assert sums == [4 * 32 + 2, 4 * 33 + 4]


def test_who_writes_multi_token_prediction():
    cluster = presets.cluster("h100x256")
    assert "--mtp-num-layers 1" in export("megatron", AHEAD, cluster, STAGES).replace(" \\\n", " ")
    assert "mtp" not in export("megatron", DEEPSEEK, cluster, STAGES)
    assert "|t*3mL" in export("megatron", AHEAD, cluster, replace(STAGES, pp=16))
    plan = Plan(dp=256, ep=8, zero=3, fused_loss=True, global_batch=2048)
    assert "prediction_layers = 1" in export("parallel_ops", AHEAD, cluster, plan)
    with pytest.raises(ValueError, match="predict the next token alone; prediction_layers must be 0"):
        export("torchtitan", AHEAD, cluster, plan)
    assert "torchtitan" in systems(DEEPSEEK, cluster, plan) and "torchtitan" not in systems(AHEAD, cluster, plan)


QWEN, NODES = presets.model("qwen3-30b-a3b"), presets.cluster("h100x16")
SPREAD = Plan(dp=16, ep=16, zero=1, fsdp=False, global_batch=64)


def test_the_fullest_rank_has_less_than_the_fullest_expert():
    """Drawn loads: normal ones are met, skewed ones are more even over ranks than the formula says."""
    draw = np.random.default_rng(0)
    for experts, ranks in ((8, 2), (64, 8), (256, 8), (256, 64), (64, 64)):
        for even, drawn in (
            (True, 1 + 0.2 * draw.standard_normal((4000, experts))),
            (False, draw.gamma(4, 1, (4000, experts))),
        ):
            loads = drawn / drawn.mean(1, keepdims=True)
            imbalance = loads.max(1).mean()
            fullest = loads.reshape(4000, ranks, -1).mean(2).max(1).mean() - 1
            found = rank_load(imbalance, experts, ranks) - 1
            assert found == pytest.approx(fullest, rel=0.05) if even else fullest * 0.999 < found < 1.5 * fullest
            for capacity in (0.9, 1.0, 1.25):
                lost = np.maximum(0, loads - capacity).mean()
                of_formula = dropped(imbalance, experts, capacity)
                assert of_formula == pytest.approx(lost, abs=0.006) if even else of_formula > lost
    assert rank_load(1.0, 64, 8) == rank_load(2.0, 64, 1) == 1 and rank_load(8.0, 8, 2) == 2
    assert (dropped(1.0, 64, 1.0), dropped(1.0, 64, 0.75)) == (0, 0.25)


def test_the_fullest_rank_is_waited_for():
    found = [estimate(replace(QWEN, expert_imbalance=m), NODES, SPREAD) for m in (1.0, 1.5, 2.0)]
    load = replace(QWEN, expert_imbalance=2.0).expert_load(16, 0.0)
    assert load == rank_load(2.0, 128, 16) and 1.2 < load < 1.3
    even, some, more = (sum(t.seconds for t in each.transfers if t.group == "ep") for each in found)
    sent = [sum(t.bytes for t in each.transfers if t.group == "ep") for each in found]
    # It gets as much more in dispatch as it sends in combine.
    assert even < some < more < load * even and sent[2] == pytest.approx(sent[0] * (1 + load) / 2)
    assert found[0].compute < found[1].compute < found[2].compute < load * found[0].compute
    assert all(one.model_flops == found[0].model_flops for one in found)
    # Rows of experts, and what is dispatched to them, are kept; the rest is not more.
    kept = [layer_activations(replace(QWEN, expert_imbalance=m), SPREAD, "none")[0] for m in (1.0, 2.0)]
    rows = 8 * (2 * QWEN.hidden_size + 2 * 3 * QWEN.expert_ffn)
    assert kept[1] - kept[0] == pytest.approx((load - 1) * rows)
    # Odd numbers of rows make no product slower: they are in no row of a matrix.
    hardly = estimate(replace(QWEN, expert_imbalance=1.001), NODES, SPREAD)
    assert hardly.compute == pytest.approx(found[0].compute, rel=0.001)
    # One rank has all experts.
    alone = replace(SPREAD, ep=1)
    assert estimate(replace(QWEN, expert_imbalance=2.0), NODES, alone).step == estimate(QWEN, NODES, alone).step


def test_a_capacity_is_computed_whatever_the_imbalance():
    roomy, even = (replace(SPREAD, capacity_factor=c) for c in (1.5, 1.0))
    uneven = replace(QWEN, expert_imbalance=3.0)
    for plan in (roomy, even):
        assert estimate(uneven, NODES, plan).step == estimate(QWEN, NODES, plan).step
        assert memory(uneven, plan) == memory(QWEN, plan)
    assert estimate(QWEN, NODES, roomy).step > estimate(QWEN, NODES, even).step
    assert memory(QWEN, roomy)[0].activations > memory(QWEN, even)[0].activations == memory(QWEN, SPREAD)[0].activations
    sent = [sum(t.bytes for t in communication(QWEN, NODES, plan) if t.group == "ep") for plan in (roomy, even)]
    assert sent[0] == 1.5 * sent[1]
    assert "capacity 1.5" in roomy.describe() and Plan.parse(roomy.text) == roomy
    text = export("megatron", QWEN, NODES, replace(roomy, expert_tp=0)).replace(" \\\n", " ")
    assert "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity" in text
    own = replace(roomy, fsdp=True, fused_loss=True)
    assert "capacity_factor = 1.5" in export("parallel_ops", QWEN, NODES, own)
    with pytest.raises(ValueError, match=r"its experts compute all tokens, not capacity_factor=1\.5"):
        export("torchtitan", QWEN, NODES, own)


def test_what_uneven_experts_cost_is_said(run):
    given = ["estimate", "--model", "qwen3-30b-a3b", "--cluster", "h100x16", "--batch", "64"]
    uneven = ["--workload", "expert_imbalance=2"]
    out = " ".join(run(*given, "--plan", "ep=16,zero=1", *uneven)[1].split())
    assert (
        "the fullest has 2 of the mean tokens, so the fullest of 16 ranks, which the others wait for, has 1.24" in out
    )
    out = " ".join(run(*given, "--plan", "ep=16,zero=1,capacity_factor=1.25", *uneven)[1].split())
    assert "a capacity of 1.25 drops 6.0% of the routed tokens, and 24.8% of the computed rows are padding" in out
    assert "Experts:" not in run(*given, "--plan", "ep=16,zero=1")[1]
    for value in ("-1", "nan", "inf", "x"):
        for option in (["--plan", f"capacity_factor={value}"], ["--only", f"capacity_factor={value}"]):
            code, _, err = run("estimate" if option[0] == "--plan" else "plan", *given[1:], *option)
            assert code == 2 and "capacity_factor must be" in err


def test_masked_tokens_and_padding_are_computed_for_nothing(run):
    cluster, plan = replace(presets.cluster("h100x8"), price=2.5), Plan(dp=8, zero=3, fused_loss=True, global_batch=64)
    chat = workload.with_fields(LLAMA, "loss_fraction=0.25,padding=0.2")
    found, whole = (estimate(model, cluster, plan) for model in (chat, LLAMA))
    assert (found.step, found.memory, found.mfu) == (whole.step, whole.memory, whole.mfu)
    assert whole.loss_tokens_per_second == whole.tokens_per_second == found.tokens_per_second
    assert found.loss_tokens_per_second == pytest.approx(0.2 * whole.tokens_per_second)
    assert found.days(1e12) == pytest.approx(whole.days(1e12) / 0.8)
    # A run trains on as many tokens of documents, so it takes more steps.
    ran, all_of_it = (expected(each, TrainingRun(tokens=1e12)) for each in (found, whole))
    assert ran.steps == pytest.approx(all_of_it.steps / 0.8) and ran.days == pytest.approx(all_of_it.days / 0.8)
    given = ["estimate", "--model", "llama3-8b", "--cluster", "h100x8", "--batch", "64", "--plan", "zero=3"]
    given += ["--price", "2.5", "--workload", "loss_fraction=0.25,padding=0.2"]
    out = " ".join(run(*given)[1].split())
    head = 2 * 4096 * 128256 / LLAMA.forward_flops
    said = f"20.0% are padding. The output embedding computes all: {0.8 * head:.1%} of the FLOPs"
    assert f"Loss: 20.0% of the computed tokens count in it, {said}" in out
    data = json.loads(run(*given, "--json")[1])
    assert data["workload"] == {
        "prediction_layers": 0, "expert_imbalance": 1.0, "loss_fraction": 0.25, "padding": 0.2
    }  # fmt: skip
    assert data["loss_tokens_per_second"] == pytest.approx(0.2 * data["tokens_per_second"])
    assert f"tokens in the loss per second {data['loss_tokens_per_second']:,.0f}" in out
    million = 2.5 * 8 / 3600 / data["loss_tokens_per_second"] * 1e6
    assert f"cost of a million tokens in the loss {million:,.4f}" in out


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("loss_fraction=0", "loss_fraction must be finite and positive, got 0"),
        ("loss_fraction=1.1", r"loss_fraction must be at most 1, got 1\.1"),
        ("loss_fraction=nan", "loss_fraction must be finite and positive, got nan"),
        ("padding=-0.1", r"padding must be finite and zero or more, got -0\.1"),
        ("padding=1", "padding must be below 1, got 1"),
        ("expert_imbalance=0", "expert_imbalance must be finite and positive, got 0"),
        ("expert_imbalance=nan", "expert_imbalance must be finite and positive, got nan"),
        ("expert_imbalance=0.9", r"between 1 and experts / experts_per_token \(32\), got 0.9"),
        ("expert_imbalance=33", r"between 1 and experts / experts_per_token \(32\), got 33"),
        ("expert_imbalance=a", "--workload: expert_imbalance must be a number, got 'a'"),
        ("prediction_layers=-1", "prediction_layers must be at least 0, got -1"),
        ("prediction_layers=1.5", "--workload: prediction_layers must be an integer, got '1.5'"),
        ("prediction_layers", "--workload takes fields as name=value, separated by commas; got 'prediction_layers'"),
        ("prediction_layers=1,prediction_layers=1", "--workload: prediction_layers is given twice"),
        ("prediction_layer=1", "unknown field of --workload 'prediction_layer'; nearest: prediction_layers"),
    ],
)
def test_workloads_that_are_none_are_refused(text, error):
    with pytest.raises(ValueError, match=error):
        workload.with_fields(DEEPSEEK, text)


def test_dense_models_have_no_imbalance():
    with pytest.raises(ValueError, match=r"expert_imbalance must be 1 without experts, got 1\.5"):
        replace(LLAMA, expert_imbalance=1.5)


def test_models_that_cannot_predict_further_tokens_are_refused():
    for model in (presets.model("deepseek-v4-flash"), replace(LLAMA, lora_rank=8)):
        with pytest.raises(ValueError, match="prediction_layers must be 0 with compressed attention"):
            replace(model, prediction_layers=1)
    for layers in (("mtp",), ("full", "mtp")):
        with pytest.raises(ValueError, match="prediction_layers is their number"):
            replace(LLAMA, layers=layers)


def test_workloads_are_given_in_every_form(tmp_path, run):
    assert workload.model("deepseek-v3", 4096, None, None, "prediction_layers=1") == AHEAD
    fields = {"prediction_layers": 1, "expert_imbalance": 1.5, "loss_fraction": 0.4, "padding": 0.2}
    shape = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 512, "seq_length": 128, "experts": 8}
    given = {**shape, "experts_per_token": 2, **fields}
    (tmp_path / "own.toml").write_text("\n".join(f"{name} = {value}" for name, value in given.items()))
    (tmp_path / "own.json").write_text(json.dumps(given))
    (tmp_path / "plain.json").write_text(json.dumps({**shape, "experts_per_token": 2}))
    option = ",".join(f"{name}={value}" for name, value in fields.items())
    plain = workload.model(str(tmp_path / "plain.json"), None, None, None, option)
    for name in ("own.toml", "own.json"):
        assert inputs.model(str(tmp_path / name)) == replace(plain, name="own")
    given = ["--cluster", "h100x8", "--batch", "64", "--plan", "zero=3", "--workload", "prediction_layers=1"]
    assert "1 layer more on the last stage, with a loss each" in run("estimate", "--model", "llama3-8b", *given)[1]
