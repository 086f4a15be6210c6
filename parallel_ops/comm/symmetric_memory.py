"""Rows of all ranks of a node, pulled by copy engines, each shard followed by a flag. Not yet run on several GPUs.

    current stream   copy own rows to the workspace | barrier | own flag | matmul that waits for flags | join
    side stream                                       pull, flag, pull, flag, ... (next rank first) | barrier

Every rank maps the workspaces of its peers (torch's symmetric memory). The first barrier says that all ranks have
published their rows, the second that all have pulled, so the next call may overwrite them. Pulls and flags need no
SM, and all of them are enqueued before the matmul: it may hold every SM while it waits, and
streams may share one hardware queue.

Flags are zeros of each call, so a call can be captured in a CUDA graph, once the workspace has its size.
"""

import dataclasses
import socket
import weakref
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Lane = Literal["current", "side"]

READY = 1
# Milliseconds after which a barrier that a rank has not reached traps: the next CUDA call of this rank raises.
_BARRIER_MS = 600_000


class Peers:
    """This rank's streams on the current CUDA device and the workspaces of all ranks. Never waits for the device."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.size, self._name = group.rank(), group.size(), group.group_name
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._side = torch.cuda.Stream(self._device, priority=-1)
        self._bytes, self._memory = 0, None

    def reserve(self, nbytes: int) -> None:
        """Makes workspaces of at least that size. All ranks call it with the same size."""
        if self._memory is not None and nbytes <= self._bytes:
            return
        # The old one is unmapped: this rank's barriers behind all pulls must have passed.
        torch.cuda.current_stream(self._device).synchronize()
        self._memory = _symmetric_memory().get_symm_mem_workspace(self._name, nbytes)
        self._bytes = nbytes

    def workspace(self, rank: int, like: Tensor) -> Tensor:
        """The workspace of a rank, as a tensor like this one."""
        assert self._memory is not None
        found: Tensor = self._memory.get_buffer(rank, like.shape, like.dtype)
        return found

    def flags(self) -> Tensor:
        """int32 ``[size]``, zeros."""
        return torch.zeros(self.size, dtype=torch.int32, device=self._device)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream(lane)):
            target.copy_(source)
        if lane == "side":
            target.record_stream(self._side)

    def set_flag(self, lane: Lane, flags: Tensor, index: int) -> None:
        """``flags[index] = READY`` after all that the lane has copied."""
        memory = _symmetric_memory()._SymmetricMemory
        with torch.cuda.stream(self._stream(lane)):
            if torch.cuda.is_current_stream_capturing():
                memory.memset32(flags, index, READY, 1)
            else:
                memory.stream_write_value32(flags, index, READY)  # after a fence of the system
        if lane == "side":
            flags.record_stream(self._side)

    def barrier(self, lane: Lane) -> None:
        """What follows in the lane runs when all ranks have reached the same barrier."""
        assert self._memory is not None
        with torch.cuda.stream(self._stream(lane)):
            self._memory.barrier(int(lane == "side"), _BARRIER_MS)

    def follow(self, lane: Lane, other: Lane) -> None:
        """What follows in ``lane`` runs after what ``other`` has been given so far."""
        self._stream(lane).wait_stream(self._stream(other))

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._side if lane == "side" else torch.cuda.current_stream(self._device)


@dataclasses.dataclass(frozen=True)
class Pulls:
    """Rows on their way.

    Attributes:
        whole: ``[P s, K]``, rows of shard r readable on the current stream once ``flags[r]`` is ``READY``, or after
            ``wait``. flags: int32 ``[P]``.
    """

    whole: Tensor
    flags: Tensor
    peers: Peers

    def multiply(self, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """``out = whole weight^T + bias``, each tile as soon as its rows are there; 16 bits, ``weight`` ``[N, K]``."""
        from parallel_ops.triton_kernels.gated_matmul import gated_matmul

        gated_matmul(self.whole, weight, bias, out, self.flags, READY, self.peers.rank, self.peers.size)

    def wait(self) -> None:
        """The current stream waits for all rows. Call it once, after what waits for flags has been enqueued."""
        self.peers.follow("current", "side")


def start_pulls(peers: Peers, shard: Tensor) -> Pulls:
    """Starts the gather of ``shard`` ``[s, K]``, contiguous, of equal size on all ranks."""
    rank, size = peers.rank, peers.size
    peers.reserve(shard.nbytes)
    whole, flags = shard.new_empty((size * shard.shape[0], *shard.shape[1:])), peers.flags()
    parts = whole.chunk(size) if shard.shape[0] else [whole] * size
    peers.copy("current", peers.workspace(rank, shard), shard)
    peers.copy("current", parts[rank], shard)
    peers.barrier("current")
    peers.set_flag("current", flags, rank)
    peers.follow("side", "current")
    for step in range(1, size):
        source = (rank + step) % size
        peers.copy("side", parts[source], peers.workspace(source, shard))
        peers.set_flag("side", flags, source)
    peers.barrier("side")
    return Pulls(whole, flags, peers)


def _symmetric_memory() -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


_peers: weakref.WeakKeyDictionary[ProcessGroup, Peers | str] = weakref.WeakKeyDictionary()


def peers_of(group: ProcessGroup, tensor: Tensor) -> Peers | str:
    """The ranks of ``group``, or why they cannot read each other's memory, the same on all ranks.

    Every rank calls it at the same time; the first call of a group asks all ranks.
    """
    if group not in _peers:
        mine = _problem(tensor)
        everyone: list[tuple[str | None, str]] = [(None, "")] * group.size()
        dist.all_gather_object(everyone, (mine, socket.gethostname()), group=group)
        reasons = [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(everyone) if reason]
        if len({host for _, host in everyone}) > 1:
            reasons.append("its ranks are on several nodes")
        _peers[group] = reasons[0] if reasons else Peers(group)
    return _peers[group]


def _problem(tensor: Tensor) -> str | None:
    if not tensor.is_cuda:
        return f"tensors are on {tensor.device.type}, and only GPUs of one node read each other's memory"
    major, minor = torch.cuda.get_device_capability(tensor.device)
    if major < 9:
        return f"it needs a GPU of compute capability 9.0 or more, and there is one of {major}.{minor}"
    try:
        _symmetric_memory()
    except ImportError as error:
        return f"torch has no symmetric memory ({error})"
    return None
