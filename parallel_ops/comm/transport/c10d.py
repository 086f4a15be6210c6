"""The transport over ``torch.distributed``: gloo and NCCL, by public calls alone.

With NCCL a batch is one ``batch_isend_irecv``: one grouped launch, whose handles all wait for the whole batch; post
chunks that are needed at different times as batches of their own. With gloo each handle waits for its own chunk.
Collectives are the group's own: with NCCL always, with gloo for small tensors.

A lost or stuck peer: with gloo the wait raises PeerError, at the latest after the group's timeout. With NCCL the wait
only orders the stream, and torch's watchdog ends the process after the group's timeout; to get an exception instead,
set TORCH_NCCL_BLOCKING_WAIT=1, which makes each wait block the host.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.compat import all_gather_single, reduce_scatter_single
from parallel_ops._internal.distributed.groups import group_device_types
from parallel_ops.comm.errors import translate_backend_errors
from parallel_ops.comm.transport.base import Capabilities, Handle, Receive, Send, Transport, as_bytes

# Parts of up to so many bytes go in one collective of gloo: in half to two thirds of the time on two processes, where
# larger ones take up to a fifth longer.
_COLLECTIVE_BYTES = 256 << 10

_SENT_AS_THEY_ARE = {torch.float32, torch.bfloat16, torch.float16, torch.float64}


class _Work:
    __slots__ = ("_group", "_op", "_what", "_work")

    def __init__(self, group: ProcessGroup, op: str, what: str, work: dist.Work) -> None:
        self._group, self._op, self._what, self._work = group, op, what, work

    def wait(self) -> None:
        with translate_backend_errors(self._op, self._group, self._what):
            self._work.wait()


class C10dTransport(Transport):
    """This rank's end of ``group``, which sends what its backends send: with ``"cpu:gloo,cuda:nccl"`` both kinds."""

    def __init__(self, group: ProcessGroup) -> None:
        if not isinstance(group, ProcessGroup):
            raise TypeError(
                f"C10dTransport: group must be a torch.distributed.ProcessGroup, got {type(group).__name__}"
            )
        self._group = group
        super().__init__(group.rank(), group.size(), _capabilities(group_device_types(group)))

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
        with translate_backend_errors(op, self._group, f"could not start its transfers with ranks {peers}"):
            works = dist.batch_isend_irecv(calls)
        # Backends that coalesce the batch return one work for all of it.
        whole = works * len(chunks) if len(works) == 1 else works
        return [_Work(self._group, op, _fails(chunk), work) for chunk, work in zip(chunks, whole, strict=True)]

    def all_gather(self, op: str, received: Tensor, sent: Tensor) -> Handle | None:
        return self._collective(op, all_gather_single, received, _flat(received), _flat(sent))

    def all_to_all(
        self, op: str, received: Tensor, sent: Tensor, rows: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Handle | None:
        if rows is None:
            return self._collective(op, dist.all_to_all_single, received, _flat(received), _flat(sent))
        arriving, leaving = map(list, rows)
        with translate_backend_errors(op, self._group):
            work = dist.all_to_all_single(
                _rows(received), _rows(sent), arriving, leaving, group=self._group, async_op=True
            )
        return _Work(self._group, op, "lost the other ranks", work)

    def reduce_scatter(self, op: str, received: Tensor, sent: Tensor) -> Handle | None:
        return self._collective(op, reduce_scatter_single, sent, received.view(-1), sent.view(-1))

    def all_reduce(self, op: str, tensor: Tensor) -> Handle | None:
        return self._collective(op, dist.all_reduce, tensor, tensor)

    def _collective(self, op: str, start: Callable[..., Any], whole: Tensor, *tensors: Tensor) -> Handle | None:
        if not whole.numel() or not (whole.is_cuda or whole.nbytes <= _COLLECTIVE_BYTES * self.size):
            return None
        with translate_backend_errors(op, self._group):
            work = start(*tensors, group=self._group, async_op=True)
        return _Work(self._group, op, "lost the other ranks", work)


def _flat(tensor: Tensor) -> Tensor:
    # gloo takes these as they are; more steps on the way take the host longer than a small message.
    return tensor.view(-1) if tensor.dtype in _SENT_AS_THEY_ARE else as_bytes(tensor)


def _rows(tensor: Tensor) -> Tensor:
    if tensor.dtype in _SENT_AS_THEY_ARE:
        return tensor
    return as_bytes(tensor).view(tensor.shape[0], math.prod(tensor.shape[1:]) * tensor.itemsize)


def _fails(chunk: Send | Receive) -> str:
    verb = "failed to send a chunk to" if isinstance(chunk, Send) else "waited in vain for a chunk from"
    return f"{verb} rank {chunk.peer}"


@functools.cache
def _capabilities(device_types: tuple[str, ...]) -> Capabilities:
    return Capabilities(name="c10d", device_types=device_types, stream_ordered="cuda" in device_types)
