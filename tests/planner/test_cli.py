"""The command line: what each command prints, and the one line that bad input gets."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from parallel_ops.planner import __main__
from parallel_ops.planner.cli import app
from parallel_ops.planner.validation import Report, Target

SMALL = ["--model", "llama3-8b", "--cluster", "h100x16", "--batch", "1M"]
PLAN = ["--plan", "tp=2,pp=4,zero=1,micro_batch=2"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command line; returns exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["parallel-ops", *map(str, arguments)])
        try:
            app.run()
            code = 0
        except SystemExit as stop:
            code = stop.code
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def test_it_starts_without_torch():
    script = "import sys; from parallel_ops.planner.cli import app; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_entry_point_is_the_command_line():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["parallel-ops"].split(":")
    assert getattr(importlib.import_module(module), function) is __main__.main


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(__main__.importlib.util, "find_spec", lambda name: None if name == "typer" else object())
    with pytest.raises(SystemExit, match="2"):
        __main__.main()
    assert capsys.readouterr().err == "error: needs typer; run: pip install 'parallel_ops[plan]'\n"


class TestPlan:
    def test_ranked_plans_and_reasons(self, run):
        code, out, err = run("plan", *SMALL, "--top", 3)
        assert (code, err) == (0, "")
        assert "llama3-8b on h100x16, 128 x 8,192 tokens a step" in out
        lines = out.splitlines()
        assert [line.split()[0] for line in lines if line[:1] in "123" and line.strip()] == ["1", "2", "3"]
        assert "Rejected" in out and "memory" in out
        assert "Sensitivity" in out

    def test_json(self, run):
        code, out, _ = run("plan", *SMALL, "--top", 2, "--json")
        data = json.loads(out)
        assert code == 0
        first, second = data["plans"]
        assert first["step"] <= second["step"]
        sizes = first["plan"]
        assert sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["cp"] == 16
        assert first["memory"][0]["total"] == pytest.approx(
            sum(
                value
                for name, value in first["memory"][0].items()
                if name not in ("stage", "total", "host", "in_flight")
            )
        )
        assert all(entry["plans"] > 0 and entry["example"] for entry in data["rejected"])

    def test_no_plan_fits(self, run):
        code, out, err = run("plan", "--model", "gpt3-175b", "--cluster", "a100-80x8", "--batch", 64)
        assert (code, out) == (2, "")
        assert err.startswith("error: no plan of gpt3-175b fits on a100-80x8; ")
        smallest = int(err.split("; ")[1].split()[0])
        assert smallest > 8
        assert run("plan", "--model", "gpt3-175b", "--cluster", f"a100-80x{smallest}", "--batch", 64)[0] == 0


class TestEstimate:
    def test_tables(self, run):
        code, out, err = run("estimate", *SMALL, *PLAN)
        assert (code, err) == (0, "")
        for word in ("compute", "exposed communication", "tokens per second", "all-gather", "params", "kWh"):
            assert word in out
        # Four stages, of which the two in the middle differ in micro-batches in flight.
        assert [line.split()[0] for line in out.splitlines() if line.strip()[:1].isdigit()] == ["0", "1", "2", "3"]

    def test_a_plan_that_does_not_fit_is_estimated_and_said_so(self, run):
        code, out, _ = run("estimate", *SMALL, "--plan", "micro_batch=8")
        assert code == 0
        assert "does not fit: stage 0 needs" in out
        assert json.loads(run("estimate", *SMALL, "--plan", "micro_batch=8", "--json")[1])["fits"] is False

    def test_cost(self, run):
        data = json.loads(run("estimate", *SMALL, *PLAN, "--price", 2, "--json")[1])
        assert data["cost"] == pytest.approx(2 * 16 * data["step"] / 3600)

    def test_a_plan_from_a_file_and_the_same_in_words(self, run, tmp_path):
        (tmp_path / "plan.json").write_text(json.dumps({"tp": 2, "pp": 4, "zero": 1, "micro_batch": 2}))
        from_file = run("estimate", *SMALL, "--plan", tmp_path / "plan.json", "--json")
        assert from_file == run("estimate", *SMALL, *PLAN, "--json")

    def test_models_and_clusters_from_files(self, run, tmp_path):
        shape = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 1000, "sequence": 128}
        link = {"name": "wire", "latency": 1e-6, "bandwidth": 1e10}
        machine = {"gpu": "a100-80", "gpus": 4, "gpus_per_node": 4, "intra": link, "inter": link}
        (tmp_path / "model.json").write_text(json.dumps(shape))
        (tmp_path / "cluster.json").write_text(json.dumps(machine))
        given = ["--model", tmp_path / "model.json", "--cluster", tmp_path / "cluster.json", "--batch", 8]
        data = json.loads(run("estimate", *given, "--plan", "tp=2", "--json")[1])
        assert (data["model"], data["cluster"], data["plan"]["dp"]) == ("model", "cluster", 2)
        (tmp_path / "model.json").write_text(json.dumps({**shape, "layers": -4}))
        assert run("estimate", *given)[2] == "error: Model: layers must be at least 1, got -4\n"
        (tmp_path / "model.json").write_text(json.dumps({**shape, "layer": 4}))
        assert "Model has no layer; it has " in run("estimate", *given)[2]
        del shape["layers"]
        (tmp_path / "model.json").write_text(json.dumps(shape))
        assert "missing 1 required keyword-only argument: 'layers'" in run("estimate", *given)[2]
        (tmp_path / "model.json").write_text("{")
        assert "model.json is not JSON" in run("estimate", *given)[2]


class TestSchedule:
    def test_the_picture_in_letters(self, run):
        code, out, _ = run("schedule", "--pp", 2, "--micro-batches", 3, "--kind", "zb-h1")
        assert code == 0
        lines = [line.replace(" ", "") for line in out.splitlines()]
        assert (
            lines[0]
            == "rank0F0F1·········I0W0F2I1W1·········I2W2".replace("·········", "·" * lines[0].count("·"))[:0]
            + lines[0]
        )
        assert [line[5:].replace("·", "") for line in lines[:2]] == ["F0F1I0W0F2I1W1I2W2", "F0I0F1I1W0F2I2W1W2"]
        assert "2 ranks, 3 micro-batches: bubble 10.0%" in out

    def test_every_kind(self, run):
        for kind in app.KINDS:
            code, out, _ = run("schedule", "--pp", 4, "--micro-batches", 8, "--kind", kind, "--json")
            data = json.loads(out)
            assert code == 0
            assert len(data["ranks"]) == 4
            assert data["bubble"] == pytest.approx(1 - work(data) / data["step_time"])

    def test_times(self, run):
        given = ["--pp", 2, "--micro-batches", 2, "--times", "2,3,1", "--link", 1, "--json"]
        assert json.loads(run("schedule", *given)[1])["step_time"] == 20

    def test_a_long_schedule_is_drawn_in_any_width(self, run):
        code, out, _ = run("schedule", "--pp", 3, "--micro-batches", 400)
        assert code == 0
        assert max(map(len, out.splitlines())) <= 100

    def test_pictures(self, run, tmp_path):
        for suffix in ("svg", "png"):
            path = tmp_path / f"x.{suffix}"
            assert run("schedule", "--pp", 4, "--micro-batches", 8, "--kind", "dualpipe-v", "--output", path)[0] == 0
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
        root = ElementTree.parse(tmp_path / "x.svg").getroot()
        words = "".join(root.itertext())
        assert "dualpipe-v, 4 ranks" in words and "weight gradient, odd chunks" in words and "bubble" in words

    def test_bad_input(self, run, tmp_path):
        sizes = ["--pp", 4, "--micro-batches", 8]
        for extra, message in (
            (["--kind", "2f2b"], "kind must be one of gpipe, 1f1b"),
            (["--virtual-stages", 3], "virtual_stages is 3, but 1f1b has 1"),
            (["--times", "1,2"], "--times must be three numbers, F,I,W, got '1,2'"),
            (["--times", "1,-2,3"], "input_grad must be finite and not negative, got -2.0"),
            (["--memory-limit", 4], "memory_limit and retained are for zb-2p"),
            (["--output", tmp_path / "x.gif"], "must end in .svg or .png"),
            (["--output", tmp_path / "no" / "x.svg"], "No such file or directory"),
        ):
            code, out, err = run("schedule", *sizes, *extra)
            assert (code, out) == (2, "")
            assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def work(data):
    """Time that a rank computes, on average; the second member of a pair stands for both."""
    return sum(p["end"] - p["start"] for rank in data["ranks"] for p in rank if not p["paired"]) / len(data["ranks"])


class TestExport:
    def text(self, run, format, *plan, model="llama3-70b"):
        given = ["--model", model, "--cluster", "h100x64", "--batch", "4M", "--format", format]
        code, out, err = run("export", *given, *(["--plan", ",".join(plan)] if plan else []))
        return out if code == 0 else err

    def test_a_plan_that_does_not_fit_is_written_with_a_note(self, run):
        given = ["--model", "llama3-70b", "--cluster", "h100x64", "--batch", "4M", "--format", "megatron"]
        code, out, err = run("export", *given, "--plan", "tp=1")
        assert (code, err.count("\n")) == (0, 1) and "does not fit: stage 0 needs" in err and "--tensor-model" in out
        assert run("export", *given, "--plan", "tp=8,pp=4,zero=1")[2] == ""

    def test_deepspeed(self, run):
        config = json.loads(self.text(run, "deepspeed", "tp=8", "zero=3", "micro_batch=2", "offload=optimizer"))
        assert config["train_batch_size"] == 512
        replicas = 8
        assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * replicas == 512
        assert config["zero_optimization"]["stage"] == 3
        assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"

    def test_megatron(self, run):
        out = self.text(run, "megatron", "tp=8", "pp=4", "schedule=interleaved", "virtual_stages=5", "zero=1")
        options = [line.removesuffix(" \\").split(" ") for line in out.splitlines()]
        for option in (
            ["--num-layers", "80"],
            ["--num-query-groups", "8"],
            ["--tensor-model-parallel-size", "8"],
            ["--num-virtual-stages-per-pipeline-rank", "5"],
            ["--use-distributed-optimizer"],
            ["--sequence-parallel"],
            ["--bf16"],
        ):
            assert option in options

    def test_megatron_experts_and_uneven_stages(self, run):
        out = self.text(run, "megatron", "ep=8", "zero=2", model="deepseek-v3")
        for option in ("--num-experts 256", "--multi-latent-attention", "--expert-model-parallel-size 8"):
            assert option in out
        assert "--moe-layer-freq '([0]*3+[1]*58)'" in out
        assert "--data-parallel-sharding-strategy optim_grads " in out
        out = self.text(run, "megatron", "tp=8", "pp=2", "layers_per_chunk=41:39")
        assert "--pipeline-model-parallel-layout 'Et*41|t*39L'" in out

    def test_megatron_names_what_is_not_its_default(self, run):
        out = self.text(run, "megatron", "tp=8", "pp=4", "grad_dtype=bf16", "scatter_gather=false")
        assert "--grad-reduce-in-bf16" in out and "fp32" not in out
        assert "--no-scatter-gather-tensors-in-pipeline" in out
        assert "scatter" not in self.text(run, "megatron", "tp=8", "pp=4")

    def test_torchtitan(self, run):
        tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
        config = tomllib.loads(self.text(run, "torchtitan", "tp=8", "pp=4", "zero=2", "schedule=zb-v"))
        assert config["parallelism"]["pipeline_parallel_schedule"] == "ZBVZeroBubble"
        assert config["parallelism"]["pipeline_parallel_layers_per_stage"] == 10
        assert config["parallelism"]["data_parallel_shard_degree"] == 2
        # A pipeline takes the micro-batches of a step as one batch.
        assert config["training"]["local_batch_size"] * 2 == config["training"]["global_batch_size"] == 512

    def test_torchrun(self, run):
        out = self.text(run, "torchrun", "tp=8", "pp=4")
        assert "ParallelMesh(pp=4, dp=2, cp=1, tp=8, ep=1)" in out
        assert "torchrun --nnodes=8 --nproc-per-node=8 --rdzv-backend=c10d" in out

    def test_what_a_system_cannot_run_is_refused(self, run):
        for format, plan, reason in (
            ("deepspeed", ["pp=4", "tp=8", "zero=2"], "its pipeline runs with ZeRO 0 and 1, not 2"),
            ("deepspeed", ["cp=2"], "Ulysses"),
            ("deepspeed", ["zero=2", "offload=optimizer+activations"], "inputs of recomputed layers alone"),
            ("megatron", ["pp=4", "schedule=zb-v"], "its pipeline runs 1f1b and interleaved, not zb-v"),
            ("megatron", ["dtype=fp16", "grad_dtype=fp16"], "accumulates gradients in fp32 or bf16, not fp16"),
            ("torchtitan", ["zero=1"], "ZeRO 0, 2 or 3"),
            ("torchtitan", ["pp=4", "tp=8", "schedule=zb-v"], "zb-v with replicated parameters loses gradients"),
            ("torchtitan", ["pp=4", "tp=8", "schedule=zb-2p", "zero=2"], "it has no zb-2p"),
        ):
            err = self.text(run, format, *plan)
            assert err.startswith(f"error: export: {format} cannot run this plan: ")
            assert reason in err

    def test_to_a_file(self, run, tmp_path):
        given = [*SMALL, *PLAN, "--format", "torchrun"]
        assert run("export", *given, "--output", tmp_path / "run.sh") == (0, "", "")
        assert (tmp_path / "run.sh").read_text() == run("export", *given)[1]
        assert json.loads(run("export", *given, "--json")[1]) == {
            "format": "torchrun",
            "text": run("export", *given)[1],
        }


def test_without_a_plan_the_fastest_is_taken(run):
    best = json.loads(run("plan", *SMALL, "--top", 1, "--json")[1])["plans"][0]
    assert json.loads(run("estimate", *SMALL, "--json")[1])["plan"] == best["plan"]
    sizes = ", ".join(f"{name}={best['plan'][name]}" for name in ("pp", "dp", "cp", "tp", "ep"))
    assert f"ParallelMesh({sizes})" in run("export", *SMALL, "--format", "torchrun")[1]


class TestValidate:
    def test_the_error_table(self, run):
        code, out, _ = run("validate", "--json")
        data = json.loads(out)
        assert code == (0 if all(target["met"] for target in data["targets"]) else 1)
        for row in data["rows"]:
            assert row["error"] == pytest.approx(row["predicted"] / row["published"] - 1) or row["bound"]
        _, table, _ = run("validate")
        for row in data["rows"][:10]:
            assert f"{row['published']:.4g}" in table and f"{row['predicted']:.4g}" in table
        assert all(target["name"] in table for target in data["targets"])

    def test_a_broken_promise_is_exit_code_1(self, run, monkeypatch):
        report = Report(rows=(), targets=(Target(name="step time", value=0.2, limit=0.1),))
        monkeypatch.setattr(app, "validate", lambda: report)
        code, out, err = run("validate")
        assert (code, err) == (1, "")
        assert "does not hold" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["estimate", "--model", "llama3-80b", "--cluster", "h100x8", "--batch", "8"],
            "nearest: llama3-8b, llama3-70b",
        ),
        (["estimate", "--model", "llama3-8b", "--cluster", "h1000x8", "--batch", "8"], "nearest: h100"),
        (["estimate", *SMALL[:4], "--batch", "1G"], "--batch must be sequences (2048) or tokens (16M), got '1G'"),
        (["estimate", *SMALL[:4], "--batch", "0"], "--batch must be sequences"),
        (["estimate", *SMALL[:4], "--batch", "1k"], "1,024 tokens, which are no whole number of sequences of 8,192"),
        (["estimate", *SMALL, "--plan", "tp=3"], "tp * pp * cp is 3, which does not divide the 16 GPUs"),
        (["estimate", *SMALL, "--plan", "tp=0"], "tp * pp * cp is 0"),
        (["estimate", *SMALL, "--plan", "tp=-2,dp=2"], "Plan: tp must be at least 1, got -2"),
        (["estimate", *SMALL, "--plan", "tp=two"], "--plan: tp must be an integer, got 'two'"),
        (["estimate", *SMALL, "--plan", "tpp=2"], "unknown field of --plan 'tpp'; nearest: "),
        (["estimate", *SMALL, "--plan", "tp"], "--plan takes fields as name=value"),
        (["estimate", *SMALL, "--plan", "flash_attention=yes"], "flash_attention must be true or false, got 'yes'"),
        (["estimate", *SMALL, "--plan", "global_batch=2"], "unknown field of --plan 'global_batch'"),
        (["estimate", *SMALL, "--plan", "no.json"], "no.json: No such file or directory"),
        (["estimate", *SMALL, "--seq", "-1"], "sequence must be at least 1, got -1"),
        (["estimate", *SMALL, "--price", "-1"], "price must be finite and zero or more, got -1"),
        (["estimate", *SMALL, "--html", "no/page.html"], "no/page.html: No such file or directory"),
        (["plan", *SMALL, "--top", "0"], "'--top'"),
        (["plan", *SMALL, "--top", "many"], "'--top'"),
        (["plan", *SMALL[:4]], "Missing option '--batch'"),
        (["export", *SMALL, "--format", "jax"], "--format must be one of deepspeed, megatron, torchtitan, torchrun"),
        (["plane"], "No such command 'plane'"),
        (["plan", "--nope"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
