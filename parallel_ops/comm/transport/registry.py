"""Chooses the transport that carries the messages of a group's overlapped ops.

The process group's own backend, unless the user asks for the package's own NCCL communicator on CUDA:
``PARALLEL_OPS_TRANSPORT=nccl`` in the environment of all ranks, or ``use_transport(group, "nccl")``. That one has not
run on several GPUs yet, and a line of the log says where it is used.
"""

import atexit
import logging
import os
import weakref
from typing import Literal

import torch
from torch.distributed import ProcessGroup

from parallel_ops.comm.consistency import CallSignature, check_consistency, shared_error
from parallel_ops.comm.nccl.connect import TWO_COMMUNICATORS, connect, set_environment
from parallel_ops.comm.transport.base import Transport
from parallel_ops.comm.transport.c10d import C10dTransport

_log = logging.getLogger(__name__)

_VARIABLE = "PARALLEL_OPS_TRANSPORT"
_NAMES = ("c10d", "nccl")
_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
if os.environ.get(_VARIABLE) == "nccl":
    set_environment(TWO_COMMUNICATORS)  # NCCL reads it when the first communicator is made, which is torch's

_chosen: weakref.WeakKeyDictionary[ProcessGroup, Transport | str] = weakref.WeakKeyDictionary()

# Communicators of the package's own, which go with their group.
_nccl: weakref.WeakKeyDictionary[ProcessGroup, Transport] = weakref.WeakKeyDictionary()
atexit.register(_nccl.clear)  # while there still is a CUDA driver


def use_transport(group: ProcessGroup, transport: Transport | Literal["c10d", "nccl"] | None) -> None:
    """From now on ``all_gather_linear``, ``linear_reduce_scatter``, ``ring_attention`` and experts send over
    ``transport`` in ``group``.

    Args:
        transport: ``"c10d"``: the process group's own backend. ``"nccl"``: for tensors on CUDA a communicator of the
            package's own, made at the next call; opt-in, as it has not run on several GPUs yet. Or this rank's end of
            a transport, which is kept until another is chosen. ``None``: what ``PARALLEL_OPS_TRANSPORT`` says,
            ``"c10d"`` if it is not set. Every rank of the group must make the same choice between the same calls.

    Raises:
        TypeError: ``group`` is not a process group. ValueError: another name; or the transport has another rank or size
            than the group.
    """
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"use_transport: group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    if transport is None:
        _chosen.pop(group, None)
        return
    if isinstance(transport, str):
        if transport not in _NAMES:
            raise ValueError(f"use_transport: transport must be 'c10d', 'nccl', a Transport or None, got {transport!r}")
    elif (transport.rank, transport.size) != (group.rank(), group.size()):
        raise ValueError(
            f"use_transport: transport is rank {transport.rank} of {transport.size}, "
            f"but group is rank {group.rank()} of {group.size()}"
        )
    if transport == "nccl":
        # The communicator of a group that is bound to its GPU is there, and NCCL has read its variables.
        if group.bound_device_id is not None and _ORDER not in os.environ and group.rank() == 0:
            _log.warning(
                "use_transport: set %s=1 before init_process_group: torch has made its communicators, and NCCL may "
                "start kernels of theirs and of parallel_ops's in another order on each rank",
                _ORDER,
            )
        set_environment(TWO_COMMUNICATORS)
    _chosen[group] = transport


def transport_of(group: ProcessGroup, device: torch.device) -> Transport:
    """This rank's end of ``group``, for tensors on ``device``. Collective at the first call on CUDA over ``"nccl"``.

    Raises: ValueError: ``PARALLEL_OPS_TRANSPORT`` is neither ``nccl`` nor ``c10d`` on a rank, on all of them; or a rank
        has no NCCL that can be used.
    """
    chosen = _chosen.get(group) or os.environ.get(_VARIABLE, "c10d")
    if not isinstance(chosen, str):
        return chosen
    if chosen not in _NAMES:
        message = f"{_VARIABLE} must be nccl or c10d, got {chosen!r}"
        # The ranks whose value is right make another call, and raise too.
        check_consistency(group, CallSignature("transport", (message,), message), device, known=False)
        raise shared_error(group, f"transport: {message}")
    if chosen == "c10d" or device.type != "cuda":
        return C10dTransport(group)
    if (found := _nccl.get(group)) is None:
        found = _nccl[group] = connect(group, device)
        if group.rank() == 0:
            _log.warning(
                "group %s sends over an NCCL communicator of parallel_ops, beside torch's; it has not run on several "
                "GPUs yet",
                group.group_name,
            )
    return found
