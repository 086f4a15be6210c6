"""The example, as its docstring says to run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensor_parallel.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def losses(*launcher):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEPS": "40"}
    command = [sys.executable, *launcher, str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]


def test_two_processes_train_as_one_does():
    one, two = losses(), losses(*TORCHRUN, "2")
    assert len(one) == 2
    assert one[1] < 0.9 * one[0]
    assert two == pytest.approx(one, abs=2e-3)


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 60
