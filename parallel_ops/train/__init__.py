"""Training: one model over any ranks, and the demo that compares it with plain PyTorch.

``Trainer`` trains what ``Settings`` say (see ``settings``, which needs pydantic), on the ranks of a mesh. The demo is
``python -m parallel_ops.train --help``, from Python ``train`` with a ``TrainConfig``.
"""

from parallel_ops.train.checkpoints import CheckpointError
from parallel_ops.train.config import TrainConfig
from parallel_ops.train.data import load_text
from parallel_ops.train.lockstep import Run, train
from parallel_ops.train.spread import Spread, parallelize
from parallel_ops.train.step import NotFinite, Result, Step
from parallel_ops.train.trainer import Trainer

__all__ = [
    "CheckpointError",
    "NotFinite",
    "Result",
    "Run",
    "Spread",
    "Step",
    "TrainConfig",
    "Trainer",
    "load_text",
    "parallelize",
    "train",
]
