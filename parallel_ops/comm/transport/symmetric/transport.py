"""The transport over NVLink: copy engines pull chunks from memory that all ranks of a node can read.

Each rank has a workspace that its peers have mapped, and in it, for every peer, two slots and two flags.

    send       wait until the peer has pulled the batch before the last     (flag `pulled`, set by the peer)
               copy the chunk into the slot; set the peer's flag `posted` to the number of chunks sent to it
    receive    wait until `posted` has reached the number of the chunk
               copy it out of the peer's slot; set the peer's flag `pulled` to the number of chunks pulled from it

Both are enqueued on separate streams without blocking the host. Copies and flags take no multiprocessor, so the matrix
products that they overlap with keep all of them. Batches alternate between the slots, so a sender is at most two
batches ahead of its receiver. Offsets within a slot follow from the order of the chunks, which is the same on both
sides.

Nothing waits for what is enqueued later: a batch enqueues all its sends before its receives, and a send waits only for
receives of earlier batches. So it also works when all streams share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1).

A flag that is never set would block a stream, and a process that synchronises with it, for ever. So a thread watches
the batches in flight and frees the streams after a timeout (``watch.py``); every later call raises PeerError.

Flags count up, so a batch cannot be replayed: capturing one in a CUDA graph raises.
"""

import collections
import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.groups import group_device
from parallel_ops.comm._capture import refuse_capture
from parallel_ops.comm.errors import TransportUnavailable
from parallel_ops.comm.transport.base import Capabilities, Endpoint, Handle, Receive, Send, as_bytes
from parallel_ops.comm.transport.symmetric.lanes import Event, Memory
from parallel_ops.comm.transport.symmetric.memory import CudaMemory, Workspace, why_not_here
from parallel_ops.comm.transport.symmetric.watch import Watch

# Chunks start at multiples of this, so that copies are aligned.
ALIGNMENT = 256
_COUNTER = 1 << 32  # flags count chunks modulo this


def why_not(group: ProcessGroup | None) -> str | None:
    """The reason why this rank cannot use the transport in ``group``, or ``None`` if there is no local one.

    Whether the ranks can map each other's memory shows when the transport is made.
    """
    if group is None:
        return "there is no group"
    if group_device(group).type != "cuda":
        return f"the group's backend is {dist.get_backend(group)}, whose tensors are not on CUDA devices"
    return why_not_here()


