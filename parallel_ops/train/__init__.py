"""Training of one model over the ranks of a mesh: ``Trainer``, configured by ``config.Settings``."""

from parallel_ops.train.checkpoint.checkpoints import CheckpointError
from parallel_ops.train.parallelize_model import parallelize
from parallel_ops.train.results import NotFinite, Result, Step
from parallel_ops.train.trainer import Trainer

__all__ = [
    "CheckpointError",
    "NotFinite",
    "Result",
    "Step",
    "Trainer",
    "parallelize",
]
