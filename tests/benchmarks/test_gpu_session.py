"""The session script with a stand-in for Python, which notes its arguments, fails and takes too long."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_session import capture

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/gpu_session.sh"
CALLS = {
    "1": ["machine", "build", "nccl", "pipelines"],
    "2": ["machine", "build", "nccl", "parallel", "beside", "kernels"],
    "3": ["machine", "build", "tests", "sanitizer", "attention", "memory", "host_time"],
}
STEPS = [*CALLS["1"], *CALLS["2"][3:], *CALLS["3"][2:]]
MORE = ["training", "compile", "models", "overlap", "graphs"]
STAND_IN = """#!/usr/bin/env bash
echo "ran: $*"
case "$*" in
  *"prove parallel"*) exit 3 ;;
  *"prove beside"*) exec sleep 60 ;;
  *"--no-composites"*) echo row >"$OUTPUT/a-gpu.csv" ;;
  *"benchmarks host_time"*) head -c "${LOG_BYTES:-10}" /dev/urandom | base64 -w 100 ;;
esac
"""

bash = pytest.mark.skipif(shutil.which("bash") is None or shutil.which("timeout") is None, reason="needs bash")


def session(tmp_path, *arguments, script=SCRIPT, **environment):
    stand_in, output = tmp_path / "python", tmp_path / "out"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    environment = {"OUTPUT": str(output), "BESIDE_LIMIT": "1", "BUILD_FOLDER": str(tmp_path / "build"), **environment}
    ran = subprocess.run(
        ["bash", str(script), str(output), *arguments],
        check=False, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHON": str(stand_in), **environment},
    )  # fmt: skip
    return ran, output


def logs(output):
    with tarfile.open(output / "results.tar.gz") as archive:
        members = [m for m in archive.getmembers() if m.isfile()]
        return {m.name.removeprefix("./"): archive.extractfile(m).read() for m in members}


@bash
def test_a_failing_and_a_slow_step_do_not_keep_the_next_from_running(tmp_path):
    ran, output = session(tmp_path)
    verdicts = ran.stdout.strip().rpartition("\n\n")[2].splitlines()
    found = dict(re.fullmatch(r"(\w+) +\d+ s  (.*)", line).groups() for line in verdicts)
    assert list(found) == STEPS
    assert found.pop("parallel") == "FAILED, exit 3" and found.pop("beside") == "TIME LIMIT of 1 s"
    assert found.pop("sanitizer") == "FAILED, exit 127"  # it is not here
    assert set(found.values()) == {"passed"}
    assert ran.returncode == 1 and (output / "summary.txt").read_text().endswith(verdicts[-1] + "\n")
    assert sorted(os.listdir(output)) == ["results.tar.gz", "summary.txt"]
    packed = logs(output)
    assert {"a-gpu.csv", *(f"{name}.log" for name in STEPS)} == set(packed)
    assert b"ran: -m benchmarks flash_attention --device cuda" in packed["attention.log"]
    assert b"ran: -m benchmarks.gpu_session.attention_choice" in packed["attention.log"]


@bash
def test_steps_can_be_run_alone(tmp_path):
    ran, _ = session(tmp_path, STEPS="attention")
    assert ran.returncode == 0
    assert re.findall(r"^== (\w+)$", ran.stdout, re.MULTILINE) == ["attention"]


@bash
@pytest.mark.parametrize("call", CALLS)
def test_the_three_calls(tmp_path, call):
    ran, output = session(tmp_path, CALL=call)
    assert re.findall(r"^== (\w+)$", ran.stdout, re.MULTILINE) == CALLS[call]
    assert sorted(os.listdir(output)) == ["results.tar.gz", "summary.txt"]
    limits = dict(re.findall(r"\[(\w+)\]=(\d+)", SCRIPT.read_text()))
    assert set(limits) == {*STEPS, *MORE}
    # Each step may take ten seconds more to die.
    assert sum(int(limits[name]) + 10 for name in CALLS[call]) <= 540


@bash
def test_results_are_at_most_eight_megabytes(tmp_path):
    """The ends of long logs are kept."""
    _, output = session(tmp_path, STEPS="memory host_time", LOG_BYTES="30000000")
    assert (output / "results.tar.gz").stat().st_size <= 8_000_000
    assert len(logs(output)["host_time.log"]) == 1_000_000
    packed = SCRIPT.read_text().replace("pack 1000000", "pack 20000000")
    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks/gpu_session.sh"
    script.write_text(packed)
    ran, _ = session(tmp_path, script=script, STEPS="memory host_time", LOG_BYTES="30000000")
    assert ran.returncode == 0
    assert set(logs(output)) == {"a-gpu.csv", "memory.log", "host_time.log"}
    assert (output / "results.tar.gz").stat().st_size <= 8_000_000


@bash
def test_what_was_built_is_kept_while_sources_are_the_same(tmp_path):
    (tmp_path / "build/site").mkdir(parents=True)  # the stand-in builds nothing
    for expected in (False, True):
        _, output = session(tmp_path, STEPS="build")
        assert (b"as built before" in logs(output)["build.log"]) == expected
        (tmp_path / "build/site").mkdir(exist_ok=True)
    (tmp_path / "build/site.digest").write_text("another")
    _, output = session(tmp_path, STEPS="build")
    assert b"as built before" not in logs(output)["build.log"]


@bash
@pytest.mark.parametrize("given", ["library", "source", "nothing"])
def test_an_nccl_of_its_own(tmp_path, given):
    """Its sources are built, or a library is taken, and loaded before torch's own."""
    (tmp_path / "library").write_text("a library")
    source = tmp_path / "source"
    source.mkdir()
    (source / "Makefile").write_text("src.build:\n\tcp ../../../library $(BUILDDIR)/lib/libnccl.so.2\n")
    with tarfile.open(tmp_path / "source.tgz", "w:gz") as archive:
        archive.add(source / "Makefile", "Makefile")
    variables = {
        "library": {"NCCL_LIBRARY": str(tmp_path / "library")}, "source": {"NCCL_SOURCE": str(tmp_path / "source.tgz")},
        "nothing": {},
    }  # fmt: skip
    ran, output = session(tmp_path, STEPS="nccl pipelines", **variables[given])
    assert ran.returncode == 0, ran.stdout
    library = tmp_path / "build/nccl/lib/libnccl.so.2"
    assert library.exists() == (given != "nothing")
    assert b"gpu_session.prove pipelines --device cuda" in logs(output)["pipelines.log"]


