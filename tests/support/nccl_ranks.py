"""What each rank does in the tests of the exchange of unique ids."""

import torch.distributed as dist

from parallel_ops.comm.nccl.communicator import Communicator
from parallel_ops.comm.nccl.library import Library
from parallel_ops.comm.nccl.rendezvous import exchange_unique_id
from parallel_ops.comm.nccl.transport import NcclTransport
from support.nccl import Fake


def exchange(rank: int, path: str, versions: list[int], failing: int | None, broken: bool) -> bytes:
    """With NCCL of the version of this rank; rank ``failing`` is not ready; rank 0 cannot make an id if ``broken``."""
    fake = Fake(path)
    fake.reset()
    fake.version(versions[rank])
    if broken:
        fake.failing("GetUniqueId", 2)
    ready = ValueError("no device here") if rank == failing else Library.open(path)
    return exchange_unique_id(dist.group.WORLD, ready)


def without_gpu(rank: int, timeout: float) -> None:
    Communicator(dist.group.WORLD, timeout=timeout)


def transport_without_gpu(rank: int) -> None:
    NcclTransport(dist.group.WORLD)
