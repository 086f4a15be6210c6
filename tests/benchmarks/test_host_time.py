"""The host's time for calls on a GPU: the driver's stand-in launches what it should, and calls stay cheap."""

import csv
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")


def test_host_time(tmp_path):
    """In a process of its own, since CPU tensors pass for CUDA's in it. Bounds are relative to a call that launches
    nothing, since one machine's cores are three times as fast as another's."""
    ops = ["nothing", "rms_norm", "flash_attention", "flash_attention, auto", "flash_attention, documents"]
    command = [sys.executable, "-m", "benchmarks", "host_time", *ops, "--rounds", "60", "--output", str(tmp_path)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    (file,) = tmp_path.iterdir()
    rows = {row["op"]: row for row in csv.DictReader(file.open())}
    launches = {op: int(row["launches"]) for op, row in rows.items()}
    assert launches == {ops[0]: 0, ops[1]: 2, ops[2]: 4, ops[3]: 4, ops[4]: 4}
    nothing = float(rows["nothing"]["chain_min_us"])
    assert 0 < nothing < float(rows["rms_norm"]["chain_min_us"]) < 15 * nothing  # 8 to 11 on EPYCs, 2026-11
    assert float(rows["rms_norm"]["forward_min_us"]) < float(rows["rms_norm"]["chain_min_us"])
    assert float(rows["flash_attention"]["chain_min_us"]) < 36 * nothing
    assert all(row["driver_calls"] == "stand-in" for row in rows.values())
