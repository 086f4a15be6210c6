"""The example of the Megatron-core integration, as its docstring says to run it."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_drop_in.py"


@pytest.mark.runs
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_both_columns_are_the_same():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(EXAMPLE), "--steps", "2"]

    def run(*options):
        return subprocess.run(
            [*command, *options], capture_output=True, text=True, timeout=300, check=False, env=environment
        )

    done = run("--layouts", "TP 2")
    assert done.returncode == 2 and "invalid choice: 'TP 2' (choose from" in done.stderr
    done = run()
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"step +\d+ +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)", done.stdout)
    assert len(rows) == 2
    for loss, replaced_loss, norm, replaced_norm in rows:
        assert float(replaced_loss) == pytest.approx(float(loss), rel=1e-6)
        assert float(replaced_norm) == pytest.approx(float(norm), rel=1e-6)
