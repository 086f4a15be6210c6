"""Sends and receives between the pipeline ranks of a process group."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm.errors import translate_backend_errors
from parallel_ops.pipeline_parallel.messages import Key, Work


class GroupLink:
    """``isend`` and ``irecv`` over the ranks of a pipeline.

    On NCCL the operations of a communicator run in order, so receives that are posted ahead would hold back the sends
    of the other direction, and with them the whole pipeline. Messages to higher ranks and to lower ranks therefore have
    a group each, in which torch forms a communicator for every pair. gloo matches messages by their ranks alone.

    Args:
        group: The ranks of the pipeline.
        down: The same ranks in a group of its own, for messages to lower ranks; ``None`` for ``group``.
    """

    def __init__(self, group: ProcessGroup, down: ProcessGroup | None = None) -> None:
        self._group, self._down = group, group if down is None else down

    def send(self, tensor: Tensor, rank: int, key: Key) -> Work:
        group = self._group if rank > self._group.rank() else self._down
        return _Named(group, f"could not send the {key}", lambda: dist.isend(tensor, group=group, group_dst=rank))

    def receive(self, tensor: Tensor, rank: int, key: Key) -> Work:
        group = self._group if rank < self._group.rank() else self._down
        return _Named(group, f"did not get the {key}", lambda: dist.irecv(tensor, group=group, group_src=rank))


class _Named:
    """A message on its way whose errors name it."""

    __slots__ = ("_group", "_what", "_work")

    def __init__(self, group: ProcessGroup, what: str, start: Callable[[], Work | None]) -> None:
        self._group, self._what = group, what
        with translate_backend_errors("pipeline", group, what):
            work = start()
        assert work is not None
        self._work = work

    def wait(self) -> None:
        with translate_backend_errors("pipeline", self._group, self._what):
            self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()
