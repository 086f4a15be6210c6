"""Fine-tuning of low-rank adapters: against peft's own, on any plan, and what its files are."""

import json
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")

import safetensors.torch

from parallel_ops import __main__
from parallel_ops.models import Transformer
from parallel_ops.train import CheckpointError
from parallel_ops.train.checkpoint.export import export
from parallel_ops.train.checkpoint.inspection import inspect
from support.integrations import huggingface_folders as folders
from support.ranks.distributed import ranks
from support.runs import trainer as runs

LLAMA = runs.MODELS["llama"]


def settings_of(data, **sections):
    sections = {"model": LLAMA, **sections}
    return runs.settings_of(data, **{**sections, "lora": {"rank": 4, **sections.get("lora", {})}})


def test_adapters_of_another_base_are_refused(data, tmp_path):
    """A base of the same shape, from another seed, in another folder, or in the folder of the first."""

    def adapters(name, resume=False, **sections):
        trainer = runs.trainer_of(settings_of(data, checkpoint={"dir": str(tmp_path / name)}, **sections))
        if resume:
            return trainer.resume()
        trainer.step()
        trainer.loader.close()
        trainer.save()

    adapters("seeds", run={"seed": 1})
    adapters("seeds", resume=True, run={"seed": 1})
    with pytest.raises(CheckpointError, match=r"of another base model, run\.seed 1: .* no use on run\.seed 2"):
        adapters("seeds", resume=True, run={"seed": 2})
    bases = []
    for seed in range(2):
        torch.manual_seed(seed)
        bases.append(tmp_path / f"base{seed}")
        Transformer(runs.settings_of(data, model=LLAMA).config).save_pretrained(bases[-1])
    shutil.copytree(bases[0], tmp_path / "copy")
    adapters("folders", model={"dir": str(bases[0])})
    adapters("folders", resume=True, model={"dir": str(tmp_path / "copy")})
    with pytest.raises(CheckpointError, match=r"has adapters of another base model, .*base0: .* no use on .*base1"):
        adapters("folders", resume=True, model={"dir": str(bases[1])})
    shutil.copytree(bases[1], bases[0], dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match="another base model"):
        adapters("folders", resume=True, model={"dir": str(bases[0])})


