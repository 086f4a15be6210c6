"""Which transport carries the messages of a group's overlapped ops."""

import weakref

from torch.distributed import ProcessGroup

from parallel_ops.comm.transport.base import Transport
from parallel_ops.comm.transport.c10d import C10dTransport

_chosen: weakref.WeakKeyDictionary[ProcessGroup, Transport] = weakref.WeakKeyDictionary()


def use_transport(group: ProcessGroup, transport: Transport | None) -> None:
    """From now on ``all_gather_linear``, ``linear_reduce_scatter`` and ``ring_attention`` send over ``transport`` in
    ``group``.

    Args:
        transport: this rank's end, such as ``symmetric_transport(group)``; ``None`` for the default, the process
            group's own backend. Every rank of the group must make the same choice between the same calls. It is kept,
            with its memory, until another is chosen.

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


def transport_of(group: ProcessGroup) -> Transport:
    """This rank's end of ``group``."""
    return _chosen.get(group) or C10dTransport(group)