def symmetric_transport(
    group: ProcessGroup, *, slot_bytes: int = 32 << 20, timeout: float = 600.0
) -> "SymmetricTransport":
    """The transport for ``group``. Every rank calls.

    Args:
        group: ranks on one node, each with a device of its own.
        slot_bytes: the most bytes that a batch sends to one peer. The workspace takes twice that for each peer.
        timeout: seconds after which a batch that is not finished counts as lost.

    Raises:
        ValueError: ``slot_bytes`` or ``timeout`` not positive, or ``slot_bytes`` not the same on every rank.
        torch.OutOfMemoryError: there is no room for the workspace.
        TransportUnavailable: on every other rank, with the reason of the first rank that has one.
    """
    # A rank that cannot take part tells the others instead of raising while they wait.
    error, workspace = None, None
    try:
        if slot_bytes <= 0 or timeout <= 0:
            raise ValueError(f"symmetric_transport: slot_bytes={slot_bytes} and timeout={timeout} must be positive")
        reason = why_not(group)
        if reason is None:
            workspace = Workspace(group.size(), -(-slot_bytes // ALIGNMENT) * ALIGNMENT)
    except Exception as raised:
        error, reason = raised, str(raised)
    everyone: list[tuple[str | None, int]] = [(None, 0)] * group.size()
    dist.all_gather_object(everyone, (reason, slot_bytes), group=group)
    if error is not None:
        raise error
    for rank, (theirs, _) in enumerate(everyone):
        if theirs is not None:
            raise TransportUnavailable(f"symmetric_transport: rank {rank} of the group cannot use it: {theirs}")
    if len({size for _, size in everyone}) > 1:
        raise ValueError(
            f"symmetric_transport: slot_bytes must be the same on every rank, got {[size for _, size in everyone]}"
        )
    assert workspace is not None
    return SymmetricTransport(CudaMemory(group, workspace), timeout=timeout)


@dataclasses.dataclass
class _Link:
    """What was exchanged with one peer in one direction."""

    batches: int = 0
    chunks: int = 0
    # Sends: how many chunks were sent by the end of each of the last two batches.
    ends: collections.deque[int] = dataclasses.field(default_factory=lambda: collections.deque([0, 0], maxlen=2))


class _Handle:
    def __init__(self, watch: Watch, chunk: Send | Receive, event: Event) -> None:
        self._watch, self._event = watch, event
        self._tensor: Tensor | None = chunk.tensor  # kept until the current stream is behind the copy

    def wait(self) -> None:
        self._watch.check()
        self._event.wait()
        self._tensor = None
        self._watch.check()

    def __del__(self) -> None:
        if self._tensor is not None:  # dropped without a wait, for example by an exception
            self._event.keep(self._tensor)


class SymmetricTransport(Endpoint):
    """One rank's end of a group whose ranks map each other's memory. Made by ``symmetric_transport``."""

    def __init__(self, memory: Memory, *, timeout: float = 600.0) -> None:
        device_type = memory.device.type
        super().__init__(
            memory.rank, memory.size, Capabilities("symmetric", (device_type,), True, device_type == "cuda", False)
        )
        self._memory = memory
        self._sends, self._receives = memory.lane(), memory.lane()
        sent = self._sent = [_Link() for _ in range(memory.size)]
        received = self._received = [_Link() for _ in range(memory.size)]
        self._watch = Watch(self, memory, lambda: [link.chunks % _COUNTER for link in (*received, *sent)], timeout)

    def post(self, op: str, chunks: Sequence[Send | Receive]) -> list[Handle]:
        """As in Transport. ValueError too if the batch sends one peer more than a slot holds."""
        self.check()
        return super().post(op, chunks)

    def _start(self, op: str, chunks: Sequence[Send | Receive]) -> list[Handle]:
        refuse_capture(op, self._memory.device.type, "the symmetric transport cannot be captured in a CUDA graph")
        places = self._places(op, chunks)
        self._watch.start()
        try:
            return self._enqueue(chunks, places)
        except Exception as error:
            self._watch.fail(f"{op}: rank {self.rank} of {self.size} failed to enqueue its transfers: {error}")
            raise
        finally:
            # What was enqueued is watched even if the rest could not be.
            self._watch.add(op, sorted({chunk.peer for chunk in chunks}), (self._sends, self._receives))

    def _enqueue(self, chunks: Sequence[Send | Receive], places: Sequence[tuple[int, int]]) -> list[Handle]:
        handles: dict[int, Handle] = {}
        self._sends.begin()
        self._receives.begin()
        order = sorted(range(len(chunks)), key=lambda i: isinstance(chunks[i], Receive))
        links = {(type(c), c.peer) for c in chunks}
        for kind, peer in sorted(links, key=lambda link: (link[0] is Receive, link[1])):
            if kind is Send and self._sent[peer].ends[0]:
                self._sends.wait_flag(self.size + peer, self._sent[peer].ends[0] % _COUNTER)
        for i in order:
            chunk = chunks[i]
            copy = self._send if isinstance(chunk, Send) else self._receive
            handles[i] = _Handle(self._watch, chunk, copy(chunk, *places[i]))
        for kind, peer in links:
            link = (self._sent if kind is Send else self._received)[peer]
            link.batches += 1
            link.ends.append(link.chunks)
        return [handles[i] for i in range(len(chunks))]

    def _places(self, op: str, chunks: Sequence[Send | Receive]) -> list[tuple[int, int]]:
        """(offset, bytes) of every chunk in its slot."""
        used: dict[tuple[type, int], int] = collections.Counter()
        places = []
        for chunk in chunks:
            offset, length = used[type(chunk), chunk.peer], chunk.tensor.nbytes
            places.append((offset, length))
            used[type(chunk), chunk.peer] = offset + -(-length // ALIGNMENT) * ALIGNMENT
            if offset + length > self._memory.slot_bytes:
                raise ValueError(
                    f"{op}: the chunks for rank {chunk.peer} take {offset + length} bytes, but a slot holds "
                    f"{self._memory.slot_bytes}; pass a larger slot_bytes, or send them in several batches"
                )
        return places

    def _send(self, chunk: Send | Receive, offset: int, length: int) -> Event:
        link = self._sent[chunk.peer]
        slot = self._memory.slot(self.rank, chunk.peer, link.batches % 2)
        self._sends.copy(slot[offset : offset + length], as_bytes(chunk.tensor))
        link.chunks += 1
        self._sends.set_flag(chunk.peer, self.rank, link.chunks % _COUNTER)
        return self._sends.event()

    def _receive(self, chunk: Send | Receive, offset: int, length: int) -> Event:
        link = self._received[chunk.peer]
        slot = self._memory.slot(chunk.peer, self.rank, link.batches % 2)
        link.chunks += 1
        self._receives.wait_flag(chunk.peer, link.chunks % _COUNTER)
        self._receives.copy(as_bytes(chunk.tensor), slot[offset : offset + length])
        self._receives.set_flag(chunk.peer, self.size + self.rank, link.chunks % _COUNTER)
        return self._receives.event()

    def barrier(self, op: str) -> None:
        """Returns once every rank has called it and all earlier transfers of this rank are done."""
        device = self._memory.device
        token = torch.zeros(1, dtype=torch.uint8, device=device)
        peers = [p for p in range(self.size) if p != self.rank]
        chunks = [Send(token, p) for p in peers] + [Receive(torch.empty_like(token), p) for p in peers]
        for handle in self.post(op, chunks):
            handle.wait()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self.check()

    def check(self) -> None:
        """PeerError if a batch was lost."""
        self._watch.check()
