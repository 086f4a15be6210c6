"""The transport over NVLink: chunks are pulled by copy engines out of memory that all ranks of a node can read.

Each rank has a workspace that its peers have mapped, and in it, for every peer, two slots and two flags.

    send       wait until the peer has pulled the batch before the last     (flag `pulled`, set by the peer)
               copy the chunk into the slot; set the peer's flag `posted` to the number of chunks sent to it
    receive    wait until `posted` says that the chunk is there
               copy it out of the peer's slot; set the peer's flag `pulled` to the number of chunks pulled from it

Both are enqueued on streams of their own and the host goes on: copies and flags take no multiprocessor, so the products
of matrices that they overlap with keep all of them. Batches alternate between the slots, so a sender is at most two
batches ahead of its receiver. Offsets within a slot follow from the order of the chunks, which both sides know.

Nothing waits for what is enqueued later: a batch enqueues all its sends before its receives, and a send waits only for
receives of earlier batches. So it also works when all streams share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1).

A flag that never comes would hold a stream, and a process that synchronises with it, for ever. So a thread watches the
oldest batch under way; after the timeout it sets the flags that this rank waits for itself, which frees the streams,
and from then on every call raises PeerError. What was received then is worthless.
"""

import collections
import dataclasses
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm._group import group_device
from parallel_ops.comm._symmetric_memory import CudaMemory, why_not_here
from parallel_ops.comm.transport import (
    Capabilities,
    Handle,
    PeerError,
    Receive,
    Send,
    TransportUnavailable,
    as_bytes,
    check_chunks,
)

# Chunks start at multiples of this, so that copies are aligned.
ALIGNMENT = 256
_COUNTER = 1 << 32  # flags count chunks modulo this


class Event(Protocol):
    """A point in a lane."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Orders what the caller enqueues or does next after the point."""
        ...


class Lane(Protocol):
    """A queue of copies and flags, executed in order beside the caller."""

    def begin(self) -> None:
        """What follows comes after all that the caller has enqueued so far."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None: ...

    def set_flag(self, rank: int, index: int, value: int) -> None: ...

    def wait_flag(self, index: int, value: int) -> None: ...

    def event(self) -> Event: ...


class Memory(Protocol):
    """Workspaces and flags of all ranks, all 0 at first, as one rank sees them."""

    rank: int
    size: int
    slot_bytes: int
    device_type: str

    def slot(self, owner: int, peer: int, index: int) -> Tensor:
        """Slot ``index`` (0 or 1) in the workspace of ``owner`` for what it sends to ``peer``; uint8."""
        ...

    def lane(self) -> Lane: ...

    def flags(self) -> list[int]:
        """This rank's flags now: ``posted`` by every rank, then ``pulled`` by every rank."""
        ...

    def release(self, values: Sequence[int]) -> None:
        """Sets this rank's flags at once, past everything enqueued."""
        ...


def why_not(group: ProcessGroup | None) -> str | None:
    """Why this rank cannot use the transport in ``group``, or ``None`` if nothing local speaks against it.

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
        ValueError: ``slot_bytes`` or ``timeout`` not positive. TransportUnavailable: on every rank, with the reason of
        the first rank that has one.
    """
    if slot_bytes <= 0 or timeout <= 0:
        raise ValueError(f"symmetric_transport: slot_bytes={slot_bytes} and timeout={timeout} must be positive")
    reasons: list[str | None] = [None] * group.size()
    dist.all_gather_object(reasons, why_not(group), group=group)
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise TransportUnavailable(f"symmetric_transport: rank {rank} of the group cannot use it: {reason}")
    aligned = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
    return SymmetricTransport(CudaMemory(group, aligned), timeout=timeout)


@dataclasses.dataclass
class _Link:
    """What was exchanged with one peer in one direction."""

    batches: int = 0
    chunks: int = 0
    # Sends: how many chunks were sent by the end of each of the last two batches.
    ends: collections.deque[int] = dataclasses.field(default_factory=lambda: collections.deque([0, 0], maxlen=2))


