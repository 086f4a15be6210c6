"""Process groups as arguments of ops: what they are called, and which devices they can send from."""

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.compat import resolve_group

__all__ = [
    "device_of_call",
    "device_types_of",
    "group_device",
    "group_device_types",
    "group_name",
    "group_rank",
    "group_size",
    "resolve_group",
]


def group_name(op: str, group: ProcessGroup | None) -> str | None:
    """What a process group is called in an op's schema; ``None`` where there is nothing to communicate."""
    if group is None:
        return None
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"{op}: group must be None or a torch.distributed.ProcessGroup that this rank belongs to, "
            f"got {type(group).__name__}"
        )
    return None if group.size() == 1 else group.group_name


def group_size(group: ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


# Needed by every call, and constant.
_device_types: weakref.WeakKeyDictionary[ProcessGroup, tuple[str, ...]] = weakref.WeakKeyDictionary()


def group_device_types(group: ProcessGroup) -> tuple[str, ...]:
    """The device types that the group can send from: with ``"cpu:gloo,cuda:nccl"`` both."""
    if (known := _device_types.get(group)) is None:
        known = _device_types[group] = device_types_of(str(dist.get_backend_config(group)))
    return known


def device_types_of(config: str) -> tuple[str, ...]:
    """The device types of a backend configuration that this package sends from: with gloo, CPU alone.

    torch is getting more backends of NCCL beside "nccl": "nccl2", "nccl-lazy".
    """
    pairs = (pair.partition(":") for pair in config.split(","))
    return tuple(
        device for device, _, backend in pairs if device == "cpu" or (device == "cuda" and backend.startswith("nccl"))
    )


def group_device(group: ProcessGroup) -> torch.device:
    """The default device of a group's tensors: CUDA, if the group can send from it."""
    return torch.device("cuda" if "cuda" in group_device_types(group) else "cpu")


def device_of_call(device_types: Sequence[str], arguments: Sequence[object]) -> torch.device | None:
    """The device of a call's tensors on the other ranks, judged by this rank's ``arguments``.

    ``None`` if it is ambiguous: the group sends from several kinds of device, and no argument is a tensor on one.
    """
    for argument in arguments:
        if isinstance(argument, Tensor) and argument.device.type in device_types:
            return argument.device
    return torch.device(device_types[0]) if len(device_types) == 1 else None
