"""Process groups as arguments of ops: their names and devices, and the checks of what is sent over them.

Each check raises before anything is sent and names op and argument.
"""

import weakref
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

GradReduce = Literal["fp32", "backend"]


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


def shard_sizes(total: int, parts: int) -> tuple[int, ...]:
    """``total`` split over ``parts`` ranks as evenly as whole numbers allow; the first ranks get the larger shards."""
    if parts < 1:
        raise ValueError(f"shard_sizes: parts must be at least 1, got {parts}")
    if total < 0:
        raise ValueError(f"shard_sizes: total must not be negative, got {total}")
    return tuple(total // parts + (rank < total % parts) for rank in range(parts))


def check_tensor(op: str, x: Tensor, group: ProcessGroup | None) -> None:
    """``x`` is a dense tensor that the group can send from where it is."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: x must be a tensor, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise TypeError(f"{op}: x must be a dense (strided) tensor, got layout {x.layout}")
    if group is None or group.size() == 1 or torch.compiler.is_compiling():
        return
    devices = group_device_types(group)
    if x.device.type not in devices:
        raise ValueError(
            f"{op}: x is on {x.device}, but the group's backend sends from {' and '.join(devices)}; move x"
        )


def check_summable(op: str, x: Tensor, group: ProcessGroup | None) -> None:
    check_tensor(op, x, group)
    if not (x.dtype.is_floating_point or x.dtype in (torch.int32, torch.int64)) or x.dtype.itemsize == 1:
        raise TypeError(
            f"{op}: x must be float64, float32, float16, bfloat16, int32 or int64 to be summed, got {x.dtype}"
        )


def check_dim(op: str, name: str, dim: int, x: Tensor) -> int:
    """``dim`` counted from the front."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{op}: {name} must be an int, got {type(dim).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{op}: {name}={dim} is out of range for x of shape {list(x.shape)}")
    return dim % x.dim()


def check_sizes(
    op: str,
    name: str,
    sizes: Sequence[int] | None,
    group: ProcessGroup | None,
    dim: int,
    *,
    whole: Tensor | None = None,
    shard: Tensor | None = None,
) -> list[int]:
    """The shard sizes of all ranks along ``dim``, given the whole tensor or this rank's shard of it."""
    size, rank = group_size(group), group_rank(group)
    if sizes is None:
        if shard is not None:
            return [shard.shape[dim]] * size
        assert whole is not None
        if whole.shape[dim] % size:
            raise ValueError(
                f"{op}: x has {whole.shape[dim]} entries in dimension {dim}, which {size} ranks cannot split evenly; "
                f"pass {name}, for example shard_sizes({whole.shape[dim]}, {size})"
            )
        return [whole.shape[dim] // size] * size
    _check_counts(op, name, sizes, size)
    if whole is not None and sum(sizes) != whole.shape[dim]:
        raise ValueError(
            f"{op}: {name} adds up to {sum(sizes)}, but x has {whole.shape[dim]} entries in dimension {dim}"
        )
    if shard is not None and sizes[rank] != shard.shape[dim]:
        raise ValueError(
            f"{op}: {name}[{rank}] is {sizes[rank]}, but x on this rank has {shard.shape[dim]} entries "
            f"in dimension {dim}"
        )
    return list(sizes)


def check_receive_sizes(
    op: str, name: str, sizes: Sequence[int] | None, group: ProcessGroup | None, sent: Sequence[int]
) -> list[int]:
    """The sizes received from each rank; by default those sent to it."""
    if sizes is None:
        return list(sent)
    _check_counts(op, name, sizes, group_size(group))
    own = group_rank(group)
    if sizes[own] != sent[own]:
        raise ValueError(f"{op}: {name}[{own}] is {sizes[own]}, but this rank sends itself {sent[own]} entries")
    return list(sizes)


def _check_counts(op: str, name: str, sizes: Sequence[int], size: int) -> None:
    if isinstance(sizes, str | bytes) or not isinstance(sizes, Sequence):
        raise TypeError(f"{op}: {name} must be a sequence of ints, got {type(sizes).__name__}")
    if len(sizes) != size:
        raise ValueError(f"{op}: {name} must have one entry for each of the {size} ranks, got {len(sizes)}")
    for n in sizes:
        if not isinstance(n, int | torch.SymInt) or isinstance(n, bool):
            raise TypeError(f"{op}: {name} must be a sequence of ints, got {list(sizes)}")
        if n < 0:
            raise ValueError(f"{op}: {name} must not be negative, got {list(sizes)}")


def is_fp32(op: str, grad_reduce: GradReduce) -> bool:
    """``grad_reduce`` as the flag of the ops' schemas; raises ValueError if it is not valid."""
    if grad_reduce not in ("fp32", "backend"):
        raise ValueError(f"{op}: grad_reduce must be 'fp32' or 'backend', got {grad_reduce!r}")
    return grad_reduce == "fp32"
