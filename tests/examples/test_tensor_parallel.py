"""The examples, as their docstrings say to run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tensor_parallel.py"
QUICK_START = ROOT / "examples" / "quick_start.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def losses(*launcher, example=EXAMPLE):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEPS": "40"}
    command = [sys.executable, *launcher, str(example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "redistribut" not in done.stderr  # a warning of torch's, from every rank
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]


@pytest.mark.runs
def test_two_processes_train_as_one_does():
    one, two = losses(), losses(*TORCHRUN, "2")
    assert len(one) == 2
    assert one[1] < 0.9 * one[0]
    assert two == pytest.approx(one, abs=2e-3)


@pytest.mark.runs
def test_the_policy_learns_to_answer():
    command = [sys.executable, str(ROOT / "examples" / "grpo.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d+)", done.stdout)]
    assert rewards[0] < 0.5 and rewards[-1] > 0.8


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 60


@pytest.mark.runs
def test_the_quick_start_learns_and_is_that_of_the_readme():
    first, *_, last = losses(*TORCHRUN, "4", example=QUICK_START)
    assert last < 0.7 * first
    code = QUICK_START.read_text()
    shown = next(b for b in (ROOT / "README.md").read_text().split("```") if "ParallelMesh(dp_shard" in b)
    for line in shown.removeprefix("python\n").splitlines():
        assert line.strip() in code