PLANS = [{"tp": 2, "sequence_parallel": False}, {"cp": 2}, {"tp": 2, "dp": 2, "zero": 3}]
MORE_PLANS = [{"tp": 2}, {"dp": 2, "zero": 3}, {"pp": 2, "tp": 2, "schedule": "zb-h1"}]
EXPERT_PLANS = [{"pp": 2, "tp": 2, "ep": 2, "schedule": "zb-h1"}]
MORE_EXPERT_PLANS = [
    {"dp": 2, "ep": 2, "zero": 3}, {"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"dp": 2, "tp": 2, "zero": 1}
]  # fmt: skip


# Linears of a GPT have biases: what a plan does with them shows with one axis each.
@pytest.mark.parametrize(
    ("kind", "plans"),
    [
        ("llama", PLANS),
        ("gpt", [{"tp": 2}, {"pp": 2}]),
        ("deepseek", EXPERT_PLANS),
        pytest.param("llama", MORE_PLANS, marks=pytest.mark.runs),
        pytest.param("deepseek", MORE_EXPERT_PLANS, marks=pytest.mark.runs),
    ],
)
def test_any_plan_takes_the_steps_of_one_process(data, kind, plans):
    # With seed 3 a token's choice between two experts is a tie but for rounding.
    plain = {"model": runs.MODELS[kind], "run": {"seed": 1}}
    want = runs.steps_of(0, settings_of(data, **plain), steps=3)
    assert want[-1][0] < want[0][0]
    for plan in plans:
        processes = plan.get("tp", 1) * plan.get("dp", 1) * plan.get("cp", 1) * plan.get("pp", 1)
        got = ranks(processes).run(runs.steps_of, settings_of(data, **plain, parallel=plan), None, 3)
        np.testing.assert_allclose(got[0], want, rtol=1e-4, err_msg=str(plan))


@pytest.mark.parametrize(("heads", "recompute"), [(1, "none"), (2, "full")])
def test_shared_key_heads_dropout_and_recomputation(data, heads, recompute):
    """One key head on two ranks has its weight, and B, whole on both."""
    sections = {"model": {**LLAMA, "num_kv_heads": heads}, "lora": {"dropout": 0.3}, "recompute": {"kind": recompute}}
    want = runs.steps_of(0, settings_of(data, **sections), steps=2)
    without = runs.steps_of(0, settings_of(data, **{**sections, "lora": {"dropout": 0.0}}), steps=2)
    assert abs(want[-1][0] - without[-1][0]) > 1e-5  # masks are drawn
    plan = {"tp": 2, "sequence_parallel": heads == 1}
    got = ranks(2).run(runs.steps_of, settings_of(data, **sections, parallel=plan), None, 2)
    np.testing.assert_allclose(got[0], want, rtol=1e-4)


@pytest.mark.parametrize("plan", [{"tp": 2}, {"pp": 2}], ids=str)
def test_adapters_alone_are_trained_saved_and_resumed(data, tmp_path, plan):
    want = runs.steps_of(0, settings_of(data))
    sections = {"parallel": plan, "checkpoint": {"dir": str(tmp_path / "a")}}
    ranks(2).run(runs.steps_of, settings_of(data, **sections), None, 3)
    got = runs.steps_of(0, settings_of(data), tmp_path / "a")
    np.testing.assert_allclose(got, want[3:], rtol=1e-3)
    trainer = runs.trainer_of(settings_of(data))
    fresh = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert set(trainer.state_dict()["model"]) == {name for name in fresh if ".lora." in name}
    trainer.resume(tmp_path / "a")
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, fresh[name])}
    assert moved == set(trainer.state_dict()["model"]) and len(trainer.optimizer.state) == len(moved) == 2 * 2 * 7
    assert inspect(tmp_path / "a")["model"]["lora"]["rank"] == 4
    for changed, message in (({"rank": 2}, "of a model with lora"), ({"targets": ["q_proj"]}, "of a model with lora")):
        with pytest.raises(CheckpointError, match=message):
            runs.trainer_of(settings_of(data, lora=changed)).resume(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"of a model with lora \{.*\}, not None"):
        runs.trainer_of(runs.settings_of(data, model=LLAMA)).resume(tmp_path / "a")


def test_a_stage_without_adapters_saves_the_files_of_one_process(data, tmp_path):
    """With dropout, whose masks are those of the layers. Only the last layer has an adapter."""
    files = []
    for plan in ({}, {"pp": 2, "schedule": "zb-h1"}):
        folder = tmp_path / str(len(files))
        settings = settings_of(
            data, lora={"targets": ["layers.1.attention.*"], "dropout": 0.2}, parallel=plan,
            checkpoint={"dir": str(folder)}, run={"steps": 2},
        )  # fmt: skip
        ranks(plan.get("pp", 1)).run(runs.steps_of, settings)
        export(folder, folder / "out")
        files.append(safetensors.torch.load_file(folder / "out" / "adapter_model.safetensors"))
    assert files[0].keys() == files[1].keys() and len(files[0]) == 2 * 4
    for name, tensor in files[0].items():
        torch.testing.assert_close(files[1][name], tensor, msg=name)
    assert any(tensor.abs().max() > 0 for name, tensor in files[1].items() if "lora_B" in name)
    for outcome in ranks(2).outcomes(runs.tuned, settings_of(data, parallel={"pp": 2}, run={"steps": 2}), tmp_path):
        assert outcome.message.startswith("save_adapters: the model has pipeline stages")


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
        ("llama", ["q_proj", "layers.*.attention.v"], {"q_proj", "v_proj"}),
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
    _, logits = ranks(2).run(tuned_and_saved, settings, tmp_path / "saved")[0]
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
        model.save_pretrained(tmp_path / f"{folder}-by-peft")
        own, theirs = (
            safetensors.torch.load_file(tmp_path / name / "adapter_model.safetensors")
            for name in (folder, f"{folder}-by-peft")
        )
        assert own.keys() == theirs.keys() and all(torch.equal(t, theirs[name]) for name, t in own.items())
        of_peft = json.loads((tmp_path / f"{folder}-by-peft" / "adapter_config.json").read_text())
        of_peft["target_modules"], config["target_modules"] = (set(c["target_modules"]) for c in (of_peft, config))
        assert {name: of_peft[name] for name in config} == config


