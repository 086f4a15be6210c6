"""Argument checks shared by the collectives: each raises before anything is sent and names op and argument."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.groups import group_device_types, group_rank, group_size


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
