"""The loads of experts in all stages of a model, which an auxiliary loss over the whole model needs.

The gradient of that loss in any layer has the loads of all layers in the same micro-batch. They are there when the
forward of the last stage has ended, and a stage needs them in its backward. So they go with the messages that the
pipeline sends anyway: with the activations the sum over the stages so far, with the gradients the sum over all. Nothing
waits for more than it did.
"""

import torch
from torch import Tensor

from parallel_ops.expert_parallel import StageExpertLoad
from parallel_ops.pipeline_parallel.receives import Key


class PipelineExpertLoads:
    """Rides with the messages of a pipeline rank (``messages.Piggyback``).

    Args:
        experts: Of a layer. layers: Those that have experts, in all stages.
        last: The last stage.
    """

    def __init__(self, experts: int, layers: int, last: int) -> None:
        self.size, self.layers, self._last = experts, layers, last
        self.begin(torch.device("cpu"))

    def begin(self, device: torch.device) -> None:
        """Starts a step."""
        self._zeros = torch.zeros(self.size, dtype=torch.int64, device=device)
        self._before: dict[tuple[int, int], Tensor] = {}
        self._own: dict[tuple[int, int], Tensor] = {}
        self._total: dict[int, Tensor] = {}

    def place(self, stage: int, micro_batch: int) -> StageExpertLoad:
        """What the forward and the backward of a stage see of them."""
        return StageExpertLoad(
            self.layers,
            lambda load: self._add(stage, micro_batch, load),
            lambda: self._of_all(micro_batch).to(torch.float32) / self.layers,
        )

    def _add(self, stage: int, micro_batch: int, load: Tensor) -> None:
        own = self._own.get((stage, micro_batch), self._zeros)
        self._own[stage, micro_batch] = own + load

    def leaving(self, key: Key) -> Tensor:
        return self._through(key.stage - 1, key.micro_batch) if key.kind == "F" else self._of_all(key.micro_batch)

    def arrived(self, key: Key, values: Tensor) -> None:
        if key.kind == "F":
            self._before[key.stage, key.micro_batch] = values
        else:
            self._total[key.micro_batch] = values

    def _through(self, stage: int, micro_batch: int) -> Tensor:
        """Of all stages up to one of this rank."""
        place = stage, micro_batch
        return self._before.get(place, self._zeros) + self._own.get(place, self._zeros)

    def _of_all(self, micro_batch: int) -> Tensor:
        if micro_batch not in self._total:
            self._total[micro_batch] = self._through(self._last, micro_batch)
        return self._total[micro_batch]