def tuned_and_saved(rank, settings, folder):
    trainer, losses = runs.trainer_of(settings), []
    while trainer.global_step < settings.run.steps:
        losses.append(trainer.step().loss)
    trainer.loader.close()
    trainer.save()
    trainer.save_pretrained(folder)
    with torch.no_grad():
        return losses, trainer.model.eval()(torch.arange(12)[:, None] % runs.VOCABULARY)[:, 0]


OF_EXPERTS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]


@pytest.mark.parametrize(
    ("kind", "targets", "modules", "parameters"),
    [
        ("DeepseekV3", ["layers.*"], {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
         OF_EXPERTS),
        ("Mixtral", ["layers.*.experts.*"], set(), OF_EXPERTS),
        ("GptOss", ["q_proj", "layers.1.mlp.experts.gate_up"], {"q_proj"}, ["model.layers.1.mlp.experts.gate_up_proj"]),
        ("GptOss", ["layers.*.experts.down"], set(), OF_EXPERTS[:1]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("plan", [{"tp": 2, "ep": 2}, {"dp": 2, "zero": 1}], ids=str)
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
    _, logits = ranks(2).run(tuned_and_saved, settings, tmp_path / "saved")[0]
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
        model.save_pretrained(tmp_path / f"{folder}-by-peft")
        own, theirs = (
            safetensors.torch.load_file(tmp_path / name / "adapter_model.safetensors")
            for name in (folder, f"{folder}-by-peft")
        )
        assert own.keys() == theirs.keys() and all(torch.equal(t, theirs[name]) for name, t in own.items())
        with torch.no_grad():
            merged = model.merge_and_unload()(tokens).logits[0]
            torch.testing.assert_close(merged, logits, rtol=1e-4, atol=1e-4)


def test_the_first_step_is_of_the_base(data):
    adapted, base = (runs.steps_of(0, s, steps=1) for s in (settings_of(data), runs.settings_of(data, model=LLAMA)))
    assert adapted[0][0] == pytest.approx(base[0][0], rel=1e-6)


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


LLAMA_FFN = Transformer.global_shapes(runs.settings_of("", model=LLAMA).config)["layers.0.mlp.down.weight"][1]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"lora": {"targets": ["qproj"]}}, r"'qproj' matches no linear; their names are like layers\.0\.attention\.q "),
        ({"lora": {"targets": []}}, "at least 1 item"),
        ({"lora": {"rank": 0}}, "greater than or equal to 1"),
        ({"parallel": {"cp": 2}, "lora": {"dropout": 0.1}}, r"needs parallel\.cp of 1, got 2"),
        ({"model": {**LLAMA, "freeze": ["tokens.*"]}}, "must be left out with lora"),
        (
            {"model": runs.MODELS["deepseek"], "lora": {"dropout": 0.1}},
            r"need dropout of 0, as peft's do, got 0\.1 for layers\.1\.mlp\.experts\.gate_up",
        ),
        ({"model": runs.MODELS["deepseek"], "lora": {"targets": ["layers.2.*"]}}, r"'layers\.2\.\*' matches no linear"),
    ],
)
def test_what_does_not_work_is_refused(data, sections, message):
    with pytest.raises(ValueError, match=message):
        settings_of(data, **sections)


def test_a_model_of_ones_own_is_refused(data):
    with pytest.raises(ValueError, match=r"lora needs settings\.model"):
        runs.trainer_of(settings_of(data), model=torch.nn.Linear(1, 1))
