"""The command line: what each command prints, and the one line that bad input gets."""

import importlib
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from parallel_ops import __main__
from parallel_ops.planner import RULES, presets
from parallel_ops.planner.compute.software import CURRENT, eras
from support.planning.planner_cli import PLAN, SMALL


def test_it_starts_without_torch():
    script = "import sys; from parallel_ops._commands import app; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_entry_point_is_the_command_line():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["parallel-ops"].split(":")
    assert getattr(importlib.import_module(module), function) is __main__.main


class TestPlan:
    def test_ranked_plans_and_reasons(self, run):
        code, out, err = run("plan", *SMALL, "--top", 3)
        assert (code, err) == (0, "")
        heading = "llama3-8b on h100x16 (16 GPUs), 128 x 8,192 tokens a step, times with the software of"
        assert heading in out and f"Times are of {CURRENT}" in out
        lines = out.splitlines()
        rows = [line for line in lines if line.strip()[:1].isdigit() and "GiB   " in line]
        assert [row.split()[0].rstrip("=") for row in rows] == ["1", "2", "3"]
        assert "--only dtype=bf16:fp8" in out
        assert "Plans that cannot run" in out and "memory" in out
        assert "matmul: " in out and "of the step time between -20 % and +20 %" in out

    def test_a_price_gives_a_cost(self, run):
        few = ["plan", *SMALL, "--only", "zero=1,schedule=1f1b,micro_batch=1", "--price", 2]
        cost = json.loads(run(*few, "--json")[1])["plans"][0]["cost"]
        million = cost / (128 * 8192 / 1e6)
        assert f"a step {cost:,.2f}, a million tokens in the loss {million:,.4f}." in run(*few)[1]

    def test_every_figure_has_its_band_and_ties_are_said(self, run):
        few = ["plan", *SMALL, "--only", "zero=1,schedule=1f1b:zb-v,micro_batch=1:2"]
        data = json.loads(run(*few, "--json")[1])
        out = run(*few)[1]
        band, steps = data["plans"][0]["error_band"], [plan["step"] for plan in data["plans"]]
        assert data["ties"] == sum(step <= steps[0] * (1 + band["time"] / 2) for step in steps) > 1
        rows = [line for line in out.splitlines() if line.strip()[:1].isdigit() and " s " in line]
        assert [row.split()[0].endswith("=") for row in rows] == [n < data["ties"] for n in range(len(rows))]
        assert all(f"{band['time']:.0%}" in row and f"{band['memory']:.0%}" in row for row in rows)
        assert f"The {data['ties']} plans marked =" in " ".join(out.split())
        few[-1] += ",dtype=bf16:fp8"
        first = json.loads(run(*few, "--json", "--top", 1)[1])["plans"][0]
        assert first["plan"]["dtype"] == "fp8" and first["step"] < steps[0]
        assert "fp8, " in run(*few)[1] and "--only dtype" not in run(*few)[1]
        estimated = run("estimate", *SMALL, *PLAN)[1]
        assert f"{band['time']:.0%}" in next(line for line in estimated.splitlines() if "tokens per second" in line)

    def test_only_what_a_system_can_run_and_only_what_is_asked_for(self, run, tmp_path):
        given = ["plan", *SMALL, "--for", "megatron", "--only", "pp=2:4,schedule=1f1b:zb-v,zero=1,grad_dtype=bf16"]
        data = json.loads(run(*given, "--json", "--output", tmp_path / "run.sh")[1])
        plans = [entry["plan"] for entry in data["plans"]]
        assert {plan["schedule"] for plan in plans} == {"1f1b"}
        assert {plan["pp"] for plan in plans} <= {2, 4} and {plan["zero"] for plan in plans} == {1}
        assert {plan["grad_dtype"] for plan in plans} == {"bf16"} and not any(plan["fused_loss"] for plan in plans)
        assert f"--pipeline-model-parallel-size {plans[0]['pp']}" in (tmp_path / "run.sh").read_text()

    def test_json(self, run):
        code, out, _ = run("plan", *SMALL, "--top", 2, "--json")
        data = json.loads(out)
        assert code == 0
        first, second = data["plans"]
        assert first["step"] <= 1.02 * second["step"]
        sizes = first["plan"]
        assert sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["cp"] == 16
        assert first["memory"][0]["total"] == pytest.approx(
            sum(
                value
                for name, value in first["memory"][0].items()
                if name not in ("stage", "total", "host", "in_flight")
            )
        )
        assert data["schema"] == 1 and first["fits"] is True
        assert all(entry["plans"] > 0 and entry["example"] for entry in data["rejected"])
        for entry in data["rejected"]:
            assert (
                entry["reason"]
                and entry["plan"]["dp"] >= 1
                and (entry["excess"] > 0) == entry["kind"].startswith("memory")
            )
        assert {"flops", "bandwidth", "intra", "inter", "gpus"} <= {entry["resource"] for entry in data["gains"]}
        assert all(entry["more"] > 0 < entry["step"] for entry in data["gains"])
        assert all({"constant", "seconds"} <= set(entry) for entry in data["sensitivity"])

    def test_no_plan_fits(self, run):
        given = ["--model", "gpt3-175b", "--cluster", "a100-80x8", "--batch", 64]
        code, out, err = run("plan", *given)
        assert (code, out) == (1, "")
        assert (
            run("estimate", *given) == run("estimate", *given, "--for", "torchrun", "--output", "-") == (code, out, err)
        )
        assert err.startswith("error: no plan of gpt3-175b fits on a100-80x8; ")
        smallest = int(err.split("; ")[1].split()[0])
        assert smallest > 8
        assert run("plan", "--model", "gpt3-175b", "--cluster", f"a100-80x{smallest}", "--batch", 64)[0] == 0


