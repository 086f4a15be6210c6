"""The mean loss on data that is not trained on: forward passes alone, at any plan, without dropout.

The same sequences are evaluated each time, in the order of the data, each once, whatever the number of ranks. Where
they do not divide by the micro-batches of all ranks, the last micro-batches are filled up with tokens whose targets are
-100, which a model of a user's own must ignore, as torch's losses do. So the value is the same on every mesh, up to the
rounding of its arithmetic. Tokens after the last whole sequence are left out.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallel_ops.comm import ParallelMesh
from parallel_ops.models.context import IGNORE_INDEX
from parallel_ops.train.checkpoint.description import best_in
from parallel_ops.train.data.batches import Batch
from parallel_ops.train.data.loader import Loader
from parallel_ops.train.data.packing import Samples

if TYPE_CHECKING:
    from parallel_ops.train.run_state import RunState


class Evaluation:
    """Evaluates the model of a run.

    Args:
        trainer: The run. samples: The data, in its own order. loader: Reads it.

    Attributes:
        samples: Evaluation data. sequences: Number of sequences. targets: Targets counted in the last evaluation.
        best: The lowest loss so far; ``None`` before the first.
    """

    def __init__(self, trainer: "RunState", samples: Samples, loader: Loader) -> None:
        self.trainer, self.loader = trainer, loader
        own, plan = trainer.settings.evaluation, trainer.settings.plan
        self.interval = own.interval
        self.sequences = min(samples.in_epoch, own.sequences or samples.in_epoch)
        self.samples, self._evaluated = samples, False
        # The number of a step, so that memory does not grow with the data.
        self._at_once = plan.micro_batches
        self.best: float | None = None
        self.targets = 0

    def begin(self) -> None:
        """Starts from the best checkpoint in ``checkpoint.dir``; all ranks call it."""
        folder, group = self.trainer.settings.checkpoint.dir, self.trainer.writers
        found = [best_in(folder) if folder is not None and self.trainer.rank == 0 else None]
        if group is not None:  # files appear on other nodes with a delay
            dist.broadcast_object_list(found, src=0, group=group)
        self.best = None if found[0] is None else found[0][0]

    def due(self) -> bool:
        """Whether this step, which was just taken, is one to evaluate after."""
        step, steps = self.trainer.global_step, self.trainer.settings.run.steps
        return step == steps or (self.interval > 0 and step % self.interval == 0)

    def is_best(self, loss: float) -> bool:
        """Whether a loss is the lowest so far; it is then kept as such."""
        found = math.isfinite(loss) and (self.best is None or loss < self.best)
        self.best = loss if found else self.best
        return found

    def run(self) -> float:
        """The mean loss in nats over all targets; NaN where there are none. All ranks call it."""
        trainer = self.trainer
        what, slow = f"evaluation after step {trainer.global_step}", not self._evaluated
        trainer.activity(f"{what}, reading data", slow=True)
        total = torch.zeros(2, dtype=torch.float64, device=trainer.device)
        with evaluating(trainer.model):
            for numbers in self._rounds():
                batches = [self._batch(some) for some in numbers]
                counts = [int((batch.targets != IGNORE_INDEX).sum()) for batch in batches]
                total += trainer.forward_backward.evaluate(batches, counts, what, slow=slow)
        self._evaluated = True
        if trainer.world > 1:
            dist.all_reduce(total)
        loss, count = total.tolist()
        self.targets = int(count)
        return loss / count if count else math.nan

    def _rounds(self) -> Iterator[list[range]]:
        """The sequences of each micro-batch of this data-parallel rank, some micro-batches at a time."""
        mesh: ParallelMesh = self.trainer.mesh
        size, replicas = self.trainer.settings.plan.micro_batch, mesh.size("dp")
        own = range(mesh.rank("dp") * size, -(-self.sequences // (size * replicas)) * size * replicas, size * replicas)
        for first in range(0, len(own), self._at_once):
            yield [range(start, start + size) for start in own[first : first + self._at_once]]

    def _batch(self, numbers: range) -> Batch:
        batch = self.loader.read(numbers)
        left_out = numbers.stop - max(numbers.start, min(self.sequences, numbers.stop))
        if left_out:
            # A packed row has one sequence after the other, a batch one in each column.
            rows = batch.targets.view(len(numbers), -1) if self.samples.document_mask else batch.targets.t()
            rows[len(numbers) - left_out :] = IGNORE_INDEX
        return batch


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode in the block; afterwards each module is in its own mode again, and FSDP2's parameters are sharded."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
            if isinstance(module, FSDPModule):
                module.reshard()
