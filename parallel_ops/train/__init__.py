"""Training of one model over the ranks of a mesh: ``Trainer``, configured by ``config.Settings``."""

from parallel_ops.layers.experts import shard_experts
from parallel_ops.train.checkpoint.checkpoints import CheckpointError
from parallel_ops.train.checkpoint.planners import LoadPlanner, SavePlanner
from parallel_ops.train.parallelize_model import parallelize
from parallel_ops.train.results import NotFinite, Result, Step
from parallel_ops.train.trainer import Trainer

__all__ = [
    "CheckpointError",
    "LoadPlanner",
    "NotFinite",
    "Result",
    "SavePlanner",
    "Step",
    "Trainer",
    "parallelize",
    "shard_experts",
]
