"""Hugging Face folders that do not fit are refused by name, on every rank."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parallel_ops.models import Transformer, config_from_pretrained
from parallel_ops.models.huggingface import tensor_files
from support.integrations.huggingface import VOCAB
from support.integrations.huggingface_folders import LLAMA3, change_config, change_tensors
from support.parallelism import transformer as on_rank
from support.ranks.distributed import Raised, ranks
from support.runs.tensor_files import tensors_in

Q = "model.layers.1.self_attn.q_proj.weight"
BAD_OPTIONS = {
    "has model_type 'opt'; supported are deepseek_v3, gpt2, gpt_oss, llama, mistral, mixtral, olmoe, qwen2": {
        "model_type": "opt"
    },
    "has model_type 'None'": {"model_type": ...},
    "lacks hidden_size": {"hidden_size": ...},
    "has hidden_act 'relu'; supported is 'silu'": {"hidden_act": "relu"},
    "has attention_bias True; supported is False": {"attention_bias": True},
    "has rope_type 'longrope'; supported are 'default', 'linear', 'dynamic', 'llama3', 'yarn'": {
        "rope_parameters": {"rope_type": "longrope", "factor": 4.0}
    },
    "lacks factor in its rope_scaling": {"rope_parameters": {"rope_type": "yarn"}},
    "YarnScaling: factor must be at least 1, got 0.5": {"rope_parameters": {"rope_type": "yarn", "factor": 0.5}},
    "lacks low_freq_factor in its rope_scaling": {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}},
    "has mscale in its rope_scaling, which is not supported": {
        "rope_parameters": {"rope_type": "default", "mscale": 1}
    },
    "has both rope_parameters and rope_scaling": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "has a partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "has attn_logit_softcapping, logit_softcap, which is not supported": {
        "attn_logit_softcapping": 50.0,
        "logit_softcap": 30.0,
    },
    "has quantization_config {'bits': 4}; supported is fp8": {"quantization_config": {"bits": 4}},
    "has weights quantized by mxfp4, which are not supported; save them in bfloat16 first, with transformers: ": {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    },
    "has a value of a wrong type": {"rms_norm_eps": "small"},
    "num_heads must be an int of at least 1, got 4.0": {"num_attention_heads": 4.0},
    "differs from the model's configuration in window": {"model_type": "mistral", "sliding_window": 3},
    "differs from the model's configuration in rotary_base": {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
}
BAD_TENSORS = {
    f"lacks {Q}": {Q: None},
    "has model.layers.1.extra.weight, which the model does not have": {"model.layers.1.extra.weight": torch.zeros(2)},
    "has model.layers.2.input_layernorm.weight": {"model.layers.2.input_layernorm.weight": torch.zeros(32)},
    rf"{Q} must be [48, 32], got [32, 48]": {Q: torch.zeros(32, 48)},
    f"{Q} must be one of F64, F32, F16, BF16, got I8": {Q: torch.zeros(48, 32, dtype=torch.int8)},
}


def test_folders_that_do_not_fit_are_refused_by_name_and_change_nothing(folders, tmp_path):
    """On every rank."""
    good, bad = folders / "llama3", {}
    for number, (message, options) in enumerate(BAD_OPTIONS.items()):
        bad[message] = change_config(good, tmp_path / f"options{number}", **options)
    for number, (message, tensors) in enumerate(BAD_TENSORS.items()):
        bad[message] = change_tensors(change_config(good, tmp_path / f"tensors{number}"), tensors)
    bad |= broken_files(good, tmp_path)
    for results in ranks(2).run(on_rank.refused, list(map(str, bad.values())), str(good)):
        for (kind, message, unchanged), want in zip(results, bad, strict=True):
            assert kind in ("ValueError", "FileNotFoundError"), want
            assert want in message
            assert unchanged, want


NEUTRAL = {
    "is_llama_config": True, "unsloth_version": "2024.9", "auto_map": {"AutoModel": "m.X"}, "mlp_bias": None,
    "transformers.js_config": {"dtype": "q4"}, "_attn_implementation_autoset": True, "attn_implementation": "sdpa",
    "max_sequence_length": 2048, "temperature": 0.6, "do_sample": True, "top_k": 40, "repetition_penalty": 1.1,
    "decoder_start_token_id": 3, "boi_token_id": 7, "peft_version": "1", "output_attentions": True,
    "forced_eos_token_id": 2, "use_flash_attn": True, "is_qwen_config": True, "_commit_hash": "0a",
}  # fmt: skip


@pytest.mark.parametrize("key", NEUTRAL)
def test_kinds_of_keys_that_change_no_logits(folders, tmp_path, key, recwarn):
    good = folders / "llama3"
    folder = change_config(good, tmp_path / "folder", **{key: NEUTRAL[key]})
    assert config_from_pretrained(folder) == config_from_pretrained(good)
    assert not recwarn.list


def test_keys_of_no_kind(folders, tmp_path):
    """An unknown one is told; one whose name is of what changes logits in some family is refused."""
    good = folders / "llama3"
    with pytest.warns(UserWarning, match=r"config\.json has my_experiment, which is not known"):
        config_from_pretrained(change_config(good, tmp_path / "unknown", my_experiment="a"))
    for number, key in enumerate(
        ("logits_scaling", "num_experts", "attention_multiplier", "qk_layernorm", "rope_ratio")
    ):
        with pytest.raises(ValueError, match=f"has {key}, which is not supported"):
            config_from_pretrained(change_config(good, tmp_path / str(number), **{key: 8}))


def test_an_id_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"is no folder; .*\.snapshot_download\('meta-llama/Llama-3\.2-1B'\)"):
        Transformer.from_pretrained("meta-llama/Llama-3.2-1B")
    with pytest.raises(FileNotFoundError, match="/none does not exist"):
        config_from_pretrained(tmp_path / "none")


def broken_files(good, tmp_path):
    """Files that are not what their names or their index say."""
    cut, text, array, empty, no_config = (
        change_config(good, tmp_path / n) for n in ("cut", "text", "array", "empty", "no_config")
    )
    (cut / tensor_files.SINGLE).write_bytes(
        (good_bytes := (cut / tensor_files.SINGLE).read_bytes())[: len(good_bytes) // 2]
    )
    (text / "config.json").write_text("{")
    (array / "config.json").write_text("[]")
    (empty / tensor_files.SINGLE).unlink()
    (no_config / "config.json").unlink()
    tensors = tensors_in(good)
    index = dict.fromkeys(tensors, "a.safetensors")
    broken = {
        "cut/model.safetensors is not a whole safetensors file": cut,
        "text/config.json is not JSON": text,
        "config.json must hold an object, got list": array,
        "empty has neither model.safetensors nor model.safetensors.index.json": empty,
        "no_config has no config.json": no_config,
    }
    for name, message, weight_map, written in (
        ("unlisted", f"has {Q}, which model.safetensors.index.json does not place", index.keys() - {Q}, tensors),
        ("absent", f"lacks {Q}, which model.safetensors.index.json lists", index, tensors.keys() - {Q}),
        ("outside", "names '../a.safetensors', which is not a safetensors file", {Q: "../a.safetensors"}, tensors),
        ("no_file", "lacks b.safetensors, which model.safetensors.index.json lists", {Q: "b.safetensors"}, tensors),
        ("no_map", "has no weight_map", {}, tensors),
    ):
        folder = broken[message] = change_config(good, tmp_path / name)
        (folder / tensor_files.SINGLE).unlink()
        save_file({key: tensors[key] for key in written}, folder / "a.safetensors")
        places = weight_map if isinstance(weight_map, dict) else dict.fromkeys(weight_map, "a.safetensors")
        (folder / tensor_files.INDEX).write_text(json.dumps({"weight_map": places}))
    return broken


def test_other_families_name_their_options(folders, tmp_path):
    cases = [
        ("gpt2", {"activation_function": "relu"}, "has activation_function 'relu'; supported are gelu, gelu_new"),
        ("gpt2", {"embd_pdrop": 0.2}, "has embd_pdrop 0.2 and resid_pdrop 0.1, which must be equal"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "has scale_attn_by_inverse_layer_idx True; supported is False",
        ),
        ("qwen3", {"attention_bias": True}, "has attention_bias True; supported is False"),
        ("qwen2", {"layer_types": ["full_attention"]}, r"has layer_types \['full_attention'\] for 2 layers"),
        ("qwen2", {"use_sliding_window": False}, "for 2 layers and a sliding window of None"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "has layer_types, which is not supported"),
    ]
    for number, (name, changes, message) in enumerate(cases):
        with pytest.raises(ValueError, match=message):
            Transformer.from_pretrained(change_config(folders / name, tmp_path / str(number), **changes))
    untied = change_tensors(change_config(folders / "qwen3", tmp_path / "u"), {"lm_head.weight": torch.ones(VOCAB, 32)})
    with pytest.raises(ValueError, match="an output layer that differs from the embedding it should be tied to"):
        Transformer.from_pretrained(untied)


def test_a_place_that_is_taken_is_refused_on_every_rank(folders, tmp_path):
    place = tmp_path / "taken"
    place.mkdir()
    (place / "mine").write_text("keep")
    for outcome in ranks(2).outcomes(on_rank.saved_over, str(folders / "gpt2"), str(place)):
        assert isinstance(outcome, Raised) and outcome.type == "RuntimeError"
        assert "exists and is not an empty folder" in outcome.message
    assert [file.name for file in place.iterdir()] == ["mine"] and not list(Path(tmp_path).glob(".*"))


def test_a_tensor_that_cannot_be_joined_is_an_error_on_every_rank_and_leaves_nothing(folders, tmp_path):
    for outcome in ranks(2).outcomes(on_rank.saved_without_memory, str(folders / "gpt2"), str(tmp_path / "new")):
        assert isinstance(outcome, Raised) and outcome.type == "RuntimeError"
        assert outcome.message == "save_pretrained: MemoryError: no memory for a tensor"
    assert not list(tmp_path.iterdir())


def test_tensors_that_the_family_has_no_place_for_are_named(folders):
    config = config_from_pretrained(folders / "gpt2")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no place for positions\.weight"):
        Transformer.from_pretrained(folders / "llama3", config=config)


def test_without_safetensors_it_says_what_to_install(folders, monkeypatch):
    folder = folders / "gpt2"
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="need safetensors; run: pip install safetensors"):
        Transformer.from_pretrained(folder)


def test_layers_that_the_configuration_does_not_have_are_refused(folders, tmp_path):
    folder = change_config(folders / "deepseek_v3-plain", tmp_path / "m")
    change_tensors(folder, {"model.layers.3.eh_proj.weight": torch.zeros(4, 4)})
    with pytest.raises(ValueError, match=r"has model\.layers\.3\.eh_proj\.weight, .* 0 that predict further tokens"):
        Transformer.from_pretrained(folder)
