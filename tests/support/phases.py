"""What each rank does in the tests of new phases."""

from pathlib import Path

from parallel_ops.train.config import Settings
from support import trainer as runs


def steps(rank: int, settings: Settings, source: Path) -> tuple[list[str], list[tuple[float, float]]]:
    """What the start of a phase says, and loss and gradient norm of its first steps; then a checkpoint, if there is a
    folder."""
    trainer = runs.trainer_of(settings)
    said = trainer.begin_phase(source)
    found = []
    for _ in range(2):
        step = trainer.step()
        found.append((step.loss, step.grad_norm))
    trainer.loader.close()
    if settings.checkpoint.dir is not None:
        trainer.save()
    return said, found
