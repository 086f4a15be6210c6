"""Gradients over data-parallel ranks and over the ends of a pipeline.

Under ``zero`` 0 to 2 each block is reduced once in a step, as soon as its last weight gradient is there, while the
rest of the pipeline drains; gradients stay whole until then. Under 3 they are reduced after each micro-batch.
Parameters outside the blocks (embeddings, final norm, head) are reduced at the end. A table that the first and the last
stage share has a gradient on both; its two parts are added in the same order on both ranks.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from parallel_ops._internal.distributed import fsdp
from parallel_ops.pipeline_parallel.executor import Observer
from parallel_ops.pipeline_parallel.messages import Link


class Reduction(Observer):
    """Reduces the gradients of a rank's stages.

    Args:
        model: The module of this rank, possibly under FSDP2 or ``replicate``.
        blocks: The modules of each stage, in the order of the model.
        zero: The plan's.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[int, Sequence[nn.Module]], zero: int) -> None:
        self._model, self._zero = model, zero
        # Experts are reduced over other ranks than their block, so they are modules of their own.
        self._blocks = {
            stage: [part for block in list(own)[::-1] for part in block.modules() if isinstance(part, FSDPModule)]
            for stage, own in blocks.items()
        }
        self._managed = isinstance(model, FSDPModule)

    def start(self) -> None:
        """Prepares the first forward of a step."""
        if isinstance(self._model, FSDPModule):
            self._model.reshard()  # what an evaluation has left whole: the shards have the gradients of earlier steps
            self._model.set_requires_gradient_sync(False)
            self._model.set_is_last_backward(False)
            self._model.set_reshard_after_backward(self._zero == 3)

    def reducible(self, stage: int, *, last: bool) -> None:
        if not self._managed:
            return
        for block in self._blocks[stage]:
            if last or self._zero == 3:
                fsdp.reduce(block, replicas=last)
            else:
                fsdp.accumulate(block)

    def end(self) -> None:
        """Reduces what is left, after the last action."""
        if self._managed:
            fsdp.reduce(self._model, replicas=True)
            fsdp.finish(self._model)


@torch.no_grad()
def add_between_ends(grad: Tensor, link: Link, rank: int, peer: int) -> None:
    """Adds the gradient of a shared table on the first and the last rank of a pipeline, in this order, in place.

    Args:
        grad: This rank's part of it. rank, peer: This pipeline rank and the other of the two.
    """
    own, other = grad.contiguous(), torch.empty_like(grad, memory_format=torch.contiguous_format)
    what = "gradient of the tied embeddings"
    for work in (link.receive(other, peer, what), link.send(own, peer, what)):
        work.wait()
    first, last = (own, other) if rank < peer else (other, own)
    grad.copy_(first + last)