@dataclasses.dataclass
class _Batch:
    op: str
    posted: float
    event: Event
    peers: list[int]


class _Handle:
    def __init__(self, transport: "SymmetricTransport", chunk: Send | Receive, event: Event) -> None:
        self._transport, self._event = transport, event
        self._chunk: Send | Receive | None = chunk  # keeps the tensor until the current stream is behind the copy

    def wait(self) -> None:
        self._transport.check()
        self._event.wait()
        self._chunk = None
        self._transport.check()


class SymmetricTransport:
    """One rank's end of a group whose ranks map each other's memory. Made by ``symmetric_transport``."""

    def __init__(self, memory: Memory, *, timeout: float = 600.0) -> None:
        self._memory, self._timeout = memory, timeout
        self._sends, self._receives = memory.lane(), memory.lane()
        self._sent = [_Link() for _ in range(memory.size)]
        self._received = [_Link() for _ in range(memory.size)]
        self._under_way: collections.deque[_Batch] = collections.deque()
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._watched = False
        self._capabilities = Capabilities("symmetric", memory.device_type, True, memory.device_type == "cuda", False)

    @property
    def rank(self) -> int:
        return self._memory.rank

    @property
    def size(self) -> int:
        return self._memory.size

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def post(self, op: str, chunks: Sequence[Send | Receive]) -> list[Handle]:
        """As in Transport. ValueError too if the batch sends one peer more than a slot holds."""
        self.check()
        check_chunks(op, chunks, self)
        places = self._places(op, chunks)
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
            handles[i] = _Handle(self, chunk, copy(chunk, *places[i]))
        for kind, peer in links:
            link = (self._sent if kind is Send else self._received)[peer]
            link.batches += 1
            link.ends.append(link.chunks)
        self._watch(op, chunks)
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
        token = torch.zeros(1, dtype=torch.uint8, device=self._memory.device_type)
        peers = [p for p in range(self.size) if p != self.rank]
        chunks = [Send(token, p) for p in peers] + [Receive(torch.empty_like(token), p) for p in peers]
        handles = self.post(op, chunks)
        for handle in handles:
            handle.wait()
        if self._memory.device_type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.check()

    def check(self) -> None:
        """PeerError if a batch was lost."""
        if self._failure is not None:
            raise PeerError(self._failure)

    def _watch(self, op: str, chunks: Sequence[Send | Receive]) -> None:
        """A batch is done when both lanes have passed it; the slower one ends with a receive."""
        peers = sorted({chunk.peer for chunk in chunks})
        with self._lock:
            for lane in (self._sends, self._receives):
                self._under_way.append(_Batch(op, time.monotonic(), lane.event(), peers))
            while self._under_way and self._under_way[0].event.done():
                self._under_way.popleft()
        if not self._watched:
            self._watched = True
            threading.Thread(
                target=_keep_watch, args=(weakref.ref(self), min(self._timeout / 10, 1.0)), daemon=True
            ).start()

    def give_up_if_late(self) -> None:
        """Frees this rank's streams if the oldest batch is older than the timeout."""
        with self._lock:
            while self._under_way and self._under_way[0].event.done():
                self._under_way.popleft()
            if not self._under_way or self._failure or time.monotonic() - self._under_way[0].posted < self._timeout:
                return
            late = self._under_way[0]
            expected = [link.chunks % _COUNTER for link in (*self._received, *self._sent)]
            flags = self._memory.flags()
            silent = sorted({i % self.size for i in range(2 * self.size) if flags[i] % _COUNTER != expected[i]})
            self._failure = (
                f"{late.op}: rank {self.rank} of {self.size} waited {self._timeout:g} s for its transfers with "
                f"ranks {late.peers}; no word from ranks {[p for p in silent if p in late.peers] or silent}"
            )
            self._memory.release(expected)
            self._under_way.clear()


def _keep_watch(transport: "weakref.ref[SymmetricTransport]", period: float) -> None:
    while True:
        time.sleep(period)
        alive = transport()
        if alive is None:
            return
        alive.give_up_if_late()
        del alive
