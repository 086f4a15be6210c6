"""Names, numbers and files as users give them on the command line."""

import json
import warnings

import pytest

from parallel_ops.planner import presets
from parallel_ops.planner.cli import inputs
from parallel_ops.planner.cli.pasted import cluster_name, model_name, whole
from parallel_ops.planner.cluster import PEAKS


@pytest.mark.parametrize(
    ("pasted", "preset"),
    [
        ("meta-llama/Llama-3.1-8B", "llama3-8b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama3-70b"),
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama3-1b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2-7b"),
        ("Qwen/Qwen2.5-Coder-32B", "qwen2-32b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("zai-org/GLM-4.6", "glm-4.5"),
        ("MiniMaxAI/MiniMax-M2", "minimax-m2"),
        ("Llama3-70B", "llama3-70b"),
    ],
)
def test_names_of_repositories_are_those_of_presets(pasted, preset):
    assert model_name(pasted) == preset and inputs.model(pasted) == presets.model(preset)


@pytest.mark.parametrize(
    ("pasted", "name"),
    [
        ("8xH100", "h100x8"), ("64 x A100-80GB", "a100-80x64"), ("8 H200", "h200x8"), ("h100x16", "h100x16"),
        ("H100-SXM5", "h100"), ("NVIDIA B200 x 8", "b200x8"), ("8x4090", "rtx4090x8"), ("2x RTX 3090", "rtx3090x2"),
        ("8 x NVIDIA H100 80GB HBM3", "h100x8"), ("NVIDIA A100-SXM4-80GB", "a100-80"), ("2x8xH100", "h100x16"),
        ("dgx-h100", "h100"), ("NVIDIA GB200 NVL72", "gb200"),
        ("32xA100-80+32xH100", "a100-80x32+h100x32"), ("64xGB200-NVL72", "gb200x64"),
    ],
)  # fmt: skip
def test_clusters_are_read_with_the_number_first_too(pasted, name):
    assert cluster_name(pasted) == name and inputs.cluster(pasted) == presets.cluster(name)


def test_what_is_no_preset_names_the_nearest():
    for given in ("meta-llama/Llama-3.1-9B", "llama3-71b"):
        with pytest.raises(ValueError, match=rf"unknown model '{given}'; nearest: llama3-.* a config.json"):
            inputs.model(given)
    with pytest.raises(ValueError, match=r"unknown cluster .*h100"):
        inputs.cluster("8xh101")


@pytest.mark.parametrize(
    ("text", "binary", "value"),
    [("1e6", True, 10**6), ("4M", True, 2**22), ("1.5k", True, 1536),  ("4,194,304", True, 2**22),
     ("15T", False, 15 * 10**12), ("1.5B", False, 15 * 10**8), ("2e12", False, 2 * 10**12)],
)  # fmt: skip
def test_numbers_have_units_and_exponents(text, binary, value):
    assert whole(text, binary=binary)[0] == value


@pytest.mark.parametrize("text", ["", "0", "-4M", "4X", "1.3", "1e-3", "M", "1e400", "nan"])
def test_what_is_no_positive_whole_number_is_refused(text):
    with pytest.raises(ValueError, match=r"is no "):
        whole(text, binary=True)
    with pytest.raises(ValueError, match="--batch must be sequences"):
        inputs.batch(text, 4096)


def test_a_batch_is_in_sequences_or_with_a_unit_in_tokens():
    assert inputs.batch("1e6", 4096) == 10**6 and inputs.batch("4M", 4096) == 1024


@pytest.mark.parametrize(
    ("text", "effective"),
    [("1024", 1024), ("4096:4096", 4096), ("1024:3072", 2560), ("512x6:3072", 1792), ("99999", 8192)],
)
def test_documents_count_as_the_one_that_the_average_token_is_in(text, effective):
    model = presets.model("llama3-8b")
    found = inputs.documents(model, text)
    assert found.documents == effective and found.attended(8192) == effective / 8192
    assert inputs.documents(model, None) is model and model.attended(8192) == 1


@pytest.mark.parametrize("text", ["", "0", "12x0", "a:b", "1024,2048", "-5"])
def test_documents_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="--documents takes lengths"):
        inputs.documents(presets.model("llama3-8b"), text)


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
    "use_sliding_window": False, "sliding_window": 4096, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "vocab_size": 129280,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 163840,
}  # fmt: skip
OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "head_dim": 64,
    "num_key_value_heads": 8, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4,
    "vocab_size": 201088, "sliding_window": 128, "attention_bias": True, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "rms_norm_eps": 1e-5,
}  # fmt: skip


def written(folder, config, name="config.json"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(config), encoding="utf-8")
    return str(folder / name)


