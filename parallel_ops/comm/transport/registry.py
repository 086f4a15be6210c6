"""Which transport carries the messages of a group's overlapped ops.

``PARALLEL_OPS_TRANSPORT=c10d`` in the environment of any rank of a group keeps the group on its own backend.
"""

import atexit
import logging
import os
import weakref

import torch
from torch.distributed import ProcessGroup

from parallel_ops.comm.nccl.connect import connect
from parallel_ops.comm.transport.base import Transport
from parallel_ops.comm.transport.c10d import C10dTransport

_log = logging.getLogger(__name__)

_chosen: weakref.WeakKeyDictionary[ProcessGroup, Transport] = weakref.WeakKeyDictionary()

# Of groups that have sent from CUDA: the transport over NCCL, which goes with the group, or why there is none.
_nccl: weakref.WeakKeyDictionary[ProcessGroup, tuple[Transport | None, str]] = weakref.WeakKeyDictionary()
atexit.register(_nccl.clear)  # while there still is a CUDA driver


def use_transport(group: ProcessGroup, transport: Transport | None) -> None:
    """From now on ``all_gather_linear``, ``linear_reduce_scatter``, ``ring_attention`` and experts send over
    ``transport`` in ``group``.

    Args:
        transport: this rank's end, such as ``C10dTransport(group)``, the process group's own backend; ``None`` for the
            default: on CUDA the package's own NCCL communicator if all ranks can use it, else the process group's
            backend. Every rank of the group must make the same choice between the same calls. It is kept, with its
            memory, until another is chosen.

    Raises:
        TypeError: ``group`` is not a process group. ValueError: the transport has another rank or size than the group.
    """
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"use_transport: group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    if transport is None:
        _chosen.pop(group, None)
        return
    if (transport.rank, transport.size) != (group.rank(), group.size()):
        raise ValueError(
            f"use_transport: transport is rank {transport.rank} of {transport.size}, "
            f"but group is rank {group.rank()} of {group.size()}"
        )
    _chosen[group] = transport


def transport_of(group: ProcessGroup, device: torch.device) -> Transport:
    """This rank's end of ``group``, for tensors on ``device``. Collective at the first call on CUDA.

    Raises: ValueError: ``PARALLEL_OPS_TRANSPORT`` is neither ``nccl`` nor ``c10d`` on a rank.
    """
    if (chosen := _chosen.get(group)) is not None:
        return chosen
    if device.type != "cuda":
        return C10dTransport(group)
    if (found := _nccl.get(group)) is None:
        found = _nccl[group] = connect(group, device, wanted=os.environ.get("PARALLEL_OPS_TRANSPORT", "nccl"))
        if found[0] is None:
            _log.debug("group %s sends over its backend: %s", group.group_name, found[1])
    return found[0] or C10dTransport(group)


def why_not_nccl(group: ProcessGroup) -> str | None:
    """Why ``group`` has no NCCL communicator of the package's own on CUDA.

    Returns: the reason; empty if it has one; ``None`` before it sends from CUDA.
    """
    found = _nccl.get(group)
    return None if found is None else found[1]
