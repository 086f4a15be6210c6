"""The interface of ``Trainer`` for the loop, checkpoints, metrics and progress lines, which it uses itself."""

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed import ProcessGroup

from parallel_ops.comm import ParallelMesh
from parallel_ops.train.data.any_samples import AnySamples
from parallel_ops.train.data.loader import Loader
from parallel_ops.train.launch.watchdog import Activity
from parallel_ops.train.results import Step
from parallel_ops.train.step.evaluation import Evaluation
from parallel_ops.train.step.forward_backward import ForwardBackward
from parallel_ops.train.step.optimizer import LossScale

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings


class RunState(abc.ABC):
    """The state of a run; its public attributes: see ``Trainer``.

    Attributes:
        rank, world: This process and the number of processes.
        writers: Group of the checkpoints' messages; ``None`` without a default process group.
        wandb_run: Id of the run at Weights & Biases, on rank 0; ``None`` before it has one.
    """

    settings: "Settings"
    mesh: ParallelMesh
    device: torch.device
    rank: int
    world: int
    samples: AnySamples
    loader: Loader
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scale: LossScale
    forward_backward: ForwardBackward
    activity: Activity
    evaluation: Evaluation | None
    writers: ProcessGroup | None
    global_step: int
    samples_seen: int
    saved_step: int
    evaluation_loss: float | None
    wandb_run: str | None
    origin: str | None
    own_base: bool
    eager_reason: str | None

    @abc.abstractmethod
    def step(
        self, *, stop_signal: Callable[[], str | None] = lambda: None, failed: Callable[[], bool] = lambda: False
    ) -> Step: ...

    @abc.abstractmethod
    def evaluate(self) -> float: ...
