"""What each rank does in the tests of the demo."""

import os
from pathlib import Path

from benchmarks.demo.runs import demo_trainer
from parallel_ops.train.config import Settings
from support.parallelism.layers import mesh_of

TINY = [
    "--num-layers", "1", "--hidden-size", "32", "--num-heads", "2", "--seq-length", "32", "--batch", "2",
    "--device", "cpu",
]  # fmt: skip
# Of a process that runs `-m benchmarks.demo` in another folder.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}


def train_losses(rank: int, settings: Settings) -> list[float]:
    trainer = demo_trainer(settings, mesh=mesh_of(tp=settings.plan.tp))
    return [trainer.step().loss for _ in range(settings.run.steps)]
