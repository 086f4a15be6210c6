"""Ranks that are killed or stuck, and what the others then see."""

import datetime
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_ops import all_gather_linear, comm, linear_reduce_scatter, vocab_parallel_cross_entropy
from parallel_ops.comm import _failure
from parallel_ops.comm.c10d import C10dTransport
from parallel_ops.comm.transport import PeerError, Receive, Send


def _transport(group: ProcessGroup) -> None:
    transport = C10dTransport(group)
    peers = [r for r in range(transport.size) if r != transport.rank]
    chunks = [Receive(torch.empty(4), p) for p in peers] + [Send(torch.ones(4), p) for p in peers]
    for handle in transport.post("gather", chunks):
        handle.wait()


def _backward(group: ProcessGroup) -> None:
    x = torch.ones(2, requires_grad=True)
    comm.copy_to_group(x, group).sum().backward()


CALLS: dict[str, Callable[[ProcessGroup], Any]] = {
    "all_gather": lambda group: comm.all_gather(torch.ones(2), group),
    "reduce_scatter": lambda group: comm.reduce_scatter(torch.ones(6), group),
    "backward of copy_to_group": _backward,
    "gather": _transport,
    "sync": lambda group: C10dTransport(group).barrier("sync"),
    "all_gather_linear": lambda group: all_gather_linear(torch.ones(2, 3), torch.ones(4, 3), group=group),
    "linear_reduce_scatter": lambda group: linear_reduce_scatter(torch.ones(6, 3), torch.ones(4, 3), group=group),
    "vocab_parallel_cross_entropy": lambda group: vocab_parallel_cross_entropy(
        torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), group=group
    ),
}


def call_without(rank: int, lost: int, how: str, timeout: float) -> dict[str, tuple[str, float]]:
    """Every call in a group of its own in which rank ``lost`` takes no part: (PeerError's message, seconds)."""
    _failure.NOTE_SECONDS = 0.3  # the ranks start each call together
    limit = datetime.timedelta(seconds=timeout)
    groups = {op: dist.new_group(timeout=limit) for op in CALLS}
    dist.barrier()
    if rank == lost and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    said = {}
    for op, group in groups.items():
        if rank == lost:  # in every group the others must give up on it anew
            continue
        started = time.monotonic()
        try:
            CALLS[op](group)
        except PeerError as error:
            said[op] = str(error), time.monotonic() - started
        else:
            said[op] = "nothing was raised", 0.0
    if how == "stuck":
        dist.barrier()
    return said
