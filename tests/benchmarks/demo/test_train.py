import dataclasses
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
import torch

from benchmarks.demo.baseline import PlainTransformer
from benchmarks.demo.config import demo_settings
from benchmarks.demo.data import load_text
from benchmarks.demo.runs import ALONE, Run, demo_trainer, train
from parallel_ops.models import Transformer, TransformerConfig
from support.runs.training import TINY, run_demo

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from benchmarks.demo import cli, report

MODEL = TransformerConfig(vocab_size=256, seq_length=32, num_layers=1, hidden_size=32, num_heads=2)


def content(*path):
    return bytes(load_text(*path).tolist())


class TestText:
    def test_a_file_is_its_bytes(self, tmp_path):
        for data in ("naïve Ωμέγα 日本語 🙂".encode(), bytes(range(256)) * 3, b"x"):
            (tmp_path / "t").write_bytes(data)
            assert content(tmp_path / "t") == data

    def test_a_folder_is_its_files_in_sorted_order(self, tmp_path):
        for name, data in {"b.txt": "2", "a/z.txt": "1", "c.bin": "3", ".hidden": "x", ".git/HEAD": "x"}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(data)
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        assert content(tmp_path) == b"123"

    def test_the_default_is_the_standard_library_without_its_tests(self):
        text = content()
        assert text == content()
        assert 3e6 < len(text) < 1e8
        assert b"class ChainMap" in text

    def test_what_cannot_be_read_is_named(self, tmp_path):
        (tmp_path / "empty").touch()
        (tmp_path / "folder").mkdir()
        with pytest.raises(ValueError, match="empty has no text"):
            load_text(tmp_path / "empty")
        with pytest.raises(ValueError, match="folder has no text"):
            load_text(tmp_path / "folder")
        with pytest.raises(FileNotFoundError, match="missing does not exist"):
            load_text(tmp_path / "missing")
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ValueError, match="pipe is neither a file nor a folder"):
            load_text(tmp_path / "pipe")


class TestTrainer:
    @pytest.mark.parametrize("activation", ["gelu", "swiglu"])
    def test_the_loss_falls_and_both_curves_agree(self, text, activation):
        model = dataclasses.replace(MODEL, activation=activation)
        config = demo_settings(model, text, steps=25, batch=4, optimizer={"lr": 1e-2})
        plain, fused = ([trainer.step().loss for _ in range(25)] for trainer in _trainers(config))
        assert plain[0] == pytest.approx(math.log(256), rel=0.05)
        assert plain[-1] < 0.65 * plain[0]
        assert fused == pytest.approx(plain, abs=1e-3)

    def test_the_same_run_gives_the_same_losses(self, text):
        config = demo_settings(dataclasses.replace(MODEL, dropout=0.1), text, steps=3, batch=2)
        runs = []
        for _ in range(2):
            trainer = demo_trainer(config)
            runs.append([trainer.step().loss for _ in range(3)])
        assert runs[0] == runs[1]

    def test_bfloat16_trains(self, text):
        config = demo_settings(MODEL, text, steps=8, batch=4, optimizer={"lr": 1e-2}, precision={"dtype": "bf16"})
        for trainer in _trainers(config):
            losses = [trainer.step().loss for _ in range(8)]
            assert losses[-1] < 0.9 * losses[0]
            assert next(trainer.model.parameters()).dtype is torch.float32

    @pytest.mark.parametrize(
        ("change", "key"),
        [
            ({"steps": 0}, "run.steps"),
            ({"batch": 0}, "micro_batch"),
            ({"optimizer": {"lr": 0.0}}, "optimizer.lr"),
            ({"optimizer": {"lr": math.inf}}, "optimizer.lr"),
            ({"run": {"seed": -1}}, "run.seed"),
            ({"precision": {"dtype": "float16"}}, "precision.dtype"),
        ],
    )
    def test_bad_settings_are_named(self, change, key):
        with pytest.raises(ValueError, match=rf"settings: .*{key}"):
            demo_settings(MODEL, **change)

    def test_tokens_are_bytes(self):
        with pytest.raises(ValueError, match="vocab_size must be at least 256"):
            demo_settings(dataclasses.replace(MODEL, vocab_size=255))


