"""Fine-tuning of low-rank adapters: against peft's own, on any plan, and what its files are."""

import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")

import safetensors.torch

from parallel_ops.models import Transformer
from parallel_ops.train import CheckpointError
from parallel_ops.train.checkpoint.export import export
from parallel_ops.train.checkpoint.inspection import inspect
from support.ranks.distributed import ranks
from support.runs import trainer as runs
from support.runs.lora import LLAMA, settings_of


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
        settings = settings_of(data, **plain, parallel=plan)
        got = ranks(settings.plan.gpus).run(runs.steps_of, settings, None, 3)
        np.testing.assert_allclose(got[0], want, rtol=1e-4, err_msg=str(plan))


@pytest.mark.parametrize(("heads", "recompute"), [(1, "none"), pytest.param(2, "full", marks=pytest.mark.runs)])
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


def test_the_first_step_is_of_the_base(data):
    adapted, base = (runs.steps_of(0, s, steps=1) for s in (settings_of(data), runs.settings_of(data, model=LLAMA)))
    assert adapted[0][0] == pytest.approx(base[0][0], rel=1e-6)


def test_a_model_of_ones_own_is_refused(data):
    with pytest.raises(ValueError, match=r"lora needs settings\.model"):
        runs.trainer_of(settings_of(data), model=torch.nn.Linear(1, 1))
