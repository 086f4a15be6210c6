"""``parallel-ops export`` and ``inspect``: a checkpoint of any plan as a Hugging Face folder, and what it is."""

import dataclasses
import errno
import functools
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")


from parallel_ops import __main__
from parallel_ops.models import Transformer, config_from_pretrained
from parallel_ops.models.huggingface import streaming
from parallel_ops.train import CheckpointError
from parallel_ops.train.checkpoint.description import read_description, write_description
from parallel_ops.train.checkpoint.export import export
from parallel_ops.train.checkpoint.inspection import inspect
from support.ranks.distributed import ranks
from support.runs import trainer as runs
from support.runs.faults import file_limit, flip
from support.runs.tensor_files import tensors_in


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("gpt", {"tp": 2}),
        ("llama", {"dp": 2, "zero": 3}),
        ("experts", {"dp": 2, "ep": 2, "zero": 2}),
        ("gpt-oss", {"tp": 2, "ep": 2}),
    ],
)
def test_the_folder_is_that_of_save_pretrained(data, tmp_path, monkeypatch, kind, plan):
    model = runs.MODELS[kind]
    if kind == "experts":  # as DeepSeek's, which has latent attention
        latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
        model = {name: value for name, value in model.items() if name != "num_kv_heads"} | {"latent": latent}
    if kind == "gpt-oss":  # experts of a layer are one tensor in its files
        experts = {**model["experts"], "aux_loss_over": "model"}
        model = {**model, "ffn_hidden_size": 16, "experts": experts}
    settings = runs.settings_of(data, model=model, parallel=plan, checkpoint={"dir": str(tmp_path / "runs")})
    ranks(2).run(runs.saved_both_ways, settings, tmp_path / "want")
    held = []
    found = export(tmp_path / "runs", tmp_path / "got", report=lambda done, total: held.append((done, total)))
    want, got = tensors_in(tmp_path / "want"), tensors_in(tmp_path / "got")
    assert want.keys() == got.keys() and all(torch.equal(t, got[name]) for name, t in want.items())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("want", "got")]
    assert configs[0] == configs[1] and found["model_type"] == configs[0]["model_type"]
    assert held[-1][0] == held[-1][1] == found["bytes"] == sum(4 * t.numel() for t in got.values())


def test_a_pipeline_in_several_files_opens_in_transformers(data, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    one = runs.settings_of(data, model=runs.MODELS["llama"], checkpoint={"dir": str(tmp_path / "one")})
    runs.saved_both_ways(0, one, tmp_path / "want")
    two = {"pp": 2, "tp": 2, "schedule": "zb-h1"}
    stages = runs.settings_of(data, model=runs.MODELS["llama"], parallel=two, checkpoint={"dir": str(tmp_path / "two")})
    ranks(4).run(runs.steps_of, stages, tmp_path / "one", 0)
    smaller = functools.partial(streaming.Folder, file_bytes=20_000)
    monkeypatch.setattr("parallel_ops.train.checkpoint.export.Folder", smaller)
    export(tmp_path / "two", tmp_path / "got")
    assert len(list((tmp_path / "got").glob("*.safetensors"))) > 2
    want, got = tensors_in(tmp_path / "want"), tensors_in(tmp_path / "got")
    assert want.keys() == got.keys() and all(torch.equal(t, got[name]) for name, t in want.items())
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "got", dtype=torch.float32)
    assert torch.equal(opened.state_dict()["lm_head.weight"], want["lm_head.weight"])


def test_layers_that_predict_further_tokens_train_in_any_plan_and_are_exported(data, tmp_path):
    """With experts whose routers are balanced, those of these layers among them."""
    model = runs.MODELS["deepseek"] | {"prediction_weight": 0.2}
    folders, losses = [], []
    for plan in ({}, {"pp": 2, "tp": 2, "schedule": "zb-h1"}, {"dp": 4, "zero": 3}):
        folder = tmp_path / str(len(folders))
        settings = runs.settings_of(data, model=model, parallel=plan, checkpoint={"dir": str(folder)})
        losses.append(ranks(4 if plan else 1).run(runs.steps_of, settings, None, 3)[0])
        export(folder, folder / "out")
        folders.append(tensors_in(folder / "out"))
        config = config_from_pretrained(folder / "out")
        assert (config.num_layers, config.prediction_layers) == (2, 1)
        Transformer.from_pretrained(folder / "out")
    for got, tensors in zip(losses[1:], folders[1:], strict=True):
        np.testing.assert_allclose(got, losses[0], rtol=1e-4)
        assert tensors.keys() == folders[0].keys()
        for name, t in tensors.items():
            torch.testing.assert_close(t, folders[0][name], rtol=2e-3, atol=2e-4, msg=name)
    of_routers = [t for name, t in folders[0].items() if name.endswith("2.mlp.gate.e_score_correction_bias")]
    assert of_routers and of_routers[0].abs().max() > 0


def changed(llama, tmp_path, **values):
    """A copy of the checkpoint with another description."""
    (source,) = llama.glob("step-*")
    copy = tmp_path / "changed" / source.name
    shutil.copytree(source, copy)
    description, sums = read_description(copy)
    write_description(copy, dataclasses.replace(description, **values), sums)
    return copy