def test_a_heading_counts_the_gpus_of_a_cluster_without_a_number(run):
    out = run("estimate", "--model", "llama3-8b", "--cluster", "h100", "--batch", "64", "--plan", "tp=2,zero=1")[1]
    assert out.startswith("llama3-8b on h100 (8 GPUs), 64 x 8,192 tokens a step, times with the software of ")
    one = run("estimate", "--model", "qwen3-0.6b", "--cluster", "h100x1", "--batch", "4", "--plan", "dp=1")[1]
    assert "h100x1 (1 GPU), " in one


def test_the_names_that_commands_take_are_listed(run):
    code, out, err = run("presets", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "") and "llama3-70b" in found["models"] and "h100" in found["gpus"]
    assert tuple(found["clusters"]) == presets.clusters() and tuple(found["software"]) == eras()
    shown = run("presets")[1]
    assert all(name in shown for names in found.values() for name in names)


def test_software_is_that_of_the_system(run):
    for given, software in ((["--for", "torchtitan"], "torchtitan-2025"), (["--for", "torchrun"], CURRENT)):
        assert json.loads(run("estimate", *SMALL, *given, "--plan", "zero=3", "--json")[1])["software"] == software


class TestEstimate:
    def test_tables(self, run):
        code, out, err = run("estimate", *SMALL, *PLAN)
        assert (code, err) == (0, "")
        for word in ("compute", "exposed communication", "tokens per second", "all-gather", "params", "kWh"):
            assert word in out
        # Four stages, of which the two in the middle differ in micro-batches in flight.
        assert [line.split()[0] for line in out.splitlines() if line.strip()[:1].isdigit()] == ["0", "1", "2", "3"]

    def test_a_plan_that_does_not_fit_is_estimated_and_said_so(self, run):
        code, out, err = run("estimate", *SMALL, "--plan", "micro_batch=8")
        assert (code, err) == (1, "")
        assert "tokens per second" in out and "does not fit: stage 0 needs" in out
        code, out, _ = run("estimate", *SMALL, "--plan", "micro_batch=8", "--json")
        assert (code, json.loads(out)["fits"]) == (1, False)

    def test_rules_of_thumb_are_in_words(self, run):
        code, out, _ = run("estimate", *SMALL, "--plan", "tp=8,pp=2,sequence_parallel=false,recompute=full")
        assert code == 0
        rules = out.partition("Rules of thumb broken\n")[2].splitlines()
        assert "PP 1 with twice the DP would fit too" in rules
        assert "TP 8 without sequence parallelism keeps activations that could be sharded" in rules
        assert not any(name in out for name in RULES)

    def test_a_run_of_minutes_is_no_zero(self, run):
        out = run("estimate", *SMALL, *PLAN, "--run", "20M", "--price", 2)[1]
        rows = dict(line.rsplit(maxsplit=1) for line in out.splitlines() if len(line.split()) > 1)
        assert 0 < float(rows["hours"]) < 24 and 0 < float(rows["GPU hours"]) < 100

    def test_cost(self, run):
        data = json.loads(run("estimate", *SMALL, *PLAN, "--price", 2, "--json")[1])
        assert data["cost"] == pytest.approx(2 * 16 * data["step"] / 3600)

    def test_a_plan_from_a_file_and_the_same_in_words(self, run, tmp_path):
        (tmp_path / "plan.json").write_text(json.dumps({"tp": 2, "pp": 4, "zero": 1, "micro_batch": 2}))
        from_file = run("estimate", *SMALL, "--plan", tmp_path / "plan.json", "--json")
        assert from_file == run("estimate", *SMALL, *PLAN, "--json")
        (tmp_path / "plan.json").write_text(json.dumps({"tp": 2, "pp": 4, "layers_per_chunk": [9, 8, 8, 7]}))
        from_file = run("estimate", *SMALL, "--plan", tmp_path / "plan.json", "--json")
        assert from_file == run("estimate", *SMALL, "--plan", "tp=2,pp=4,layers_per_chunk=9:8:8:7", "--json")

    def test_models_and_clusters_from_files(self, run, tmp_path):
        shape = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "vocab_size": 1000, "seq_length": 128}
        link = {"name": "wire", "latency": 1e-6, "bandwidth": 1e10}
        machine = {"gpu": "a100-80", "gpus": 4, "gpus_per_node": 4, "intra": link, "inter": link}
        (tmp_path / "model.json").write_text(json.dumps(shape))
        (tmp_path / "cluster.json").write_text(json.dumps(machine))
        given = ["--model", tmp_path / "model.json", "--cluster", tmp_path / "cluster.json", "--batch", 8]
        data = json.loads(run("estimate", *given, "--plan", "tp=2", "--json")[1])
        assert (data["model"], data["cluster"], data["plan"]["dp"]) == ("model", "cluster", 2)
        (tmp_path / "model.json").write_text(json.dumps(shape), encoding="utf-8-sig")  # as Windows' editors do
        assert json.loads(run("estimate", *given, "--plan", "tp=2", "--json")[1]) == data
        for name, text in (("deep.json", "[" * 10**5), ("deep.toml", "a = " + "[" * 10**5)):
            (tmp_path / name).write_text(text)
            err = run("estimate", *given, "--plan", tmp_path / name)[2]
            assert f"{name} is not {name[5:].upper()}: maximum recursion" in err
        (tmp_path / "model.json").write_text(json.dumps({**shape, "num_layers": -4}))
        assert run("estimate", *given)[2] == "error: Model: num_layers must be at least 1, got -4\n"
        (tmp_path / "model.json").write_text(json.dumps({**shape, "layer": 4}))
        assert "Model has no layer; it has " in run("estimate", *given)[2]
        del shape["num_layers"]
        (tmp_path / "model.json").write_text(json.dumps(shape))
        assert "missing 1 required keyword-only argument: 'num_layers'" in run("estimate", *given)[2]
        (tmp_path / "model.json").write_text("{")
        assert "model.json is not JSON" in run("estimate", *given)[2]


