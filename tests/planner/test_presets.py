"""Models, GPUs and clusters: what they are made of, what wrong ones raise, and that each figure has a source."""

import dataclasses
import json
import pickle
import re
from importlib.resources import files

import pytest

from parallel_ops.planner import Cluster, Interconnect, Model, Plan, efficiency, error_band, presets
from parallel_ops.planner.compute.efficiency import CONSTANTS, SOFTWARE
from parallel_ops.planner.error_band import tied

# Parameters of the published weights, counted by their publishers.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-3b": 3_085_938_688,
    "qwen2-7b": 7_615_616_512,
    "qwen2-14b": 14_770_033_664,
    "qwen2-32b": 32_763_876_352,
    "qwen2-72b": 72_706_203_648,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
}
GPT = Model(name="gpt", num_layers=24, hidden_size=2304, num_heads=24, vocab_size=51200, seq_length=2048)


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters_are_those_of_the_published_weights(name, parameters):
    assert presets.model(name).parameters == parameters


def test_parameters_of_deepseek_v3():
    model = presets.model("deepseek-v3")
    assert model.parameters == pytest.approx(671.0e9, rel=1e-3)
    assert model.active_parameters == pytest.approx(37e9, rel=0.02)


@pytest.mark.parametrize("name", [name for name in presets.models() if name.startswith("megatron")])
def test_gpt_counts_agree_with_the_closed_forms(name):
    m = presets.model(name)
    l, h, s, V = m.num_layers, m.hidden_size, m.seq_length, m.vocab_size
    assert m.parameters == 12 * l * h**2 + 13 * l * h + (V + s) * h + 2 * h
    assert m.forward_flops == pytest.approx(24 * l * h**2 * (1 + s / (6 * h) + V / (12 * l * h)), rel=1e-12)


def test_a_name_says_its_size():
    for name in presets.models():
        size = name.split("-")[-1]
        # The names of MaxText's are scales.
        if re.fullmatch(r"[\d.]+b", size) and not name.startswith("maxtext") and name not in PUBLISHED:
            assert presets.model(name).parameters == pytest.approx(float(size[:-1]) * 1e9, rel=0.08)


@pytest.mark.parametrize("kind", ["gpu", "model", "cluster"])
def test_every_preset_loads_and_every_figure_has_a_source(kind):
    for name in {"gpu": presets.gpus, "model": presets.models, "cluster": presets.clusters}[kind]():
        preset = getattr(presets, kind)(name)
        sources = presets.sources(kind, name)
        assert preset.name == name
        assert all(len(source) > 5 for source in sources.values())
        assert len(sources) >= 7


def test_clusters_by_name_and_number():
    assert presets.cluster("h100x512").gpus == 512
    assert presets.cluster("RTX3090x8").gpu is presets.gpu("rtx3090")
    assert presets.cluster("rtx3090").gpus == 8
    mixed = presets.cluster("a100-80x64+h100x64")
    assert mixed.gpus == 128
    assert mixed.inter.bandwidth == presets.cluster("a100-80").inter.bandwidth
    assert [gpu.name for gpu in mixed.stage_gpus(4)] == ["a100-80", "a100-80", "h100", "h100"]
    # A stage on both kinds counts on the weaker of each figure.
    middle = mixed.stage_gpus(1)[0]
    assert middle.bf16 == presets.gpu("a100-80").bf16
    assert middle.memory == presets.gpu("h100").memory