@pytest.mark.parametrize(
    "change",
    [
        {"dropout": 0.0, "tied_embeddings": False, "qkv_bias": False},
        {
            "positions": "rotary",
            "activation": "swiglu",
            "norm": "rms_norm",
            "bias": False,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        {"positions": "rotary", "qk_norm": True, "head_dim": 6, "activation": "gelu_exact"},
    ],
)
def test_the_plain_transformer_is_the_same_model(change):
    config = dataclasses.replace(MODEL, **change)
    torch.manual_seed(0)
    ours, plain = Transformer(config).double(), PlainTransformer(config).double()
    plain.load_state_dict(ours.state_dict())
    tokens, targets = torch.randint(256, (2, 9, 3)).unbind()
    torch.testing.assert_close(ours(tokens), plain(tokens), rtol=1e-6, atol=1e-6)  # the angles are fp32
    for model in (ours, plain):
        model(tokens, targets).backward()
    grads = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name].grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m)


def _trainers(config):
    return [demo_trainer(config, kind) for kind in ("plain", "fused")]


def test_a_run_that_dies_is_reported(tmp_path, text):
    others = set(multiprocessing.active_children())  # of other tests, which need them
    with pytest.raises(RuntimeError, match=r"the plain run ended early: .*missing does not exist"):
        train({"plain": demo_settings(MODEL, tmp_path / "missing", steps=2)})
    # Killed, as when the system is out of memory.
    with pytest.raises(RuntimeError, match="the fused run ended early: exit code -9"):
        train(
            {"fused": demo_settings(MODEL, text, steps=2)},
            lambda _: [os.kill(child.pid, signal.SIGKILL) for child in {*multiprocessing.active_children()} - others],
        )
    assert set(multiprocessing.active_children()) <= others


@pytest.mark.runs
def test_command_end_to_end(text, tmp_path):
    """A real process: one table on stdout, lines of progress on stderr, a plot and a JSON file."""
    done, result = run_demo(tmp_path, text, "--steps", "6")
    # torch 2.15 logs a line of its own where it finds nvcc and no GPU.
    begun, *steps = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert begun.startswith("training plain, ") and "6 steps each" in begun
    assert [line.split("  ")[0] for line in steps] == [f"step {step}/6" for step in range(1, 7)]
    for row in (
        "loss at the start",
        "median step time",
        "peak memory",
        "largest loss difference",
        "speed-up",
        "matrix products",
    ):
        assert row in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stdout.endswith(f"written to {tmp_path / 'p.png'} and {tmp_path / 'p.json'}\n")
    assert len(result["matrix_products_seconds"]) == 6
    for name in ALONE:
        assert len(result[name]["losses"]) == len(result[name]["seconds"]) == 6
        assert result[name]["losses"][-1] < result[name]["losses"][0]
    if sys.platform == "linux":
        assert all(2**25 < result[name]["peak_memory_bytes"] < 2**33 for name in ALONE)
    assert result["fused"]["largest_loss_difference"] < 1e-3
    assert result["fused"]["speed_up"] > 0