def test_without_a_plan_the_fastest_is_taken(run):
    best = json.loads(run("plan", *SMALL, "--top", 1, "--json")[1])["plans"][0]
    assert json.loads(run("estimate", *SMALL, "--json")[1])["plan"] == best["plan"]
    sizes = ", ".join(f"{name}={best['plan'][name]}" for name in ("cp", "tp", "ep"))
    assert f"{sizes})" in run("estimate", *SMALL, "--for", "torchrun", "--output", "-")[1]


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
        (["estimate", *SMALL[:4], "--batch", "1k"], "1,024 tokens, not a whole number of sequences of 8,192"),
        (["estimate", *SMALL, "--plan", "tp=3"], "tp * pp * cp is 3, which does not divide the 16 GPUs"),
        (["estimate", *SMALL, "--plan", "tp=0"], "--plan: tp must be at least 1, got 0"),
        (["estimate", *SMALL, "--plan", "tp=-8"], "--plan: tp must be at least 1, got -8"),
        (["estimate", *SMALL, "--plan", "pp=2,schedule=zbv"], "got 'zbv'; did you mean 'zb-v'?"),
        (["plan", *SMALL, "--only", "pp=2,schedule=zbv"], "got 'zbv'; did you mean 'zb-v'?"),
        (["plan", *SMALL, "--only", "pp=0"], "--only: pp must be at least 1, got 0"),
        (["plan", *SMALL, "--only", "grad_dtype=fp32:bf61"], "got 'bf61'; did you mean 'bf16'?"),
        (["plan", *SMALL, "--only", "overlap=true:false"], "--only: overlap takes one value, got True:False"),
        (["plan", *SMALL, "--only", "shedule=1f1b"], "unknown field of --only 'shedule'; nearest: schedule"),
        (["plan", *SMALL, "--for", "megatorn"], "unknown system 'megatorn'; nearest: megatron"),
        (
            ["plan", *SMALL, "--for", "megatron", "--only", "schedule=zb-v"],
            "megatron: its pipeline runs 1f1b and interleaved, not schedule=zb-v",
        ),
        (["plan", *SMALL, "--output", "run.sh"], "--output writes the plan for a system; name it with --for"),
        (["estimate", *SMALL, "--plan", "tp=two"], "--plan: tp must be an integer, got 'two'"),
        (["estimate", *SMALL, "--plan", "tpp=2"], "unknown field of --plan 'tpp'; nearest: "),
        (["estimate", *SMALL, "--plan", "tp"], "--plan takes fields as name=value"),
        (["estimate", *SMALL, "--plan", "flash_attention=yes"], "flash_attention must be true or false, got 'yes'"),
        (["estimate", *SMALL, "--plan", "global_batch=2"], "unknown field of --plan 'global_batch'"),
        (["estimate", *SMALL, "--plan", "no.json"], "no.json: No such file or directory"),
        (["estimate", *SMALL, "--seq", "-1"], "seq_length must be at least 1, got -1"),
        (["estimate", *SMALL, *PLAN, "--prices", "no.json"], "--prices is for the costs of --run"),
        (["estimate", *SMALL, *PLAN, "--run", ""], "--run: tokens must be a number such as 15T, got ''"),
        (["estimate", *SMALL, "--price", "-1"], "price must be finite and zero or more, got -1"),
        (
            ["estimate", *SMALL, *PLAN, "--for", "torchrun", "--output", "no/run.sh"],
            "no/run.sh: No such file or directory",
        ),
        (["plan", *SMALL, "--top", "0"], "'--top'"),
        (["plan", *SMALL, "--top", "many"], "'--top'"),
        (["plan", *SMALL[:4]], "Missing option '--batch'"),
        (["estimate", *SMALL, *PLAN, "--for", "jax"], "unknown system 'jax'; known: deepspeed, megatron"),
        (["config", *SMALL, "--format", "megatron"], "estimate --plan FIELDS --for SYSTEM --output FILE"),
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


