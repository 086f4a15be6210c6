"""Hugging Face folders: what transformers writes we compute alike on any mesh, and it opens what we write.

The models are tiny ones of transformers, made on the spot, with weights so large that every part shows in the logits.
"""

import contextlib
import json
import math
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from parallel_ops.models import Transformer, TransformerConfig, YarnScaling, config_from_pretrained
from parallel_ops.models.experts import ExpertsConfig
from parallel_ops.models.huggingface import loading
from parallel_ops.models.huggingface.rotary import read_rotary
from parallel_ops.models.inputs import rotary_angles
from parallel_ops.planner import Plan
from support import expert_parallel, huggingface
from support import transformer as on_rank
from support.distributed import Raised, ranks
from support.huggingface import LENGTH, VOCAB

SIZES = huggingface.SIZES | {"attn_implementation": "eager"}
GPT2_SIZES = huggingface.GPT2_SIZES | {"attn_implementation": "eager"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 16,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
GPT_OSS = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "swiglu_limit": 0.8}
DEEPSEEK = SIZES | {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 20, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 10,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 16,
}  # fmt: skip
GPT_OSS_EXPERTS = ExpertsConfig(
    num_experts=4, top_k=2, ffn_hidden_size=128, top_k_first=True, router_bias=True, bias=True, swiglu_alpha=1.702,
    swiglu_limit=7.0, swiglu_up_offset=1.0,
)  # fmt: skip
MODELS = {
    "gpt2": lambda: transformers.GPT2Config(**GPT2_SIZES),
    "gpt2-untied": lambda: transformers.GPT2Config(
        **GPT2_SIZES, tie_word_embeddings=False, n_inner=40, activation_function="gelu"
    ),
    "llama2": lambda: transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3), head_dim=12),
    "llama-yarn": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "mistral-whole": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, **WINDOWS, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, sliding_window=5),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, mlp_only_layers=[0]
    ),
    "qwen3_moe-normed": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, norm_topk_prob=True
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**DEEPSEEK),
    "deepseek_v3-yarn": lambda: transformers.DeepseekV3Config(
        **DEEPSEEK, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.5}
    ),
    "deepseek_v3-plain": lambda: transformers.DeepseekV3Config(
        **DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False, "n_shared_experts": 2, "first_k_dense_replace": 0}
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **SIZES | {"num_key_value_heads": 4}, num_experts=4, num_experts_per_tok=2, pad_token_id=None
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, **GPT_OSS, rope_parameters={"rope_type": "default", "rope_theta": 5_000.0}
    ),
    "gpt_oss-yarn": lambda: transformers.GptOssConfig(
        **SIZES, **GPT_OSS, attention_bias=False, layer_types=["full_attention"] * 2,
        rope_parameters=YARN | {"truncate": False},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(VOCAB, (LENGTH, 2), generator=torch.Generator().manual_seed(1))


def make(name):
    """A model of transformers, with biases and norms that show."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if p.dim() == 1 or parameter_name.endswith("bias"):
                p.normal_(0.0 if parameter_name.endswith("bias") else 1.0, 0.3)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of every model; those with an odd number of letters in several files."""
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        make(name).save_pretrained(root / name, max_shard_size="20KB" if len(name) % 2 else "5GB")
    assert (root / "qwen2" / loading.INDEX).exists() and (root / "gpt2" / loading.SINGLE).exists()
    return root


def logits_of(model, tokens):
    """Of a model of transformers, ``[s, b, V]``."""
    with torch.no_grad():
        return model(tokens.t()).logits.transpose(0, 1)


def opened(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def tensors_of(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same_tensors(a, b):
    a, b = tensors_of(a), tensors_of(b)
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_on_any_mesh(name, folders, tokens, tmp_path):
    """Two key heads: with four ranks they are shared. The vocabulary of 61 does not split evenly."""
    model = opened(folders / name)
    want = logits_of(model, tokens)
    assert want.std() > 0.5
    for size in (1, 2, 4):
        arguments = (on_rank.loaded, str(folders / name), tokens, str(tmp_path / f"{size}"))
        results = ranks(size).run(*arguments) if size > 1 else [on_rank.loaded(0, *arguments[1:])]
        for got in results:
            for logits in got["logits"]:
                torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)
            # Tied embeddings have nothing else to compare with; every other number is read once, by its holder.
            assert got["read"] == got["held"]
        assert same_tensors(tmp_path / f"{size}", folders / name)
    again = opened(tmp_path / "1")
    assert type(again) is type(model)
    torch.testing.assert_close(logits_of(again, tokens), want, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "qwen3"])
def test_gradients_are_those_of_transformers(name, folders, tokens, tmp_path):
    """Of the loss after the next token, under Hugging Face's names: our gradients are saved as weights are."""
    model = opened(folders / name)
    targets = tokens.roll(-1, 0)
    logits = model(tokens.t()).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.t().flatten())
    loss.backward()
    for got in ranks(4).run(on_rank.loaded_gradients, str(folders / name), tokens, targets, str(tmp_path / "g")):
        torch.testing.assert_close(got, loss.detach(), rtol=1e-5, atol=0)
    grads = tensors_of(tmp_path / "g")
    for key, p in model.named_parameters():
        torch.testing.assert_close(grads.pop(key), p.grad, rtol=1e-3, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")
    assert not grads


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_fully_sharded_ranks_read_and_write_the_same_files(name, folders, tmp_path):
    copied = tmp_path / "m"
    copied.mkdir()
    for file in (folders / name).iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    want = on_rank.state(Transformer.from_pretrained(copied))
    for tp in (1, 2):
        for got in ranks(4).run(on_rank.sharded_step, name, tp, str(copied)):
            assert math.isfinite(got["loss"])
            assert all(torch.equal(weight, want[key]) for key, weight in got["weights"].items())
        assert (copied / f"again{tp}" / loading.INDEX).exists()
        assert same_tensors(copied, copied / f"again{tp}")


def test_a_configuration_of_ones_own_becomes_the_family_that_has_it(tmp_path):
    shape = {"vocab_size": 61, "seq_length": 32, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "dropout": 0.1}
    llama = {"activation": "swiglu", "norm": "rms_norm", "positions": "rotary", "bias": False}
    cases = {
        "gpt2": {},
        "llama": llama,
        "mistral": llama | {"window": 3},
        "qwen2": llama | {"qkv_bias": True, "window": (None, 3)},
        "qwen3": llama | {"qk_norm": True, "num_kv_heads": 2},
        "gpt_oss": llama | {"attention_sinks": True, "attention_bias": True, "experts": GPT_OSS_EXPERTS},
    }
    for name, options in cases.items():
        model = Transformer(TransformerConfig(**shape, **options))
        model.save_pretrained(tmp_path / name, dtype=torch.bfloat16)
        assert json.loads((tmp_path / name / "config.json").read_text())["model_type"] == name
        assert opened(tmp_path / name).dtype is torch.bfloat16
        again = Transformer.from_pretrained(tmp_path / name, config=model.config)
        for key, weight in model.state_dict().items():
            assert torch.equal(weight.bfloat16().float(), again.state_dict()[key]), key
    with pytest.raises(ValueError, match=r"dtype must be float64, float32, float16 or bfloat16, got torch\.int8"):
        model.save_pretrained(tmp_path / "int8", dtype=torch.int8)
    odd = Transformer(TransformerConfig(**shape, qk_norm=True))
    with pytest.raises(ValueError, match=r"no Hugging Face family has this configuration \(gpt2: qk_norm; llama: act"):
        odd.save_pretrained(tmp_path / "odd")
    part = Transformer(TransformerConfig(**shape))
    del part.layers["0"]
    with pytest.raises(ValueError, match=r"the whole model is needed, and layers\.0\.attention\.k\.bias"):
        part.save_pretrained(tmp_path / "part")


def test_what_does_not_change_the_logits_stays_in_config_json(folders, tmp_path):
    copy = change_config(folders / "llama3", tmp_path / "a", bos_token_id=7, eos_token_id=[8, 9], torch_dtype="float16")
    Transformer.from_pretrained(copy).save_pretrained(tmp_path / "b")
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (saved["bos_token_id"], saved["eos_token_id"], saved["torch_dtype"]) == (7, [8, 9], "float32")


def test_old_spellings_are_read(folders, tokens, tmp_path):
    """rope_theta and rope_scaling as transformers 4 wrote them, masks and inverse frequencies that old files hold.

    GPT-2 without the prefix, as it was first published, and with an output layer that equals the embeddings.
    """
    want = logits_of(opened(folders / "llama3"), tokens)
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = change_config(
        folders / "llama3", tmp_path / "llama", rope_parameters=None, rope_theta=10_000.0, rope_scaling=scaling
    )
    change_tensors(old, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)})
    torch.testing.assert_close(Transformer.from_pretrained(old).eval()(tokens), want, rtol=1e-5, atol=1e-5)

    want = logits_of(opened(folders / "gpt2"), tokens)
    bare = {name.removeprefix("transformer."): t for name, t in tensors_of(folders / "gpt2").items()}
    old = change_config(folders / "gpt2", tmp_path / "gpt2")
    save_file(
        bare | {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "lm_head.weight": bare["wte.weight"].clone()},
        old / loading.SINGLE,
    )
    torch.testing.assert_close(Transformer.from_pretrained(old).eval()(tokens), want, rtol=1e-5, atol=1e-5)


