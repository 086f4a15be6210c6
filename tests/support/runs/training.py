"""The demo as a process, and what each rank does in its tests."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.demo.runs import demo_trainer
from parallel_ops.train.config import Settings
from support.parallelism.layers import mesh_of

TINY = [
    "--num-layers", "1", "--hidden-size", "32", "--num-heads", "2", "--seq-length", "32", "--batch", "2",
    "--device", "cpu",
]  # fmt: skip


def run_demo(folder: Path, text: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """The process that ran in ``folder``, and the JSON file that it wrote beside its plot."""
    command = [sys.executable, "-m", "benchmarks.demo", *TINY, "--text", str(text), *arguments]
    command += ["--output", str(folder / "p.png"), "--json", str(folder / "p.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=folder, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    return done, json.loads((folder / "p.json").read_text())


def train_losses(rank: int, settings: Settings) -> list[float]:
    trainer = demo_trainer(settings, mesh=mesh_of(tp=settings.plan.tp))
    return [trainer.step().loss for _ in range(settings.run.steps)]