def test_runs_of_ones_own_as_json(run, tmp_path):
    lines = (files("parallel_ops.planner.validation") / "runs/deepspeed_a800.csv").read_text().splitlines()
    (tmp_path / "mine.csv").write_text("\n".join(lines[1:3]))
    code, out, err = run("validate", "--runs", tmp_path / "mine.csv", "--json")
    (found,) = json.loads(out)
    assert (code, err) == (0, "") and found.keys() == {"table", "run", "measured", "predicted", "band"}
    assert 0 < found["predicted"] < 10 * found["measured"]
    (tmp_path / "none.csv").write_text("")
    code, out, err = run("validate", "--runs", tmp_path / "none.csv")
    assert (code, out) == (2, "") and err.endswith("none.csv has no runs in it\n")


def test_a_reader_that_has_seen_enough_is_no_error():
    """``parallel-ops ... | head -1``."""
    script = "import sys; from parallel_ops.planner.cli import app; app.main()"
    for command in (["estimate", *SMALL, *PLAN, "--json"], ["estimate", *SMALL, *PLAN]):
        process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_too_many_gpus_for_a_batch_says_so(run):
    code, _, err = run("plan", "--model", "llama3-8b", "--cluster", "h100x1000000", "--batch", 128, "--only", "tp=8")
    assert code == 1
    assert "no plan of llama3-8b runs on all 1,000,000 GPUs of h100x1000000, mostly since " in err
