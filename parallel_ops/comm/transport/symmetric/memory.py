"""Memory of all GPUs of a node, mapped by each, through ``torch.distributed._symmetric_memory``.

torch declares that module unstable; nothing else here uses it. This file needs two GPUs to run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm.transport.symmetric import stream_signal
from parallel_ops.comm.transport.symmetric.lanes import Event, Lane


def why_not_here() -> str | None:
    """Why this process has no such memory, or ``None``."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        from torch.distributed import _symmetric_memory  # noqa: F401
    except ImportError as error:
        return f"torch has no symmetric memory ({error})"
    return stream_signal.why_not()


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)


class _CudaLane:
    def __init__(self, memory: "CudaMemory") -> None:
        self._memory = memory
        self._stream = torch.cuda.Stream(memory.device)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._memory.device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def set_flag(self, rank: int, index: int, value: int) -> None:
        stream_signal.stream_write_value(self._memory.flags_of[rank], index, value, self._stream)

    def wait_flag(self, index: int, value: int) -> None:
        stream_signal.stream_wait_value(self._memory.flags_of[self._memory.rank], index, value, self._stream)

    def event(self) -> Event:
        return _CudaEvent(self._stream)


class Workspace:
    """This rank's memory on the current device: 2 slots for each peer, then 2 flags for each peer, all 0."""

    def __init__(self, size: int, slot_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        self.slot_bytes, self.slots = slot_bytes, 2 * size * slot_bytes
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.own = symmetric_memory.empty(self.slots + 2 * size * 4, dtype=torch.uint8, device=self.device)
        self.own.zero_()
        torch.cuda.synchronize(self.device)  # flags are 0 before any peer can set them


class CudaMemory:
    """The workspaces of a group, as ``Memory``. Every rank of the group constructs it."""

    def __init__(self, group: ProcessGroup, workspace: Workspace) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        self.rank, self.size, self.slot_bytes = group.rank(), group.size(), workspace.slot_bytes
        self.device, total = workspace.device, workspace.own.numel()
        self._own = workspace.own
        self._handle = symmetric_memory.rendezvous(self._own, group)
        self._buffers = [self._handle.get_buffer(rank, (total,), torch.uint8, 0) for rank in range(self.size)]
        self.flags_of = [buffer[workspace.slots :].view(torch.int32) for buffer in self._buffers]
        # Of another priority than the lanes, so that it does not queue behind the stuck stream that it is to free.
        self._rescue = torch.cuda.Stream(self.device, priority=-1)

    def slot(self, owner: int, peer: int, index: int) -> Tensor:
        start = (2 * peer + index) * self.slot_bytes
        return self._buffers[owner][start : start + self.slot_bytes]

    def lane(self) -> Lane:
        return _CudaLane(self)

    def flags(self) -> list[int]:
        with torch.cuda.stream(self._rescue):
            values: list[int] = self.flags_of[self.rank].tolist()
        return values

    def release(self, values: Sequence[int]) -> None:
        for index, value in enumerate(values):
            stream_signal.stream_write_value(self.flags_of[self.rank], index, value, self._rescue)