@bash
def test_bad_arguments_are_refused(tmp_path):
    ran, _ = session(tmp_path, CALL="4")
    assert ran.returncode == 2 and "CALL must be 1, 2 or 3" in ran.stderr
    ran, _ = session(tmp_path, "--shapes")
    assert ran.returncode == 2 and "usage" in ran.stderr
    ran, _ = session(tmp_path, STEPS="attention nothing")
    assert ran.returncode == 1 and "unknown step nothing" in ran.stderr


def test_it_names_tests_and_modules_that_exist():
    text = SCRIPT.read_text()
    named = re.findall(r"tests/[\w/]+", text)
    assert len(named) >= 2
    assert all((ROOT / name).exists() or (ROOT / f"{name}.py").exists() for name in named)
    modules = re.findall(r"-m (benchmarks\.[\w.]+)", text)
    assert len(modules) == 4
    places = [ROOT / name.replace(".", "/") for name in modules]
    assert all(place.is_dir() or place.with_suffix(".py").exists() for place in places)


def test_the_sanitizer_has_tests_to_run():
    """Of each selection, here those on the CPU; pytest exits with 5 where there is none."""
    selections = re.findall(r'-k "(cuda [\w ]+)" (tests/\S+)', SCRIPT.read_text())
    assert len(selections) == 2
    for selection, file in selections:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-n", "0"]
        command += ["-k", selection.replace("cuda", "cpu"), str(ROOT / file.rstrip("'"))]
        found = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert found.returncode == 0, found.stdout


def test_a_step_to_be_captured(monkeypatch):
    """What is captured is this step; here it runs in eager mode, twice with the same losses."""
    monkeypatch.setattr(capture, "STEPS", 1)
    monkeypatch.setattr(capture, "_WARMUP", 1)
    cpu = torch.device("cpu")
    first, _ = capture.losses(cpu, torch.float32)
    assert capture.losses(cpu, torch.float32)[0] == first and len(set(first)) == 2