@pytest.mark.parametrize(
    ("config", "preset"),
    [(LLAMA, "llama3-8b"), (QWEN, "qwen3-30b-a3b"), (DEEPSEEK, "deepseek-v3"), (OSS, "gpt-oss-120b")],
)
def test_a_config_of_hugging_face_has_the_shape_of_the_preset(tmp_path, config, preset):
    """Also by its folder, and inside a multimodal configuration; the one assumption is the length of sequences."""
    folder = tmp_path / preset
    for given in (written(folder, config), str(folder)):
        with pytest.warns(UserWarning, match="assumed sequences of 4,096 tokens") as warned:
            inputs.model(given)
        assert len(warned) == 1 and "read as" not in str(warned[0].message)
    expected = presets.model(preset)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = inputs.model(str(folder), expected.seq_length)
        wrapped = inputs.model(
            written(tmp_path / "vl", {"model_type": "vl", "text_config": config}), expected.seq_length
        )
    for made in (found, wrapped):
        assert made.parameters == expected.parameters and made.forward_flops == expected.forward_flops
        assert (made.window, made.layers) == (expected.window, expected.layers)


def test_layers_of_multi_token_prediction_are_said_to_be_left_out(tmp_path):
    config = DEEPSEEK | {"num_nextn_predict_layers": 1}
    with pytest.warns(UserWarning, match=r"no multi-token prediction \(--workload prediction_layers=1\)"):
        assert inputs.model(written(tmp_path / "mtp", config), 4096).prediction_layers == 0


