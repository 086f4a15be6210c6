"""The store of a start, with a key prefix that no earlier start had."""

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel_ops.comm.errors import PeerError, named

_POLL_SECONDS = 0.02


def under_torchrun() -> bool:
    """True if this process is a rank in torchrun's environment."""
    return bool(os.environ.get("RANK") and os.environ.get("WORLD_SIZE"))


# Variables of srun, Open MPI and the MPICH family with a process's rank and the number of ranks.
_STARTERS = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("mpiexec", "PMIX_RANK", "PMIX_SIZE"),
    ("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_environment() -> None:
    """Checks the variables by which torchrun, or another starter, makes this process a rank.

    Raises:
        ValueError: A variable is missing or has no value of its kind, or another starter has started several processes
            and no variable of torch's is there; the message names it.
    """
    given = {name: os.environ[name] for name in (*_NEEDED, "LOCAL_RANK", "LOCAL_WORLD_SIZE") if os.environ.get(name)}
    if not given.keys() & {"RANK", "WORLD_SIZE"}:
        for starter, rank, size in _STARTERS:
            # A batch script of SLURM is task 0 of the job's tasks, and no task of srun's.
            for name, most in ((size, 1), (rank, 0)):
                if (value := os.environ.get(name, "")).isdecimal() and int(value) > most:
                    raise ValueError(
                        f"{name} is {value}: {starter} has started this as one of several processes, but RANK is not "
                        f"set. Start torchrun once a node, or set RANK=${rank}, WORLD_SIZE, LOCAL_RANK, "
                        "MASTER_ADDR and MASTER_PORT in each process"
                    )
        return
    if missing := [name for name in _NEEDED if name not in given]:
        there = ", ".join(f"{name}={value}" for name, value in given.items())
        verb = "is" if len(missing) == 1 else "are"
        raise ValueError(f"{' and '.join(missing)} {verb} not set, beside {there}; torchrun sets all of them")
    limits = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, least in limits.items():
        number = given.get(name, str(least))
        if not (number.isdecimal() and number.isascii() and int(number) >= least):
            raise ValueError(f"{name} must be an integer of at least {least}, got {number!r}")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in given and size in given and int(given[rank]) >= int(given[size]):
            raise ValueError(f"{rank} must be less than {size}={given[size]}, got {given[rank]}")
    if int(given["MASTER_PORT"]) > 65535:
        raise ValueError(f"MASTER_PORT must be at most 65535, got {given['MASTER_PORT']}")


def first_rank() -> bool:
    """True in the process that starts the others, and in rank 0 under torchrun."""
    return (os.environ.get("RANK") or "0") == "0"


def meet(seconds: float) -> tuple[Any, int, int]:
    """The store of this start, the rank and the number of ranks; all ranks call it.

    Args:
        seconds: How long to wait for the other ranks; also the timeout of the store.

    Raises:
        PeerError: Other ranks did not arrive in time; on rank 0 the message names them.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        # In torch's rendezvous rank 0 only counts its clients, so it could not name the missing ranks.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=rank == 0 and not agent_has_store(), timeout=timedelta(seconds=seconds),
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise PeerError(f"rank {rank} of {ranks} has no connection to the store on {host}:{port}: {reason}") from error
    return dist.PrefixStore(name_of_start(store, rank, ranks, seconds), store), rank, ranks  # type: ignore[attr-defined]


def agent_has_store() -> bool:
    """True if torchrun's agent hosts the store, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def name_of_start(store: Any, rank: int, ranks: int, seconds: float) -> str:
    """A key prefix that the ranks of this start share, and no earlier start had.

    An agent's store outlives restarts, with the addresses of earlier processes. The number of restarts is no
    identifier: each agent counts its own, and changes of membership do not count (pytorch/pytorch#135712). So each rank
    sends a request to rank 0, which answers until every rank has confirmed its answer, since the first requests that it
    finds may be those of an earlier start.

    Raises:
        PeerError: A rank did not arrive within ``seconds``.
    """
    own, request = uuid.uuid4().hex, "parallel_ops/{}/{}".format
    if rank:
        try:
            store.set(request(ranks, rank), own)
            store.wait([own], timedelta(seconds=seconds))
            name = str(store.get(own).decode())
            store.set(name + own, "confirmed")
        except dist.DistStoreError:
            raise PeerError(f"rank {rank} of {ranks}: rank 0 did not start within {seconds:g} s") from None
        except dist.DistError as error:
            raise PeerError(f"rank {rank} of {ranks}: rank 0 ended as it started: {error}") from error
        return name
    waiting, end = set(range(1, ranks)), time.monotonic() + seconds
    while waiting:
        for other in [other for other in waiting if store.check([request(ranks, other)])]:
            token = store.get(request(ranks, other)).decode()
            store.set(token, own)
            if store.check([own + token]):
                waiting.remove(other)
        if waiting and time.monotonic() > end:
            raise PeerError(f"rank 0 of {ranks}: {named(waiting)} did not start within {seconds:g} s")
        time.sleep(_POLL_SECONDS if waiting else 0.0)
    return own
