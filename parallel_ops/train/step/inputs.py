"""The values that change from one step to the next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from parallel_ops.train.data.batches import Batch


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step on this rank, an element for each micro-batch.

    Attributes:
        batches: The data. counts: Their numbers of targets.
        shares: Share of each micro-batch in the loss of the step. factors: Factor of the gradients of each.
        seeds: Dropout seed of each; ``None`` leaves the random generators as they are.
        scale: The loss scale, which ``factors`` include.
    """

    batches: Sequence[Batch]
    counts: Sequence[int]
    shares: Sequence[Tensor | float]
    factors: Sequence[Tensor | float]
    seeds: Sequence[int | None]
    scale: Tensor | float

    def micro_batches(self) -> Iterator[tuple[Batch, int, Tensor | float, Tensor | float, int | None]]:
        """Batch, count, share, factor and seed of each micro-batch."""
        return zip(self.batches, self.counts, self.shares, self.factors, self.seeds, strict=True)
