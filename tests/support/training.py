"""What each rank does in the tests of the trainer."""

from pathlib import Path

import torch.distributed as dist

from parallel_ops.train import TrainConfig, Trainer, checkpoint
from support.layers import mesh_of


def trainer_of(config: TrainConfig) -> Trainer:
    """A trainer over the default group; without one, on this process alone."""
    mesh = mesh_of(tp=config.tp) if dist.is_initialized() else None
    return Trainer(config, mesh=mesh)


def train_losses(rank: int, config: TrainConfig) -> list[float]:
    trainer = trainer_of(config)
    return [trainer.step().loss for _ in range(config.steps)]


def train_on(rank: int, config: TrainConfig, resume: Path | None, save: Path | None, at: int = 0) -> list[float]:
    """The losses from where a run was saved, or from the start, to the end; saves after ``at`` steps."""
    trainer = trainer_of(config)
    if resume is not None:
        checkpoint.load(trainer, resume)
    losses = []
    while trainer.done < config.steps:
        losses.append(trainer.step().loss)
        if save is not None and trainer.done == at:
            checkpoint.save(trainer, save)
    return losses
