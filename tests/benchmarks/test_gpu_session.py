"""The session script with a stand-in for Python, which notes its arguments, fails and takes too long."""

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = """#!/usr/bin/env bash
echo "ran: $*"
case "$*" in
  *--list*) printf 'flash_attention\\nrms_norm\\n' ;;
  *"-m pytest"*) exit 3 ;;
  *"benchmarks overlap"*) exec sleep 60 ;;
  *"benchmarks rms_norm"*) echo row >"$OUTPUT/a-gpu.csv" ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None or shutil.which("timeout") is None, reason="needs bash")


def session(tmp_path, **environment):
    stand_in, output = tmp_path / "python", tmp_path / "out"
    stand_in.write_text(STAND_IN.replace('echo "ran', '[[ "$*" == *--list* ]] || echo "ran'))
    stand_in.chmod(0o755)
    ran = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu_session.sh"), str(output), "--shapes", "1"],
        check=False, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHON": str(stand_in), "OUTPUT": str(output), "OVERLAP_LIMIT": "1", **environment},
    )  # fmt: skip
    return ran, output


def test_a_failing_and_a_slow_step_do_not_keep_the_next_from_running(tmp_path):
    ran, output = session(tmp_path)
    verdicts = ran.stdout.strip().rpartition("\n\n")[2].splitlines()
    found = [re.fullmatch(r"(\w+) +\d+ s  (.*)", line).groups() for line in verdicts]
    assert found == [
        ("machine", "passed"), ("build", "passed"), ("choice", "passed"), ("tests", "FAILED, exit 3"),
        ("models", "passed"), ("attention", "passed"), ("benchmarks", "passed"), ("overlap", "TIME LIMIT of 1 s"),
    ]  # fmt: skip
    assert ran.returncode == 1 and (output / "summary.txt").read_text().endswith(verdicts[-1] + "\n")
    assert sorted(os.listdir(output)) == ["results.tar.gz", "summary.txt"]
    with tarfile.open(output / "results.tar.gz") as archive:
        names = set(archive.getnames())
        log = archive.extractfile("benchmarks.log").read().decode()
    assert {"a-gpu.csv", "tests.log", "overlap.log", "machine.log"} <= names
    assert (
        f"ran: -m benchmarks rms_norm --device cuda --output {output} --shapes 1" in log
    )  # attention has its own step


def test_steps_can_be_run_alone(tmp_path):
    ran, _ = session(tmp_path, STEPS="attention")
    assert ran.returncode == 0
    assert re.findall(r"^== (\w+)$", ran.stdout, re.MULTILINE) == ["machine", "build", "attention"]


@pytest.mark.parametrize(
    ("call", "steps"), [("1", ["choice", "attention", "benchmarks"]), ("2", ["tests"]), ("3", ["models", "overlap"])]
)
def test_the_three_calls(tmp_path, call, steps):
    ran, output = session(tmp_path, CALL=call)
    assert re.findall(r"^== (\w+)$", ran.stdout, re.MULTILINE) == ["machine", "build", *steps]
    assert len(os.listdir(output)) <= 8
    script = (ROOT / "benchmarks/gpu_session.sh").read_text()
    (of_call,) = re.findall(rf"^  {call}\) (.*?);;$", script, re.MULTILINE | re.DOTALL)
    limits = [int(n) for n in re.findall(r"_LIMIT:-(\d+)}", of_call)]
    # Each step may take ten seconds more to die, the machine's takes 20 at most.
    assert len(limits) == len(steps) + 1 and 20 + sum(limits) + 10 * (len(limits) + 1) <= 540


def test_an_unknown_call_is_refused(tmp_path):
    ran, _ = session(tmp_path, CALL="4")
    assert ran.returncode == 2 and "CALL must be 1, 2 or 3" in ran.stderr


def test_it_names_tests_that_exist():
    named = re.findall(r"tests/[\w/]+", (ROOT / "benchmarks/gpu_session.sh").read_text())
    assert len(named) > 5
    assert all((ROOT / name).exists() or (ROOT / f"{name}.py").exists() for name in named)
