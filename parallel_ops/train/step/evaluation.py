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

from parallel_ops.models.context import IGNORE_INDEX
from parallel_ops.train.checkpoint.description import best_in
from parallel_ops.train.data.batches import Batch
from parallel_ops.train.data.loader import Loader
from parallel_ops.train.data.packing import Samples
from parallel_ops.train.step.forward_backward import ForwardBackward
from parallel_ops.train.step.reductions import of_first_rank

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings


class Evaluation:
    """Evaluates the model of a run.

    Args:
        passes: Of the run. samples: The data, in its own order. loader: Reads it.

    Attributes:
        samples: Evaluation data. sequences: Number of sequences. targets: Targets counted in the last evaluation.
        best: The lowest loss so far; ``None`` before the first.
    """

    def __init__(self, settings: "Settings", passes: ForwardBackward, samples: Samples, loader: Loader) -> None:
        self.settings, self.passes, self.samples, self.loader = settings, passes, samples, loader
        self.sequences = min(samples.in_epoch, settings.evaluation.sequences or samples.in_epoch)
        self._evaluated = False
        self.best: float | None = None
        self.targets = 0

    def begin(self) -> None:
        """Starts from the best checkpoint in ``checkpoint.dir``; all ranks call it."""
        folder = self.settings.checkpoint.dir
        # Files appear on other nodes with a delay.
        own = self.settings.model_dump(mode="json", exclude_unset=True)
        found = None if folder is None else of_first_rank(lambda: best_in(folder, own))
        self.best = None if found is None else found[0]

    def due(self, step: int) -> bool:
        """Whether a step, which was just taken, is one to evaluate after."""
        interval = self.settings.evaluation.interval
        return step == self.settings.run.steps or (interval > 0 and step % interval == 0)

    def is_best(self, loss: float) -> bool:
        """Whether a loss is the lowest so far; it is then kept as such."""
        found = math.isfinite(loss) and (self.best is None or loss < self.best)
        self.best = loss if found else self.best
        return found

    def run(self, step: int) -> float:
        """The mean loss in nats over all targets, after a step; NaN where there are none. All ranks call it."""
        what, slow = f"evaluation after step {step}", not self._evaluated
        self.passes.activity(f"{what}, reading data", slow=True)
        total = torch.zeros(2, dtype=torch.float64, device=self.passes.device)
        with evaluating(self.passes.model):
            for numbers in self._rounds():
                batches = [self._batch(some) for some in numbers]
                counts = [int((batch.targets != IGNORE_INDEX).sum()) for batch in batches]
                total += self.passes.evaluate(batches, counts, what, slow=slow)
        self._evaluated = True
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        loss, count = total.tolist()
        self.targets = int(count)
        return loss / count if count else math.nan

    def _rounds(self) -> Iterator[list[range]]:
        """The sequences of each micro-batch of this data-parallel rank, some micro-batches at a time."""
        plan, mesh = self.settings.plan, self.passes.mesh
        size, replicas = plan.micro_batch, mesh.size("dp")
        own = range(mesh.rank("dp") * size, -(-self.sequences // (size * replicas)) * size * replicas, size * replicas)
        # As many as in a step, so that memory does not grow with the data.
        for first in range(0, len(own), plan.micro_batches):
            yield [range(start, start + size) for start in own[first : first + plan.micro_batches]]

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