class TestCommandErrors:
    def run(self, *arguments):
        return CliRunner().invoke(cli.app, [*TINY, *map(str, arguments)])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--text", "missing"], "missing does not exist"),
            (["--text", "empty"], "empty has no text in it"),
            (["--text", "short"], "the text has 5 bytes, but a sequence needs 33"),
            (["--num-heads", "3"], "hidden_size (32) must be a multiple of num_heads (3)"),
            (["--steps", "0"], "run.steps: input should be greater than or equal to 1, got 0"),
            (
                ["--runs", "plain,fast"],
                "--runs: there is no run 'fast'; choose from plain, compiled, fused, ",
            ),
            (["--runs", "plain,plain"], "--runs: plain,plain has one of them twice"),
            (["--dropout", "1"], "dropout must be at least 0 and below 1, got 1.0"),
            (["--lr", "nan"], "optimizer.lr: input should be a finite number, got nan"),
            (["--text", ""], "--text is empty"),
            (["--output", "empty/demo.png"], "--output: empty is a file, where a folder is needed"),
            (["--output", "demo.txt"], "--output must end in .png, .pdf, .svg, got demo.txt"),
            (["--json", "folder"], "--json: folder is a folder; name a file in it"),
            (["--norm", "group_norm"], "norm must be one of 'layer_norm', 'rms_norm', got 'group_norm'"),
            (["--activation", "relu"], "activation must be one of"),
            (["--positions", "none"], "positions must be one of"),
            (["--device", "tpu"], "--device must be auto, cpu or cuda, got 'tpu'"),
            (["--tp", "0"], "tp must be at least 1, got 0"),
            (["--all", "--batch", "3"], r"global_batch must be a multiple of dp * micro_batch (2), got 3"),
            (["--tp", "3"], "model.num_heads is 2, which tp=3 must divide"),
            (["--tp", "2", "--ffn-hidden-size", "5"], "model.ffn_hidden_size is 5, which tp=2 must divide"),
            (
                ["--tp", "2", "--sequence-parallel", "--seq-length", "31"],
                "data.seq_length is 31, which tp * cp (2) must divide",
            ),
            (
                ["--tp", "2", "--cp", "4", "--sequence-parallel", "--seq-length", "36"],
                "data.seq_length is 36, which tp * cp (8) must divide",
            ),
            (["--cp", "0"], "cp must be at least 1, got 0"),
            (["--dtype", "float16"], "--dtype must be one of auto, float32, bfloat16, got 'float16'"),
        ],
    )
    def test_bad_input_is_one_line_and_exit_code_2(self, tmp_path, monkeypatch, arguments, message):
        (tmp_path / "empty").touch()
        (tmp_path / "short").write_text("short")
        (tmp_path / "folder").mkdir()
        monkeypatch.chdir(tmp_path)
        result = self.run(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / "demo.png").exists()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
    def test_no_gpu(self):
        result = self.run("--device", "cuda")
        assert (result.exit_code, result.stderr) == (2, "error: --device cuda: this torch sees no CUDA GPU\n")

    @pytest.mark.parametrize(
        ("error", "code", "message"),
        [(KeyboardInterrupt(), 130, "interrupted"), (RuntimeError("the fused run ended early"), 1, "ended early")],
    )
    def test_a_run_that_stops(self, text, tmp_path, monkeypatch, error, code, message):
        def stop(*_, **__):
            raise error

        monkeypatch.setattr(cli, "train", stop)
        result = self.run("--text", text, "--output", tmp_path / "p.png")
        assert result.exit_code == code
        begun, ended = result.stderr.splitlines()
        assert begun.startswith("training ") and message in ended


class TestReport:
    CONFIG = demo_settings(MODEL, steps=3)

    def runs(self, *losses):
        plain = Run("plain", [5.0, 4.0, 3.0], [0.2, 0.3, 0.9], 2**30)
        return [plain, Run("fused", list(losses), [0.1, 0.2, 0.2], None)]

    def test_comparison(self):
        plain, fused = self.runs(5.0, 4.5, 3.25)
        assert report.loss_difference(plain, fused) == 0.5
        assert report.final_loss(fused) == 3.25
        assert report.final_loss(Run("plain", [9.0] * 18 + [2.0, 3.0])) == 2.5
        assert report.speed_up(plain, fused) == pytest.approx(1.5)  # 0.3 s beside 0.2 s, as in the row above it

    def test_a_loss_that_diverged_is_shown_and_is_valid_json(self, tmp_path):
        runs = self.runs(5.0, math.nan, math.inf)
        result = json.loads(report.as_json(self.CONFIG, runs, Run("products", [], [0.1] * 3)))
        assert result["fused"]["losses"] == [5.0, None, None]
        assert result["fused"]["largest_loss_difference"] is None
        report.plot(self.CONFIG, runs, tmp_path / "p.svg")
        assert (tmp_path / "p.svg").stat().st_size > 1000


@pytest.mark.runs
def test_importing_the_package_imports_none_of_the_extras():
    code = "import sys, parallel_ops, parallel_ops.models, benchmarks.demo.runs\n"
    code += "sys.exit(bool({'typer', 'rich', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
