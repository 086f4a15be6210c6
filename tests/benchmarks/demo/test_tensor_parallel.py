"""The main job's tensor-parallel run: the same losses as on one process."""

import dataclasses

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from benchmarks.demo import cli
from benchmarks.demo.config import demo_settings, in_parallel, name_of
from benchmarks.demo.runs import train
from parallel_ops.models import TransformerConfig
from support.ranks.distributed import ranks
from support.runs import training
from support.runs.training import TINY

MODEL = TransformerConfig(vocab_size=256, seq_length=32, num_layers=1, hidden_size=32, num_heads=2)


def check(result, names):
    for name in names:
        assert len(result[name]["losses"]) == 5
        assert result[name]["losses"][-1] < result[name]["losses"][0]
    for name in names[1:]:
        assert result[name]["largest_loss_difference"] < 1e-4


@pytest.mark.runs
def test_all_runs_have_one_loss_curve(tmp_path, text):
    options = ("--tp", "2", "--sequence-parallel", "--all", "--num-layers", "2", "--runs", "plain,fused")
    done, result = training.run_demo(tmp_path, text, "--steps", "5", *options)
    assert all(line.startswith(("training ", "step ")) for line in done.stderr.splitlines())
    names = ["plain", "fused", "tp2", "dp2-tp2-zero3", "pp2"]
    assert done.stdout.split()[:5] == names
    check(result, names)


@pytest.mark.runs
def test_ranks_that_share_sequences_and_weights_have_the_same_loss_curve(tmp_path, text):
    options = ("--tp", "2", "--cp", "2", "--sequence-parallel", "--runs", "fused")
    _, result = training.run_demo(tmp_path, text, "--steps", "5", *options)
    check(result, ["fused", "tp2-cp2"])


def test_dropout_and_clipping_do_not_depend_on_the_number_of_processes(text):
    model = dataclasses.replace(
        MODEL, num_heads=4, dropout=0.2, activation="swiglu", norm="rms_norm", positions="rotary"
    )
    losses = []
    for tp, sequence_parallel in ((2, False), (2, True), (4, True)):
        settings = demo_settings(model, text, steps=4, batch=2, optimizer={"lr": 1e-2, "grad_clip": 0.1})
        each = ranks(tp).run(training.train_losses, in_parallel(settings, tp=tp, sequence_parallel=sequence_parallel))
        assert all(e == each[0] for e in each)
        losses.append(each[0])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[2] == pytest.approx(losses[0], abs=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_the_parallel_run_has_a_name_of_its_own():
    one = demo_settings(MODEL)
    assert name_of(in_parallel(one, tp=2).plan) == "tp2"
    assert name_of(in_parallel(one, cp=4).plan) == "cp4"
    assert name_of(in_parallel(one, dp=2, tp=2, zero=3).plan) == "dp2-tp2-zero3"


@pytest.mark.runs
def test_a_rank_that_dies_ends_the_run(tmp_path):
    settings = demo_settings(MODEL, tmp_path / "missing", steps=2)
    with pytest.raises(RuntimeError, match=r"the tp2 run ended early: .*missing does not exist"):
        train({"tp2": in_parallel(settings, tp=2)})


def test_torchrun_is_left_out(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(cli.app, [*TINY, "--tp", "2"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the demo starts its processes itself; leave torchrun out" in result.stderr


def test_too_few_gpus(capsys):
    settings, plans = demo_settings(MODEL), [{"tp": 2}, {"dp": 2, "tp": 2, "zero": 3}]
    assert list(cli._parallel(settings, plans, "auto", 2)) == ["tp2"]
    assert capsys.readouterr().err == (
        "note: dp2-tp2-zero3 needs 4 GPUs, and this torch sees 2; --device cpu needs none\n"
    )
    with pytest.raises(ValueError, match="--device cuda: dp2-tp2-zero3 needs 4 GPUs, and this torch sees 2"):
        cli._parallel(settings, plans, "cuda", 2)
    assert list(cli._parallel(settings, plans, "cpu", None)) == ["tp2", "dp2-tp2-zero3"]