def test_a_config_of_an_unknown_family_is_read_as_a_llama_and_says_so(tmp_path):
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {"model_type": "nova"}
    with pytest.warns(UserWarning, match="nova is read as a Llama: .*as many heads of keys and values"):
        assert inputs.model(written(tmp_path / "nova", config)).num_kv_heads == 32


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("falcon", {"multi_query": True, "num_key_value_heads": 32}, {"num_kv_heads": 1, "tied_embeddings": True}),
        ("falcon", {"multi_query": True, "new_decoder_architecture": True}, {"num_kv_heads": 8}),
        ("starcoder2", {}, {"tied_embeddings": True}),
        ("gemma2", {"sliding_window": 1024}, {"layers": ("window", "full")}),
        ("gemma3_text", {"sliding_window": 1024}, {"layers": ("window",) * 5 + ("full",)}),
        (
            "exaone4",
            {
                "sliding_window": 1024,
                "sliding_window_pattern": "LLLG",
                "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
            },
            {"layers": ("window",) * 3 + ("full",)},
        ),
    ],
)
def test_a_config_may_leave_out_what_its_family_has_by_default(tmp_path, family, changes, expected):
    config = {name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"}
    made = inputs.model(written(tmp_path / family, {**config, "model_type": family, **changes}), 4096)
    assert {name: getattr(made, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("field", "dense", "sparse"), [("mlp_layer_types", "dense", "sparse"), ("moe_layer_freq", 0, 1)]
)
def test_a_config_may_list_which_layers_have_experts(tmp_path, field, dense, sparse):
    for first in (0, 1, 48):
        config = {**QWEN, field: [dense] * first + [sparse] * (48 - first)}
        assert inputs.model(written(tmp_path / "listed", config), 4096).dense_layers == first
    with pytest.raises(ValueError, match=f"{field} leaves layers between"):
        inputs.model(written(tmp_path / "mixed", {**QWEN, field: [dense, sparse] * 24}), 4096)


def test_a_multimodal_config_says_beside_the_language_model_that_embeddings_are_tied(tmp_path):
    text = {name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"}
    both = {"model_type": "vl", "text_config": text, "tie_word_embeddings": True}
    assert inputs.model(written(tmp_path / "vl", both), 4096).tied_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (QWEN | {"decoder_sparse_step": 2}, "decoder_sparse_step leaves layers"),
        (QWEN | {"mlp_only_layers": [3]}, "mlp_only_layers leaves layers"),
        ({"hidden_size": None}, "no hidden_size or n_embd or d_model"),
        ({"layer_types": ["linear_attention"]}, "no times for layers of the kind linear_attention"),
        ({"mamba_d_state": 128}, "no times for layers of the kind mamba"),
        ({"num_attention_heads": 31}, "must be a multiple of num_"),
        ({"intermediate_size": "14336"}, "config.json: intermediate_size must be an integer, got '14336'"),
        ({"num_key_value_heads": [8, 4]}, r"num_key_value_heads must be an integer, got \[8, 4\]"),
        (QWEN | {"num_experts": [128, 64]}, "num_experts must be an integer"),  # of text and pictures, as ERNIE 4.5 VL
        (QWEN | {"first_k_dense_replace": "1"}, "first_k_dense_replace must be an integer"),
        ({"sliding_window": float("inf")}, "sliding_window must be an integer, got inf"),
        ({"sliding_window_pattern": "LLLG"}, "sliding_window_pattern must be an integer, got 'LLLG'"),
        ({"layer_types": 3}, "layer_types must be a list, got 3"),
        ({"layer_types": [3]}, "no times for layers of the kind 3"),
        ({"text_config": "llama"}, "text_config must be an object, got 'llama'"),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused_by_field(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        inputs.model(written(tmp_path / "odd", {**LLAMA, **changes}), 4096)


def test_a_cluster_of_a_file_may_have_parts_of_several_kinds(tmp_path):
    link = {"name": "x", "latency": 1e-6, "bandwidth": 5e10}
    parts = [{"gpu": "a100-80", "gpus": 8}, {"gpu": "h100", "gpus": 8}]
    own = {"gpu": "a100-80", "gpus": 16, "gpus_per_node": 8, "intra": link, "inter": link, "parts": parts}
    found = inputs.cluster(written(tmp_path / "mixed", own, "own.json"))
    assert [gpu.name for gpu in found.stage_gpus(2)] == ["a100-80", "h100"]
    for wrong in ("h100", [1], {"h100": 8}):
        with pytest.raises(ValueError, match=r"own.json: parts must be a list of objects"):
            inputs.cluster(written(tmp_path / "mixed", own | {"parts": wrong}, "own.json"))


SHAPE = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "vocab_size": 1000, "seq_length": 128}
LINK = {"name": "x", "latency": 1e-6, "bandwidth": 5e10}
NODE = {"gpu": "a100-80", "gpus": 8, "gpus_per_node": 8, "intra": LINK, "inter": LINK}


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (inputs.model, SHAPE | {"gated": "false"}, "Model: gated must be true or false, got 'false'"),
        (inputs.model, SHAPE | {"tied_embeddings": 0}, "Model: tied_embeddings must be true or false, got 0"),
        (inputs.model, SHAPE | {"name": ["a"]}, "Model: name must be a string"),
        (inputs.model, SHAPE | {"lengths": [[64, 2]]}, "Model: lengths are what --documents makes"),
        (inputs.cluster, NODE | {"name": None}, "Cluster: name must be a string, got None"),
        (inputs.cluster, NODE | {"intra": LINK | {"name": []}}, "Interconnect: name must be a string"),
        (lambda name: inputs.plan(name, 8, 64), {"flash_attention": "false"}, "flash_attention must be true or false"),
        (lambda name: inputs.plan(name, 8, 64), {"layers_per_chunk": 4}, "layers_per_chunk must be a list of integers"),
        (lambda name: inputs.plan(name, 8, 64), {"layers_per_chunk": "x"}, "must be a list of integers, got 'x'"),
    ],
)
def test_a_file_with_a_value_of_another_type_is_refused_by_key(tmp_path, read, content, message):
    """The text "false" would count as true."""
    with pytest.raises((TypeError, ValueError), match=message):
        read(written(tmp_path / "typed", content, "own.json"))


def test_a_gpu_of_a_file_has_a_generation_by_name(tmp_path):
    gpu = dict(name="g", generation=None, memory=8e10, bandwidth=3e12, watts=700, **dict.fromkeys(PEAKS, 1e15))
    with pytest.raises(ValueError, match="GPU: generation must be a string, got None"):
        inputs.cluster(written(tmp_path / "gpu", NODE | {"gpu": gpu}, "own.json"))


def test_what_is_given_twice_is_refused():
    """The last value would win, where another plan or run was meant."""
    with pytest.raises(ValueError, match="--only: tp is given twice"):
        inputs.options(presets.cluster("h100x8"), None, "tp=2,tp=4")
    with pytest.raises(ValueError, match="--run: tokens is given twice"):
        inputs.run("15T,tokens=16T", 4096)


def test_models_clusters_and_plans_may_be_toml(tmp_path):
    pytest.importorskip("tomllib")
    shape = tmp_path / "small.toml"
    shape.write_text("num_layers = 4\nhidden_size = 256\nnum_heads = 4\nvocab_size = 1000\nseq_length = 128\n")
    assert inputs.model(str(shape)).num_layers == 4
    machine = tmp_path / "own.toml"
    machine.write_text(
        'gpu = "h100"\ngpus = 16\ngpus_per_node = 8\n[intra]\nname = "NVLink"\nlatency = 1e-6\nbandwidth = 4.5e11\n'
        '[inter]\nname = "IB"\nlatency = 1e-5\nbandwidth = 5e10\n'
    )
    assert inputs.cluster(str(machine)).gpus == 16
    plan = tmp_path / "plan.toml"
    plan.write_text('tp = 8\nzero = 1\nrecompute = "full"\n')
    assert inputs.plan(str(plan), 16, 64).dp == 2
    shape.write_text("num_layers = ")
    with pytest.raises(ValueError, match="is not TOML"):
        inputs.model(str(shape))
