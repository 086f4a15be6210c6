"""The files of adapters: peft opens them, and has the same logits."""

import json

import pytest
import torch

pytest.importorskip("safetensors")

import safetensors.torch

from parallel_ops import __main__
from parallel_ops.models import Transformer
from parallel_ops.train.checkpoint.export import export
from support.further import thinned
from support.integrations import huggingface_folders as folders
from support.ranks.distributed import ranks
from support.runs import trainer as runs
from support.runs.lora import LLAMA, settings_of


def saved_alike(model, ours, theirs):
    """peft saves what it has read as we do."""
    model.save_pretrained(theirs)
    own, by_peft = (safetensors.torch.load_file(folder / "adapter_model.safetensors") for folder in (ours, theirs))
    assert own.keys() == by_peft.keys() and all(torch.equal(t, by_peft[name]) for name, t in own.items())


def huggingface_model(kind, folder):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=runs.VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
            )
        )  # fmt: skip
    else:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=runs.VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "targets", "modules"),
    [
        ("llama", ["layers.*"], {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        pytest.param("llama", ["q_proj", "layers.*.attention.v"], {"q_proj", "v_proj"}, marks=pytest.mark.runs),
        pytest.param(
            "llama", ["layers.1.self_attn.q_proj"], {"model.layers.1.self_attn.q_proj"}, marks=pytest.mark.runs
        ),
        ("gpt2", ["layers.*"], {"c_attn", "c_proj", "c_fc"}),
        pytest.param("gpt2", ["layers.*.attention.[qv]"], {"c_attn"}, marks=pytest.mark.runs),
    ],
)
@pytest.mark.parametrize("plan", [{"tp": 2}, pytest.param({"dp": 2, "zero": 3}, marks=pytest.mark.runs)], ids=str)
def test_peft_opens_the_files_and_has_the_same_logits(data, tmp_path, kind, targets, modules, plan):
    peft = pytest.importorskip("peft", reason="peft is no dependency")
    base = huggingface_model(kind, tmp_path / "base")
    settings = settings_of(
        data, model={"dir": str(tmp_path / "base")}, lora={"targets": targets}, parallel=plan, optimizer={"lr": 0.05},
        checkpoint={"dir": str(tmp_path / "runs")},
    )  # fmt: skip
    _, logits = ranks(2).run(runs.tuned, settings, tmp_path / "saved")[0]
    tokens = torch.arange(12)[None] % runs.VOCABULARY
    with torch.no_grad():
        before = base(tokens).logits[0]
    found = export(tmp_path / "runs", tmp_path / "exported")
    assert found["dtype"] == "fp32" and found["bytes"] == 4 * found["parameters"]
    for folder in ("exported", "saved"):
        config = json.loads((tmp_path / folder / "adapter_config.json").read_text())
        assert set(config["target_modules"]) == modules and config["base_model_name_or_path"] == str(tmp_path / "base")
        model = peft.PeftModel.from_pretrained(huggingface_model(kind, tmp_path / "again"), tmp_path / folder)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(tokens).logits[0], logits, rtol=1e-5, atol=1e-5)
        assert (logits - before).abs().max() > 1e-3
        saved_alike(model, tmp_path / folder, tmp_path / f"{folder}-by-peft")
        of_peft = json.loads((tmp_path / f"{folder}-by-peft" / "adapter_config.json").read_text())
        of_peft["target_modules"], config["target_modules"] = (set(c["target_modules"]) for c in (of_peft, config))
        assert {name: of_peft[name] for name in config} == config


OF_EXPERTS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]


@pytest.mark.parametrize(
    ("kind", "targets", "modules", "parameters"),
    thinned([
        ("DeepseekV3", ["layers.*"], {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
         OF_EXPERTS),
        ("Mixtral", ["layers.*.experts.*"], set(), OF_EXPERTS),
        ("GptOss", ["q_proj", "layers.1.mlp.experts.gate_up"], {"q_proj"}, ["model.layers.1.mlp.experts.gate_up_proj"]),
        ("GptOss", ["layers.*.experts.down"], set(), OF_EXPERTS[:1]),
    ]),
)  # fmt: skip
@pytest.mark.parametrize(
    "plan", [{"tp": 2, "ep": 2}, pytest.param({"dp": 2, "zero": 1}, marks=pytest.mark.runs)], ids=str
)
def test_peft_opens_adapters_of_experts(data, tmp_path, kind, targets, modules, parameters, plan):
    peft = pytest.importorskip("peft", reason="peft is no dependency")
    transformers = pytest.importorskip("transformers")
    options = {"DeepseekV3": folders.DEEPSEEK, "GptOss": folders.SIZES | folders.GPT_OSS, "Mixtral": folders.SIZES}[
        kind
    ]
    options = options | {"vocab_size": runs.VOCABULARY, "max_position_embeddings": 16}
    options |= {"num_local_experts": 4} if kind == "Mixtral" else {}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0}} if kind == "GptOss" else {}

    def base():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**options, **rope)
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval()

    base().save_pretrained(tmp_path / "base")
    settings = settings_of(
        data, model={"dir": str(tmp_path / "base")}, lora={"targets": targets}, parallel=plan, optimizer={"lr": 0.05},
        checkpoint={"dir": str(tmp_path / "runs")}, run={"steps": 3},
    )  # fmt: skip
    _, logits = ranks(2).run(runs.tuned, settings, tmp_path / "saved")[0]
    export(tmp_path / "runs", tmp_path / "exported")
    tokens = torch.arange(12)[None] % runs.VOCABULARY
    with torch.no_grad():
        assert (base()(tokens).logits[0] - logits).abs().max() > 1e-3
    for folder in ("exported", "saved"):
        config = json.loads((tmp_path / folder / "adapter_config.json").read_text())
        assert set(config["target_modules"]) == modules
        assert [name.removeprefix("mlp.") for name in parameters] == config["target_parameters"] or (
            parameters == config["target_parameters"]
        )
        model = peft.PeftModel.from_pretrained(base(), tmp_path / folder).eval()
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits[0], logits, rtol=1e-4, atol=1e-4)
        saved_alike(model, tmp_path / folder, tmp_path / f"{folder}-by-peft")
        with torch.no_grad():
            merged = model.merge_and_unload()(tokens).logits[0]
            torch.testing.assert_close(merged, logits, rtol=1e-4, atol=1e-4)


def test_bf16_and_the_command_that_exports(data, tmp_path, monkeypatch, capsys):
    settings = settings_of(data, precision={"dtype": "bf16"}, checkpoint={"dir": str(tmp_path / "runs")})
    losses = runs.steps_of(0, settings)
    assert losses[-1][0] < losses[0][0]
    monkeypatch.setattr("sys.argv", ["parallel-ops", "export", str(tmp_path / "runs"), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        __main__.main()
    assert end.value.code == 0, capsys.readouterr()
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    tensors = safetensors.torch.load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape == (4, LLAMA_FFN)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}


LLAMA_FFN = Transformer.global_shapes(runs.settings_of("tokens.bin", model=LLAMA).config)["layers.0.mlp.down.weight"][1]
