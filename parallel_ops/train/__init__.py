"""Trains a small GPT on a text, with plain PyTorch ops and with the fused ones, and compares the two.

On the command line: ``python -m parallel_ops.train --help``. From Python: ``TrainConfig``, ``Trainer`` for one model,
``train`` for several in lock-step.
"""

from parallel_ops.train.config import TrainConfig
from parallel_ops.train.data import batches, load_text
from parallel_ops.train.lockstep import Run, train
from parallel_ops.train.loop import Trainer

__all__ = ["Run", "TrainConfig", "Trainer", "batches", "load_text", "train"]
