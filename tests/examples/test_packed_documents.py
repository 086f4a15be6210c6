"""The example of packed documents: one loss in every layout, and the least area in the balanced one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "packed_documents.py"


@pytest.mark.runs
def test_it_trains_alike_in_every_layout():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(EXAMPLE)]
    options = ["--length", "2048", "--steps", "3", "--layout", "balanced", "zigzag", "contiguous", "striped"]
    done = subprocess.run([*torchrun, *options], capture_output=True, text=True, timeout=600, check=True)
    found = re.findall(r"^(\w+) +(\d\.\d+ to \d\.\d+) +(\d+\.\d+)", done.stdout, re.MULTILINE)
    assert [layout for layout, *_ in found] == ["balanced", "zigzag", "contiguous", "striped"]
    assert len({loss for _, loss, _ in found}) == 1
    areas = [float(area) for *_, area in found]
    assert areas[0] <= 1.02 and areas[0] < min(areas[1:3])
