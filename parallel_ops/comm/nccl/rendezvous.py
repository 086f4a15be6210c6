"""What the ranks make sure of before NCCL makes a communicator: it would let them wait for a rank that cannot join."""

import math

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_ops import _nccl
from parallel_ops.comm.nccl.config import Config
from parallel_ops.comm.nccl.library import Library, NcclError, NotSupported


def exchange_unique_id(group: ProcessGroup, ready: Library | Exception) -> bytes:
    """Sends NCCL's unique id from rank 0 to all ranks of ``group``, once all are ready. Collective.

    Args:
        group: Process group of any backend.
        ready: this rank's NCCL, or the error that prevents it, which is raised here after the other ranks have it.

    Raises:
        NcclError: rank 0 could not make an id.
        NotSupported: another rank is not ready, or has another version of NCCL.
    """
    unique_id = None
    if group.rank() == 0 and not isinstance(ready, Exception):
        try:
            unique_id = ready.unique_id()
        except NcclError as error:
            ready = error
    mine = (None, str(ready), None) if isinstance(ready, Exception) else (ready.version, None, unique_id)
    everyone: list[tuple[str | None, str | None, bytes]] = [(None, None, b"")] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    if isinstance(ready, Exception):
        raise ready
    for rank, (_, error_text, _) in enumerate(everyone):
        if error_text is not None:
            raise NotSupported(f"Communicator: rank {rank} of the group is not ready: {error_text}")
    if len({version for version, _, _ in everyone}) > 1:
        versions = ", ".join(f"rank {rank}: {version}" for rank, (version, _, _) in enumerate(everyone))
        raise NotSupported(f"Communicator: all ranks must have the same version of NCCL, got {versions}")
    return everyone[0][2]


def check_timeout(timeout: float) -> None:
    """ValueError for what is not a time."""
    if not isinstance(timeout, int | float) or not math.isfinite(timeout) or timeout <= 0:
        raise ValueError(f"Communicator: timeout must be a positive number of seconds, got {timeout!r}")


def cuda_device(device: torch.device | int | None) -> torch.device:
    """The device with its index. Raises ValueError, and NotSupported where there is none."""
    if isinstance(device, torch.device):
        if device.type != "cuda":
            raise ValueError(f"Communicator: device must be a CUDA device, got {device}")
        device = device.index
    if not torch.cuda.is_available():
        raise NotSupported("Communicator: NCCL needs a CUDA device, and torch sees none")
    index = torch.cuda.current_device() if device is None else device
    if not 0 <= index < torch.cuda.device_count():
        raise ValueError(f"Communicator: device must be one of the {torch.cuda.device_count()} devices, got {index}")
    return torch.device("cuda", index)


def native_config(op: str, config: Config | None, library: Library) -> _nccl.Config:
    """Settings as the binding takes them. Raises TypeError, and NotSupported where the library is too old."""
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"{op}: config must be None or a Config, got {type(config).__name__}")
    return (config or Config()).to_native(library)
