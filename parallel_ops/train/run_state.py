"""The interface of ``Trainer`` for checkpoints, metrics and progress lines."""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.distributed import ProcessGroup

from parallel_ops.comm import ParallelMesh
from parallel_ops.train.data.growing import AnySamples
from parallel_ops.train.data.packing import Samples
from parallel_ops.train.launch.watchdog import Activity
from parallel_ops.train.step.forward_backward import ForwardBackward
from parallel_ops.train.step.optimizer import LossScale

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings


class Evaluated(Protocol):
    """Evaluation data.

    Attributes:
        samples: The data. sequences: How many of them. targets: Those that counted in the last evaluation.
    """

    samples: Samples
    sequences: int
    targets: int


class RunState(Protocol):
    """The state of a run.

    Attributes:
        global_step: Optimizer steps taken. samples_seen: Samples taken from the data.
        saved_step: Step of the newest checkpoint of this run; -1 for none.
        rank, world: This process and the number of processes.
        writers: Group of the checkpoints' messages; ``None`` for one process.
        evaluation_loss: Loss of the evaluation after the last step, if there was one.
        origin: The checkpoint from which the run was resumed, if it was named.
        wandb_run: Id of the run at Weights & Biases, on rank 0; ``None`` before it has one.
        own_base: The base of the adapters is that of no ``model.dir``, so checkpoints have it.
    """

    global_step: int
    samples_seen: int
    saved_step: int
    evaluation_loss: float | None
    wandb_run: str | None
    own_base: bool
    activity: Activity

    @property
    def settings(self) -> "Settings": ...
    @property
    def mesh(self) -> ParallelMesh: ...
    @property
    def samples(self) -> AnySamples: ...
    @property
    def evaluation(self) -> Evaluated | None: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def forward_backward(self) -> ForwardBackward: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def scale(self) -> LossScale: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def writers(self) -> ProcessGroup | None: ...
    @property
    def origin(self) -> str | None: ...
