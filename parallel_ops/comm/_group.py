"""Process groups as arguments of ops: what they are called, and where their messages live."""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_ops.comm._compat import resolve_group

__all__ = ["group_device", "group_device_types", "group_name", "group_rank", "group_size", "resolve_group"]


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


def group_device_types(group: ProcessGroup) -> list[str]:
    """The device types that the group can send from: with ``"cpu:gloo,cuda:nccl"`` both."""
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config(group)).split(","))
    return [device for device, _, backend in pairs if device == "cpu" or backend == "nccl"]


def group_device(group: ProcessGroup) -> torch.device:
    """Where the group's tensors live: on CUDA devices, if it can send from them."""
    return torch.device("cuda" if "cuda" in group_device_types(group) else "cpu")
