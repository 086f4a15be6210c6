"""Hugging Face folders: what transformers writes is computed alike on any mesh, and it opens what is written."""

import contextlib
import dataclasses
import json
import math
import random

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from parallel_ops.models import Transformer, TransformerConfig, config_from_pretrained
from parallel_ops.models.huggingface import tensor_files
from parallel_ops.models.huggingface.rotary import read_rotary
from parallel_ops.models.rotary_scaling import DynamicScaling, LinearScaling, rotary_angles
from support.integrations.huggingface_folders import (
    GPT_OSS_EXPERTS,
    LLAMA3,
    MODELS,
    SIZES,
    change_config,
    change_tensors,
    logits_of,
    opened,
    same_tensors,
)
from support.parallelism import transformer as on_rank
from support.ranks.distributed import ranks
from support.runs.tensor_files import tensors_in


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
        assert (copied / f"again{tp}" / tensor_files.INDEX).exists()
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
    bare = {name.removeprefix("transformer."): t for name, t in tensors_in(folders / "gpt2").items()}
    old = change_config(folders / "gpt2", tmp_path / "gpt2")
    save_file(
        bare | {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "lm_head.weight": bare["wte.weight"].clone()},
        old / tensor_files.SINGLE,
    )
    torch.testing.assert_close(Transformer.from_pretrained(old).eval()(tokens), want, rtol=1e-5, atol=1e-5)


def test_any_slices_of_stacked_tensors_are_read(folders):
    """As ranks hold them: some experts, or some rows or columns of each, on both sides of gates and ups."""
    config, draw = config_from_pretrained(folders / "gpt_oss"), random.Random(0)
    whole = Transformer.from_pretrained(folders / "gpt_oss").state_dict()
    options = json.loads((folders / "gpt_oss" / tensor_files.CONFIG).read_text())
    with contextlib.ExitStack() as stack:
        files = tensor_files.Files(folders / "gpt_oss", options, stack)
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
        cos, sin = rotary_angles(config, positions, 101)
        angles = positions[:, None] * frequencies
        torch.testing.assert_close(cos, angles.cos() * factor, rtol=1e-5, atol=2e-5, msg=lambda m, r=rope: f"{r}: {m}")
        torch.testing.assert_close(sin, angles.sin() * factor, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_linear_and_dynamic_scaling_are_those_of_transformers(tmp_path, kind):
    """In sequences below and above the original length, of batches and of documents; saved and read again."""
    rope = {"rope_type": kind, "rope_theta": 500.0, "factor": 2.5}
    config = transformers.LlamaConfig(**SIZES | {"max_position_embeddings": 16}, rope_parameters=rope)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    longer = dataclasses.replace(config_from_pretrained(tmp_path / "theirs"), seq_length=64)
    ours = Transformer.from_pretrained(tmp_path / "theirs", config=longer)
    with torch.no_grad():
        for length in (9, 16, 17, 40):
            tokens = torch.randint(SIZES["vocab_size"], (2, length))
            got = ours(tokens.t()).transpose(0, 1)
            torch.testing.assert_close(got, theirs(tokens).logits, rtol=1e-4, atol=1e-4)
            rows = torch.arange(length)[:, None].expand(length, 2)
            torch.testing.assert_close(ours(tokens.t(), positions=rows).transpose(0, 1), got)
    ours.save_pretrained(tmp_path / "ours")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits)
    for scaling, name in ((LinearScaling, "linear"), (DynamicScaling, "dynamic")):
        given = {"original_length": 8} if scaling is DynamicScaling else {}
        with pytest.raises(ValueError, match=f"{scaling.__name__}: factor must be at least 1, got 0.5"):
            scaling(factor=0.5, **given)
        assert scaling(factor=2.0, **given).kind == name


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


def test_memory_is_needed_before_loading(folders):
    model = Transformer(config_from_pretrained(folders / "gpt2"), device="meta")
    with pytest.raises(ValueError, match="the parameters are on the meta device; call to_empty first"):
        model.load_pretrained(folders / "gpt2")