def test_a_job_takes_all_of_an_nvlink_domain_or_a_power_of_two():
    sizes = {"gb200": 64, "gb200x72": 72, "gb300x144": 72, "gb200x128": 64, "gb300x576": 64, "gb200x16": 64}
    assert {name: presets.cluster(name).gpus_per_node for name in sizes} == sizes
    with pytest.raises(ValueError, match="gpus must be a multiple of gpus_per_node"):
        presets.cluster("gb200x100")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: presets.model("llama3-404b"), "unknown model 'llama3-404b'; nearest: llama3-405b"),
        (lambda: presets.gpu("h10"), "nearest: h100"),
        (lambda: presets.cluster("zzz"), "unknown cluster 'zzz'; known: a100-40"),
        (lambda: presets.cluster("h100x12"), r"gpus must be a multiple of gpus_per_node \(8\), or fewer; got 12"),
        (lambda: presets.cluster("h100x0"), "gpus must be at least 1, got 0"),
        (lambda: presets.cluster("3090x2"), r"unknown cluster '3090'; nearest: rtx3090"),
        (lambda: presets.gpu("mi300"), "nearest: mi300x"),
        (lambda: presets.gpu("tpu-v4").peak("fp16"), "tpu-v4 has no fp16 matrix products; it has bf16"),
        (
            lambda: Model(name="x", num_layers=1, hidden_size=2305, num_heads=24, vocab_size=1, seq_length=1),
            r"hidden_size \(2305\) must be a multiple of num_heads \(24\)",
        ),
        (lambda: dataclasses.replace(GPT, num_layers=-1), "num_layers must be at least 1, got -1"),
        (lambda: dataclasses.replace(GPT, num_layers=10**7), "num_layers .* must be at most 10,000, got 10,000,000"),
        (lambda: dataclasses.replace(GPT, prediction_layers=2**70), "prediction_layers must be at most 10,000"),
        (lambda: presets.cluster("h100x16777216"), "gpus must be at most 4,194,304, got 16,777,216"),
        (
            lambda: dataclasses.replace(GPT, num_kv_heads=5),
            r"num_heads \(24\) must be a multiple of num_kv_heads \(5\)",
        ),
        (lambda: dataclasses.replace(GPT, experts=4, experts_per_token=5), "between 1 and experts"),
        (lambda: dataclasses.replace(GPT, experts_per_token=2), "need experts"),
        (lambda: dataclasses.replace(GPT, norm="batch"), "norm must be one of 'layer', 'rms', got 'batch'"),
        (lambda: Interconnect(name="x", latency=0, bandwidth=-1.0), "bandwidth must be finite and positive"),
        (lambda: Interconnect(name="x", latency=float("nan"), bandwidth=1.0), "latency must be finite"),
        (lambda: Plan(dp=3, global_batch=4), r"multiple of dp \* micro_batch \(3\), got 4"),
        (lambda: Plan(schedule="interleaved", pp=2), "virtual_stages must be 2 or more"),
        (lambda: Plan(schedule="zb-v", pp=2), "virtual_stages must be 2 for the schedule zb-v"),
        (lambda: Plan(schedule="1f2b"), "schedule must be one of 'gpipe'"),
        (lambda: Plan(ep=3), r"ep must divide dp \* cp \(1\), got 3"),
        (lambda: Plan(zero=4), "zero must be one of 0, 1, 2, 3, got 4"),
        (lambda: Plan(pp=2, layers_per_chunk=(1, 2, 3)), r"layers_per_chunk must have pp \* virtual_stages \(2\)"),
        (lambda: dataclasses.replace(efficiency("ampere"), matmul=1.2), "matmul must be at most 1"),
    ],
)
def test_bad_figures_are_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["gpus", "gpus_per_node"])
def test_counts_must_be_integers(field):
    with pytest.raises(TypeError, match=f"Cluster: {field} must be an integer, got 8.0"):
        dataclasses.replace(presets.cluster("h100"), **{field: 8.0})


def test_a_cluster_of_parts_must_add_up():
    mixed = presets.cluster("a100-80x8+h100x8")
    with pytest.raises(ValueError, match=r"parts must add up to gpus \(32\)"):
        dataclasses.replace(mixed, gpus=32)
    assert isinstance(mixed, Cluster)


def test_every_efficiency_has_a_source_and_others_stand_in_with_a_warning():
    data = json.loads(files("parallel_ops.planner.presets").joinpath("efficiency.json").read_text(encoding="utf-8"))
    for entries in data["generations"].values():
        assert set(entries) == set(CONSTANTS) - set(SOFTWARE)
        assert all(entry["source"] in data["sources"] for entry in entries.values())
    with pytest.warns(UserWarning, match="no measured efficiencies of blackwell GPUs: those of hopper are used"):
        assert efficiency.__wrapped__("blackwell", "fsdp-2023") == efficiency("hopper", "fsdp-2023")
    with pytest.warns(UserWarning, match="volta GPUs: those of ampere"):
        assert efficiency.__wrapped__("volta") == efficiency("ampere")


def test_a_band_is_that_of_the_rows_most_like_the_plan():
    plan = Plan(dp=8, zero=3, global_batch=8)
    found = error_band(presets.cluster("h100x8"), plan, software="fsdp-2023")
    assert found.like == "eager, hopper, dense, 16-bit, zero-3, one node"
    assert found.rows > 10 and 0 < found.time < 0.4
    nothing = error_band(presets.cluster("mi300xx8"), plan)
    assert (nothing.like, nothing.rows) == ("any", 0)
    assert nothing.time > found.time
    assert tied(1.04, 1.0, 0.1) and not tied(1.06, 1.0, 0.1)


def test_experts_and_kernels_have_bands_of_their_own():
    cluster, plan = presets.cluster("h100x8"), Plan(dp=8, zero=1, dtype="fp8", global_batch=8)
    dense, sparse = (error_band(cluster, plan, experts=experts) for experts in (False, True))
    assert dense.like.startswith("transformer-engine, hopper, dense, fp8") and "experts" in sparse.like
    assert error_band(cluster, plan, software="torchtitan-2025").like.startswith("compiled, hopper")


def test_a_hash_is_not_pickled():
    """Hashes of strings differ between processes; a model that comes from another one must equal its twin here."""
    model = presets.model("llama3-8b")
    assert hash(model) == hash(dataclasses.replace(model)) == hash(pickle.loads(pickle.dumps(model)))
    assert "_hash" in vars(model) and "_hash" not in vars(pickle.loads(pickle.dumps(model)))
    assert "_hash" not in dataclasses.asdict(model)