def change_config(source, target, **changes):
    """A copy of a folder, in one file, with other options; ``...`` takes one out."""
    options = json.loads((source / "config.json").read_text()) | changes
    target.mkdir()
    (target / "config.json").write_text(json.dumps({k: v for k, v in options.items() if v is not ...}))
    save_file(tensors_of(source), target / loading.SINGLE)
    return target


def change_tensors(folder, changes):
    """Other tensors in its one file; ``None`` takes one out."""
    tensors = {name: t for name, t in (tensors_of(folder) | changes).items() if t is not None}
    save_file(tensors, folder / loading.SINGLE)
    return folder


Q = "model.layers.1.self_attn.q_proj.weight"
BAD_OPTIONS = {
    "has model_type 'opt'; supported are deepseek_v3, gpt2, gpt_oss, llama, mistral, mixtral, olmoe, qwen2": {
        "model_type": "opt"
    },
    "has model_type 'None'": {"model_type": ...},
    "lacks hidden_size": {"hidden_size": ...},
    "has hidden_act 'relu'; supported is 'silu'": {"hidden_act": "relu"},
    "has attention_bias True; supported is False": {"attention_bias": True},
    "has rope_type 'longrope'; supported are 'default', 'llama3' and 'yarn'": {
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


def broken_files(good, tmp_path):
    """Files that are not what their names or their index say."""
    cut, text, array, empty, no_config = (
        change_config(good, tmp_path / n) for n in ("cut", "text", "array", "empty", "no_config")
    )
    (cut / loading.SINGLE).write_bytes((good_bytes := (cut / loading.SINGLE).read_bytes())[: len(good_bytes) // 2])
    (text / "config.json").write_text("{")
    (array / "config.json").write_text("[]")
    (empty / loading.SINGLE).unlink()
    (no_config / "config.json").unlink()
    tensors = tensors_of(good)
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
        (folder / loading.SINGLE).unlink()
        save_file({key: tensors[key] for key in written}, folder / "a.safetensors")
        places = weight_map if isinstance(weight_map, dict) else dict.fromkeys(weight_map, "a.safetensors")
        (folder / loading.INDEX).write_text(json.dumps({"weight_map": places}))
    return broken


def test_any_slices_of_stacked_tensors_are_read(folders):
    """As ranks hold them: some experts, or some rows or columns of each, on both sides of gates and ups."""
    config, draw = config_from_pretrained(folders / "gpt_oss"), random.Random(0)
    whole = Transformer.from_pretrained(folders / "gpt_oss").state_dict()
    options = json.loads((folders / "gpt_oss" / loading.CONFIG).read_text())
    with contextlib.ExitStack() as stack:
        files = loading._Files(folders / "gpt_oss", options, stack)
        files.check(config, Transformer.global_shapes)
        for trial in range(200):
            name = f"layers.{trial % 2}.mlp.experts.{draw.choice(('gate_up', 'gate_up_bias', 'down', 'down_bias'))}"
            ends = [sorted(draw.sample(range(size + 1), 2)) for size in whole[name].shape]
            part = tuple(slice(*pair) for pair in ends)
            assert torch.equal(files.read(name, whole[name].shape, part), whole[name][part]), (name, part)


def test_yarn_is_that_of_transformers():
    """Frequencies, and factors of cosines and sines, of any options."""
    draw = random.Random(0)
    for trial in range(100):
        rope = {
            "rope_type": "yarn",
            "rope_theta": draw.choice((100.0, 10_000.0, 150_000.0, 1e6)),
            "factor": draw.choice((1.0, 1.5, 4.0, 32.0)),
            "original_max_position_embeddings": draw.choice((64, 512, 4096)),
            "beta_slow": draw.choice((0.5, 1.0, 2.0)),
            "beta_fast": draw.choice((2.5, 8.0, 32.0)),
            "truncate": draw.random() < 0.5,
        }
        rope |= {key: draw.choice((0.5, 0.7, 1.0)) for key in ("mscale", "mscale_all_dim") if draw.random() < 0.6}
        rope |= {"attention_factor": 1.3} if draw.random() < 0.3 else {}
        size = draw.choice((8, 16, 64, 128))
        theirs = transformers.LlamaConfig(
            **SIZES | {"max_position_embeddings": 8192}, rope_parameters=dict(rope), head_dim=size
        )
        frequencies, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
        scaling = read_rotary({"rope_parameters": rope, "max_position_embeddings": 8192})["rotary_scaling"]
        assert scaling.rotary_factor == pytest.approx(factor), trial
        config = TransformerConfig(
            vocab_size=8, seq_length=8192, num_layers=1, hidden_size=size, num_heads=1, positions="rotary",
            rotary_base=rope["rope_theta"], rotary_scaling=scaling,
        )  # fmt: skip
        positions = torch.tensor([0, 1, 7, 100])
        cos, sin = rotary_angles(config, positions)
        angles = positions[:, None] * frequencies
        torch.testing.assert_close(cos, angles.cos() * factor, rtol=1e-5, atol=2e-5, msg=lambda m, r=rope: f"{r}: {m}")
        torch.testing.assert_close(sin, angles.sin() * factor, rtol=1e-5, atol=2e-5)


def test_a_published_gpt_oss_folder_is_read(tmp_path):
    """Its keys of an older form, and the defaults of the family where keys are missing."""
    options = {
        "model_type": "gpt_oss", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3,
        "intermediate_size": 48, "num_attention_heads": 8, "max_position_embeddings": 131072, "experts_per_token": 4,
        "num_experts_per_tok": 4, "initial_context_length": 4096, "num_local_experts": 8, "head_dim": 64,
        "output_router_logits": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(options))
    config = config_from_pretrained(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.windows == (128, None, 128)
    assert config.rotary_base == theirs.rope_parameters["rope_theta"] == 150_000.0
    assert config.rotary_scaling == YarnScaling(factor=32.0, original_length=4096, truncate=False)
    assert theirs.rope_parameters["factor"] == 32.0 and not theirs.rope_parameters["truncate"]
    assert config.experts.aux_loss == theirs.router_aux_loss_coef
    assert (config.experts.swiglu_alpha, config.experts.swiglu_limit) == (theirs.swiglu_alpha, theirs.swiglu_limit)
    assert (config.resolved_qkv_bias, config.resolved_attention_bias, config.bias) == (True, True, False)
    for changes, message in (
        ({"experts_per_token": 2}, "num_experts_per_tok 4 and experts_per_token 2, which must be equal"),
        ({"layer_types": ["full_attention"]}, r"has layer_types \['full_attention'\] for 3 layers"),
        ({"sliding_window": None}, "for 3 layers and a sliding window of None"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(options | changes))
        with pytest.raises(ValueError, match=message):
            config_from_pretrained(tmp_path)


def test_quantized_gpt_oss_is_read_after_what_its_error_says(tokens, tmp_path):
    """Blocks of 32 numbers of 4 bits with a scale: transformers makes them bfloat16, we read that."""
    torch.manual_seed(0)
    folder, other = tmp_path / "mxfp4", tmp_path / "bf16"
    sizes = SIZES | GPT_OSS | {"hidden_size": 64, "intermediate_size": 64}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, rope_parameters=dict(YARN)))
    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = tensors_of(folder)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inner, outer = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 126, (experts, outer, inner // 32), dtype=torch.uint8)
    save_file(tensors, folder / loading.SINGLE, metadata={"format": "pt"})
    options = json.loads((folder / loading.CONFIG).read_text())
    options["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "embed_tokens", "lm_head"],
    }
    (folder / loading.CONFIG).write_text(json.dumps(options))
    with pytest.raises(ValueError, match="weights quantized by mxfp4, which are not supported") as raised:
        Transformer.from_pretrained(folder)
    command = str(raised.value).rpartition("with transformers: ")[2]
    names = {name: getattr(transformers, name) for name in ("GptOssForCausalLM", "Mxfp4Config")}
    exec(command, names | {"folder": folder, "other": other})
    want = logits_of(opened(other).float(), tokens)
    torch.testing.assert_close(Transformer.from_pretrained(other).float().eval()(tokens), want, rtol=1e-4, atol=1e-4)


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


def test_a_part_of_a_model_loads_its_part(folders):
    """A pipeline stage, and layers inside of what recomputation puts around them."""
    whole = Transformer.from_pretrained(folders / "llama3").state_dict()
    part = Transformer(config_from_pretrained(folders / "llama3"))
    part.tokens = part.norm = part.head = None
    del part.layers["0"]
    part.layers["1"] = checkpoint_wrapper(part.layers["1"])
    part.load_pretrained(folders / "llama3")
    loaded = part.state_dict()
    assert len(loaded) == 9
    assert all(torch.equal(weight, whole[name]) for name, weight in loaded.items())


def test_tensors_that_the_family_has_no_place_for_are_named(folders):
    config = config_from_pretrained(folders / "gpt2")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no place for positions\.weight"):
        Transformer.from_pretrained(folders / "llama3", config=config)


def test_without_safetensors_it_says_what_to_install(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install 'parallel_ops\[huggingface\]'"):
        Transformer.from_pretrained(folders / "gpt2")


def test_memory_is_needed_before_loading(folders):
    model = Transformer(config_from_pretrained(folders / "gpt2"), device="meta")
    with pytest.raises(ValueError, match="the parameters are on the meta device; call to_empty first"):
        model.load_pretrained(folders / "gpt2")


OF_EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")
# With the auxiliary loss of the whole batch where all ranks share it. Each family takes one plan of either kind.
SHARING = ("dp=1,tp=2,sequence_parallel=true", "dp=1,cp=2,ep=2,zero=1")
APART = ("dp=4,ep=4,zero=3", "dp=2,tp=2,ep=2,zero=2")


@pytest.mark.parametrize(
    ("name", "plan", "aux"),
    [(name, plans[n % 2], plans is SHARING) for n, name in enumerate(OF_EXPERTS) for plans in (SHARING, APART)],
)
def test_losses_and_gradients_of_experts_are_those_of_transformers(name, plan, aux, folders, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(folders / name, folder)
    factor = 0.3 if aux and name != "deepseek_v3" else 0.0
    options = json.loads((folder / loading.CONFIG).read_text())
    options |= {"router_aux_loss_coef": factor} if name != "deepseek_v3" else {}
    (folder / loading.CONFIG).write_text(json.dumps(options))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, output_router_logits=True).train()
    model.router_aux_loss_coef = factor
    tokens, targets = torch.randint(VOCAB, (2, LENGTH, 4), generator=torch.Generator().manual_seed(2))
    result = model(tokens.t(), labels=torch.zeros_like(tokens.t()))
    loss = torch.nn.functional.cross_entropy(result.logits.flatten(0, 1), targets.t().flatten())
    loss = loss + factor * result.aux_loss if factor else loss
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    model.save_pretrained(tmp_path / "want")
    text = f"{plan},global_batch=4,micro_batch={4 // int(plan[3])},dtype=fp32"
    found = ranks(Plan.parse(text).gpus).run(
        expert_parallel.folder_gradients, str(folder), text, tokens, targets, str(tmp_path / "g")
    )
    torch.testing.assert_close(torch.stack(found).mean(), loss.detach(), rtol=1e-5, atol=0)
    grads, want = tensors_of(tmp_path / "g"), tensors_of(tmp_path / "want")
    assert grads.keys() == want.keys()
    for key, t in want.items():
        torch.testing.assert_close(grads[key], t, rtol=1e-3, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def test_weights_in_8_bits_are_multiplied_with_their_scales(folders, tokens, tmp_path):
    """As DeepSeek-V3's files have them: matrices of the layers in blocks, of which the last are cut off."""
    plain, scaled = tmp_path / "plain", tmp_path / "scaled"
    for folder in (plain, scaled):
        shutil.copytree(folders / "deepseek_v3", folder)
        for file in folder.glob("*.safetensors"):
            file.unlink()
        (folder / loading.INDEX).unlink(missing_ok=True)
    stored, undone = {}, {}
    for key, t in tensors_of(folders / "deepseek_v3").items():
        stored[key] = undone[key] = t
        if t.dim() == 2 and "_proj" in key:
            rows, columns = -(-t.shape[0] // 7), -(-t.shape[1] // 5)
            scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(t.numel())) + 0.5
            each = scales.repeat_interleave(7, 0).repeat_interleave(5, 1)[: t.shape[0], : t.shape[1]]
            stored[key] = (t / each).to(torch.float8_e4m3fn)
            stored[f"{key}{loading.SCALE}"] = scales
            undone[key] = stored[key].float() * each
    save_file(stored, scaled / loading.SINGLE)
    save_file(undone, plain / loading.SINGLE)
    options = json.loads((scaled / loading.CONFIG).read_text())
    options["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [7, 5], "fmt": "e4m3"}
    (scaled / loading.CONFIG).write_text(json.dumps(options))
    want = Transformer.from_pretrained(plain).eval()(tokens)
    results = ranks(4).run(on_rank.loaded, str(scaled), tokens, str(tmp_path / "again"))
    for logits in [Transformer.from_pretrained(scaled).eval()(tokens), *results[0]["logits"]]:
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)
    assert "quantization_config" not in json.loads((tmp_path / "again" / loading.CONFIG).read_text())
    options["quantization_config"] = {"quant_method": "gptq"}
    (scaled / loading.CONFIG).write_text(json.dumps(options))
    with pytest.raises(ValueError, match=r"has quantization_config .*; supported is fp8 with a weight_block_size"):
        Transformer.from_pretrained(scaled)


def test_layers_that_predict_further_tokens_are_refused(folders, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(folders / "deepseek_v3-plain", folder)
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(4, 4)}
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / loading.INDEX).unlink(missing_ok=True)
    save_file(tensors_of(folders / "deepseek_v3-plain") | extra, folder / loading.SINGLE)
    with pytest.raises(ValueError, match=r"has model\.layers\.3\.eh_proj\.weight, .* \(MTP\) are not supported"):
        Transformer.from_pretrained(folder)