class TestRefused:
    def test_what_is_no_transformer(self, llama, tmp_path):
        other = changed(llama, tmp_path, model={"class": "Chain"})
        with pytest.raises(CheckpointError, match="is of a Chain, not of a Transformer of this package"):
            export(other, tmp_path / "a")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hidden_sizes": 3}, "a model that this version does not have: .*hidden_sizes"),
            ({"num_heads": 3}, "a model that this version does not have"),
            ({"vocab_size": 32}, r"tokens\.weight must be \[32, 32\], got \[31, 32\]"),
            ({"num_layers": 3}, r"layers\.2\..* must be .*, got nothing"),
        ],
    )
    def test_another_model(self, llama, tmp_path, change, message):
        model = read_description(next(llama.glob("step-*")))[0].model
        with pytest.raises(CheckpointError, match=message):
            export(changed(llama, tmp_path, model={**model, **change}, rest={}), tmp_path / "a")
        assert not (tmp_path / "a").exists()

    def test_a_damaged_file(self, llama, tmp_path):
        copy = changed(llama, tmp_path)
        file = next(copy.glob("*.distcp"))
        flip(file)
        with pytest.raises(CheckpointError, match="is damaged: its checksum"):
            export(copy, tmp_path / "a")
        assert inspect(copy)["step"] == 1
        with pytest.raises(CheckpointError, match="is damaged: its checksum"):
            inspect(copy, verify=True)
        file.unlink()
        with pytest.raises(CheckpointError, match="No such file"):
            inspect(copy)

    def test_a_full_disk_leaves_nothing(self, llama, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(streaming, "_write_header", full)
        with pytest.raises(OSError, match="No space"):
            export(llama, tmp_path / "a")
        assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_that_is_there_is_filled(llama, tmp_path, monkeypatch):
    """A link and the working directory, like a mount point, cannot be replaced."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "here" / ".part").mkdir(parents=True)  # of a process that was killed
    monkeypatch.chdir(tmp_path / "here")
    for folder in (tmp_path / "link", Path()):
        export(llama, folder)
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (tmp_path / "link").is_symlink() and (tmp_path / "here").samefile(".")


def test_a_full_disk_is_called_that_with_the_folder(llama, tmp_path):
    with file_limit(4096), pytest.raises(OSError, match=r"File too large: '.*/model'") as raised:
        export(llama, tmp_path / "model")
    assert raised.value.errno == errno.EFBIG and list(tmp_path.iterdir()) == []


class TestInspect:
    def test_a_checkpoint(self, llama):
        found = inspect(llama)
        (source,) = llama.glob("step-*")
        assert (found["kind"], found["path"], found["step"], found["samples_seen"]) == ("checkpoint", str(source), 1, 8)
        assert found["bytes"] == sum(f.stat().st_size for f in source.iterdir() if f.name != "run.json")
        assert found["settings"]["optimizer"]["lr"] == 1e-2 and found["checkpoints"] == {"1": str(source)}
        assert found["dtype"] == "bf16" and found["model"]["hidden_size"] == 32

    def test_before_settings_were_recorded(self, llama, tmp_path):
        copy = changed(llama, tmp_path, rest={"scale": {"scale": 1.0, "good": 0}, "plan": "", "origin": None})
        assert inspect(copy)["settings"] is None and inspect(copy)["plan"] == "one rank"
        assert export(copy, tmp_path / "a")["dtype"] == "fp32"

    def test_a_model(self, llama, tmp_path):
        written = export(llama, tmp_path / "a")
        found = inspect(tmp_path / "a")
        assert (found["kind"], found["model_type"], found["dtype"]) == ("model", "llama", "bfloat16")
        assert (
            found["parameters"] == written["parameters"] == sum(t.numel() for t in tensors_in(tmp_path / "a").values())
        )


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["parallel-ops", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        __main__.main()
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_the_commands(llama, tmp_path, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "export", llama, tmp_path / "a")
    assert (code, err) == (0, "") and "parameters in bf16" in out and "as llama; step 1 of" in out
    code, out, _ = run(monkeypatch, capsys, "export", llama, tmp_path / "b", "--json", "--dtype", "fp16")
    assert code == 0 and json.loads(out)["dtype"] == "fp16"
    code, out, _ = run(monkeypatch, capsys, "inspect", llama, "--verify")
    assert code == 0 and "checksums right" in out and "[optimizer]" in out
    assert json.loads(run(monkeypatch, capsys, "inspect", tmp_path / "a", "--json")[1])["kind"] == "model"
    for command in ("export", "inspect"):
        code, out, _ = run(monkeypatch, capsys, command, "--help")
        assert code == 0 and f"Example: parallel-ops {command} runs/example" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "none", "a"], "none does not exist"),
        (["export", "{empty}", "a"], "has no checkpoint in it"),
        (["export", "{llama}", "{full}"], "exists and is not an empty folder"),
        (["export", "{llama}", "a", "--dtype", "int8"], "--dtype must be fp32, bf16, fp16, got 'int8'"),
        (["export", "{llama}", "a", "--tokenizer", "none"], "--tokenizer: none does not exist"),
        (["export", "{llama}", "a", "--tokenizer", "{empty}"], "has no tokenizer"),
        (["export", "{llama}", "a", "--tokenizer", "{full}/x.json"], "the file must be named tokenizer.json"),
        (["export", "{llama}"], "Missing argument"),
        (["inspect", "none"], "none does not exist"),
        (["inspect", "{empty}"], "has no checkpoint in it"),
    ],
)
def test_bad_input_is_one_line(llama, tmp_path, monkeypatch, capsys, arguments, message):
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "x.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    places = {"llama": llama, "empty": tmp_path / "empty", "full": tmp_path / "full"}
    code, out, err = run(monkeypatch, capsys, *[argument.format(**places) for argument in arguments])
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and message in err, err
    assert not (tmp_path / "a").exists()
