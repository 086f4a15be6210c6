"""The transport over ``torch.distributed``: gloo and NCCL, by public calls alone.

A batch is one ``batch_isend_irecv``. With NCCL that is one grouped launch, whose handles all wait for the whole batch;
post chunks that are needed at different times as batches of their own. With gloo each handle waits for its own chunk.

A lost or stuck peer: with gloo the wait raises PeerError, at the latest after the group's timeout. With NCCL the wait
only orders the stream, and torch's watchdog ends the process after the group's timeout; to get an exception instead,
set TORCH_NCCL_BLOCKING_WAIT=1, which makes each wait block the host.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_ops.comm._failure import naming_peers
from parallel_ops.comm._group import group_device_types
from parallel_ops.comm.transport import Capabilities, Endpoint, Handle, Receive, Send, as_bytes


class _Work:
    def __init__(self, group: ProcessGroup, op: str, chunk: Send | Receive, work: dist.Work) -> None:
        self._group, self._op, self._chunk, self._work = group, op, chunk, work

    def wait(self) -> None:
        verb = "failed to send a chunk to" if isinstance(self._chunk, Send) else "waited in vain for a chunk from"
        with naming_peers(self._op, self._group, f"{verb} rank {self._chunk.peer}"):
            self._work.wait()


class C10dTransport(Endpoint):
    """This rank's end of ``group``, which sends what its backends send: with ``"cpu:gloo,cuda:nccl"`` both kinds."""

    def __init__(self, group: ProcessGroup) -> None:
        if not isinstance(group, ProcessGroup):
            raise TypeError(
                f"C10dTransport: group must be a torch.distributed.ProcessGroup, got {type(group).__name__}"
            )
        self._group = group
        device_types = group_device_types(group)
        self._on_gpu = "cuda" in device_types
        super().__init__(
            group.rank(),
            group.size(),
            Capabilities(
                name="c10d",
                device_types=device_types,
                asynchronous=True,
                stream_ordered=self._on_gpu,
                uses_compute_units=self._on_gpu,
            ),
        )

    def _start(self, op: str, chunks: Sequence[Send | Receive]) -> list[Handle]:
        calls = [
            dist.P2POp(
                dist.isend if isinstance(chunk, Send) else dist.irecv,
                as_bytes(chunk.tensor),
                group=self._group,
                group_peer=chunk.peer,
            )
            for chunk in chunks
        ]
        peers = sorted({chunk.peer for chunk in chunks})
        with naming_peers(op, self._group, f"could not start its transfers with ranks {peers}"):
            works = dist.batch_isend_irecv(calls)
        # Backends that coalesce the batch return one work for all of it.
        whole = works * len(chunks) if len(works) == 1 else works
        return [_Work(self._group, op, chunk, work) for chunk, work in zip(chunks, whole, strict=True)]

    def barrier(self, op: str) -> None:
        with naming_peers(op, self._group, "waited in vain at a barrier"):
            # NCCL takes the device from this argument, and else guesses it with a warning.
            dist.barrier(group=self._group, device_ids=[torch.cuda.current_device()] if self._on_gpu else None)
            if self._on_gpu:
                torch.cuda.current_stream().synchronize()
