"""Low-rank adapters: what is trained, sent and kept, against counts by hand and published runs."""

from dataclasses import replace

import pytest

from parallel_ops.planner import Plan, SearchOptions, communication, estimate, memory, presets, search
from parallel_ops.planner.cli import inputs
from parallel_ops.planner.export import export
from parallel_ops.planner.memory.adapters import saved_parameters
from parallel_ops.planner.results import GIB
from parallel_ops.planner.training_run import TrainingRun, expected

LLAMA = replace(presets.model("llama3-8b"), seq_length=4096)
LORA = replace(LLAMA, lora_rank=16)
QLORA = replace(LORA, frozen="nf4")
ONE = Plan(micro_batch=2, global_batch=32, fsdp=False, grad_dtype="bf16", moment_dtype="bf16", master_bytes=0)


def test_adapters_are_counted_linear_by_linear():
    """q, k, v as one linear and gate, up as one: 4096 + 6144, 4096 + 4096, 4096 + 28672, 14336 + 4096 a layer."""
    adapters = 32 * 16 * (4096 + 6144 + 4096 + 4096 + 4096 + 28672 + 14336 + 4096)
    assert saved_parameters(LORA) == adapters and saved_parameters(LLAMA) == LLAMA.parameters
    found, whole = memory(LORA, ONE)[0], memory(LLAMA, ONE)[0]
    assert found.gradients == 2 * adapters and found.optimizer == 4 * adapters
    assert found.parameters == pytest.approx(whole.parameters + 2 * adapters)
    small = memory(QLORA, ONE)[0].parameters
    linears = 32 * (LLAMA.attention_weights + LLAMA.mlp_weights)
    assert small == pytest.approx(found.parameters - (2 - 0.5159) * linears, rel=1e-4)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("zero", "sent"), [(0, {"all-reduce"}), (1, {"all-gather", "reduce-scatter"}), (3, None)])
def test_frozen_weights_are_not_reduced(tp, zero, sent):
    plan = Plan(dp=8 // tp, tp=tp, sequence_parallel=tp > 1, zero=zero, global_batch=32)
    found = {t.collective: t.bytes for t in communication(LORA, presets.cluster("h100x8"), plan) if t.group == "dp"}
    whole = {t.collective: t.bytes for t in communication(LLAMA, presets.cluster("h100x8"), plan) if t.group == "dp"}
    for collective, size in found.items():
        gathers = zero == 3 and collective == "all-gather"
        assert (0.9 < size / whole[collective] < 1.1) if gathers else size < 0.02 * whole[collective]
    assert sent is None or set(found) == sent
    # Four bits are gathered as four bits.
    if zero == 3:
        four = {t.collective: t.bytes for t in communication(QLORA, presets.cluster("h100x8"), plan) if t.group == "dp"}
        assert four["all-gather"] < 0.5 * found["all-gather"]


def test_a_step_lacks_the_gradients_of_weights():
    cluster = presets.cluster("h100x1")
    whole, lora, qlora = (estimate(model, cluster, ONE) for model in (LLAMA, LORA, QLORA))
    assert 0.66 < lora.compute / whole.compute < 0.9 and lora.optimizer < 0.01 * whole.optimizer
    assert lora.step < qlora.step < 1.1 * lora.step
    linears = LLAMA.forward_flops - 32 * LLAMA.attention_flops
    assert whole.model_flops - lora.model_flops == pytest.approx(32 * 4096 * linears)
    assert lora.error_band.time >= 0.28
    run = TrainingRun(tokens=1e9)
    assert expected(lora, run).checkpoint < 0.02 * expected(whole, run).checkpoint


def test_published_runs_with_adapters():
    """NeMo AutoModel's performance summary (October 2025), tokens a second of one H100, rank not given."""
    qwen = replace(LORA, num_layers=64, hidden_size=5120, num_heads=40, num_kv_heads=8, head_dim=128,
                   ffn_hidden_size=27648, vocab_size=152064, name="qwen2.5-32b")  # fmt: skip
    large = replace(ONE, dp=4, tp=2, zero=3, micro_batch=2, sequence_parallel=True)
    for model, gpus, plan, published in ((LORA, 1, ONE, 12472.87), (qwen, 8, large, 2250.31)):
        found = estimate(model, presets.cluster(f"h100x{gpus}"), plan, software="automodel-2025")
        assert abs(found.tokens_per_second / published / gpus - 1) < found.error_band.time + 0.005
    # 65B and adapters of rank 64 on one card of 48 GB, in paged memory and with 8-bit moments (arXiv:2305.14314).
    guanaco = replace(presets.model("llama2-70b"), num_kv_heads=64, ffn_hidden_size=22016, seq_length=512, lora_rank=64,
                      frozen="nf4")  # fmt: skip
    assert memory(guanaco, Plan(recompute="full", moment_dtype="8bit"))[0].total / GIB < 48


@pytest.mark.filterwarnings("ignore:no measured efficiencies of ada")
def test_a_search_finds_what_adapters_make_possible():
    card = presets.cluster("rtx4090x1")
    few = SearchOptions(offload=("none",), micro_batches=(1, 2))
    assert not search(LLAMA, card, batch=16, options=few).plans
    assert search(QLORA, card, batch=16, options=few).best.peak_memory.total < card.gpu.memory


def test_who_writes_adapters():
    cluster, plan = presets.cluster("h100x8"), Plan(dp=8, zero=3, fused_loss=True, global_batch=32)
    text = export("parallel_ops", LORA, cluster, plan)
    assert "[lora]  # add dir in [model]" in text and "rank = 16" in text
    for system, reason in (("parallel_ops", "not nf4"), ("torchtitan", "adapters"), ("megatron", "no adapters")):
        with pytest.raises(ValueError, match=reason):
            export(system, QLORA, cluster, plan)


@pytest.mark.parametrize("text", ["", "0", "-3", "16:int3", "nf4", "16:", "a"])
def test_ranks_that_are_none_are_refused(text):
    if text == "16:":
        assert inputs.adapters(LLAMA, text).lora_rank == 16
        return
    with pytest.raises(ValueError, match="--lora takes the rank of adapters"):
        inputs.adapters(LLAMA, text)


def test_ranks_that_are_typed():
    assert inputs.adapters(LLAMA, None) is LLAMA
    found = inputs.adapters(LLAMA, "16:NF4")
    assert (found.lora_rank, found.frozen) == (16, "nf4") and "adapters of rank 16, frozen nf4" in found.name
    with pytest.raises(ValueError, match="frozen=nf4 needs lora_rank"):
        replace(LLAMA, frozen="nf4")
