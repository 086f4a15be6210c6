"""How the ranks of one start meet: a store, and a prefix in it that no start before had."""

import os
import time
import uuid
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel_ops.comm import PeerError

_POLL_SECONDS = 0.02


def under_torchrun() -> bool:
    """Whether this process is one rank of several that something else started, with torchrun's environment."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def first_rank() -> bool:
    """True in the process that starts the others, and in rank 0 under torchrun."""
    return os.environ.get("RANK", "0") == "0"


def meet(seconds: float) -> tuple[Any, int, int]:
    """The store of this start, the rank and the number of ranks; all ranks call it.

    Args:
        seconds: how long to wait for the others. Operations on the store wait as long.

    Raises:
        PeerError: other ranks did not come in this time; on rank 0 it names them.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        # Not by torch's rendezvous: there rank 0 waits for as many clients, and cannot name those that do not come.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=rank == 0 and not agent_has_store(), timeout=timedelta(seconds=seconds),
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise PeerError(f"rank {rank} of {ranks} has no connection to the store on {host}:{port}: {reason}") from error
    return dist.PrefixStore(name_of_start(store, rank, ranks, seconds), store), rank, ranks  # type: ignore[attr-defined]


def agent_has_store() -> bool:
    """Whether torchrun's agent has the store, or rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def name_of_start(store: Any, rank: int, ranks: int, seconds: float) -> str:
    """A name for keys that the ranks of this start share, and no start before it had.

    An agent's store outlives restarts, and with it the addresses of the processes before. Their number is no name: each
    agent counts its own, and a change of members does not count (pytorch/pytorch#135712). So each rank asks rank 0,
    which answers until all have confirmed its answer: what it finds at first may be the questions of a start before.

    Raises:
        PeerError: a rank did not come within ``seconds``.
    """
    own, question = uuid.uuid4().hex, "parallel_ops/{}/{}".format
    if rank:
        try:
            store.set(question(ranks, rank), own)
            store.wait([own], timedelta(seconds=seconds))
            name = str(store.get(own).decode())
            store.set(name + own, "heard")
        except dist.DistStoreError:
            raise PeerError(f"rank {rank} of {ranks}: rank 0 did not start within {seconds:g} s") from None
        except dist.DistError as error:
            raise PeerError(f"rank {rank} of {ranks}: rank 0 ended as it started: {error}") from error
        return name
    waiting, end = set(range(1, ranks)), time.monotonic() + seconds
    while waiting:
        for other in [other for other in waiting if store.check([question(ranks, other)])]:
            asked = store.get(question(ranks, other)).decode()
            store.set(asked, own)
            if store.check([own + asked]):
                waiting.remove(other)
        if waiting and time.monotonic() > end:
            raise PeerError(f"rank 0 of {ranks}: {named(waiting)} did not start within {seconds:g} s")
        time.sleep(_POLL_SECONDS if waiting else 0.0)
    return own


def named(ranks: Iterable[int]) -> str:
    """Ranks in words: ``"rank 3"``, ``"ranks 0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank {parts[0]}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {', '.join(parts)}"
