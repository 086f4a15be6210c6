"""What each rank does in the tests of the trainer."""

import os
from pathlib import Path

import torch.distributed as dist

from benchmarks.demo.config import TrainConfig
from benchmarks.demo.runs import DemoTrainer
from support.layers import mesh_of

# Of a process that runs `-m benchmarks.demo` in another folder.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def trainer_of(config: TrainConfig) -> DemoTrainer:
    """A trainer over the default group; without one, on this process alone."""
    mesh = mesh_of(tp=config.tp) if dist.is_initialized() else None
    return DemoTrainer(config, mesh=mesh)


def train_losses(rank: int, config: TrainConfig) -> list[float]:
    trainer = trainer_of(config)
    return [trainer.step().loss for _ in range(config.steps)]
