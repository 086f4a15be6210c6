"""Ranks that are killed or stuck, and what the others then see."""

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_ops import (
    all_gather_linear,
    column_parallel_linear,
    comm,
    linear_reduce_scatter,
    ring_attention,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from parallel_ops._internal.distributed.compat import group_store
from parallel_ops.comm import consistency
from parallel_ops.comm import errors as _failure
from parallel_ops.comm import primitives as _primitives
from parallel_ops.comm.consistency import propagate_errors
from parallel_ops.comm.errors import PeerError
from parallel_ops.comm.transport.base import Receive, Send
from parallel_ops.comm.transport.c10d import C10dTransport
from parallel_ops.expert_parallel.dispatch import Dispatch
from support.ranks.distributed import NOT_FORMED


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
    "all_gather_linear": lambda group: all_gather_linear(torch.ones(2, 3), torch.ones(4, 3), group=group),
    "linear_reduce_scatter": lambda group: linear_reduce_scatter(torch.ones(6, 3), torch.ones(4, 3), group=group),
    "vocab_parallel_cross_entropy": lambda group: vocab_parallel_cross_entropy(
        torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), group=group
    ),
}


def call_without(rank: int, lost: int, how: str, timeout: float) -> dict[str, tuple[str, float]]:
    """Every call in a group of its own in which rank ``lost`` takes no part: (PeerError's message, seconds)."""
    _failure.REPORT_SECONDS = 0.3  # the ranks start each call together
    limit = datetime.timedelta(seconds=timeout)
    groups = {op: dist.new_group(timeout=limit) for op in CALLS}
    dist.barrier()
    if rank == lost and how == "killed":
        with contextlib.suppress(RuntimeError), propagate_errors("Layer", groups["all_gather"], torch.ones(1)):
            raise RuntimeError("no more memory")
        os.kill(os.getpid(), signal.SIGKILL)
    said = {}
    for op, group in groups.items():
        if rank == lost:  # in every group the others must give up on it anew
            continue
        started = time.monotonic()
        try:
            CALLS[op](group)
        except (PeerError, ValueError) as error:  # a message may have left before its sender was killed
            said[op] = str(error), time.monotonic() - started
        else:
            said[op] = "nothing was raised", 0.0
    if how == "stuck":
        dist.barrier()
    return said


ERRORS = {"TypeError": TypeError, "RuntimeError": RuntimeError, "KeyError": KeyError}


def fail_alone(rank: int, guilty: int) -> list[tuple[str, str, float]]:
    """(error, message, sum of the ranks afterwards) of blocks of which each fails on one rank alone.

    The others come only when it has got its error: a rank that waited for them would wait for ever.
    """
    group, x, said = dist.group.WORLD, torch.ones(2), []
    for name, error in ERRORS.items():
        dist.barrier()
        store, key = group_store(group), f"failed with {name} on {guilty}"
        if rank != guilty:
            store.wait([key])
        try:
            with propagate_errors("Model", group, x), propagate_errors("Layer", group, x):
                if rank == guilty:
                    raise error("as it happens")
                comm.all_gather(x, group)
        except Exception as caught:
            store.set(key, "1")
            # What all ranks know of is not announced again; everyone has asked as often.
            said.append((type(caught).__name__, str(caught), comm.reduce_from_group(x, group).sum().item()))
        else:
            said.append(("nothing", "", 0.0))
    time.sleep(0.1)
    comm.all_gather(x, group)
    assert not consistency._posted  # nothing is kept of what has arrived
    return said


def fail_in_many_ways(rank: int) -> list[str]:
    """What the ranks say of calls on which rank 1 raises something that the others may know, or not."""
    group, x, said = dist.group.WORLD, torch.ones(2), []

    def wrapped() -> None:
        """An error that was agreed upon, as somebody else's."""
        try:
            comm.all_gather(torch.ones(2 + rank), group)
        except ValueError as error:
            raise RuntimeError("wrapped") from error

    def another() -> None:
        """An error while one that was agreed upon is handled."""
        try:
            comm.all_gather(torch.ones(2 + rank), group)
        except ValueError:
            with propagate_errors("Inner", group, x):
                if rank == 1:
                    raise RuntimeError("another") from None
                comm.all_gather(x, group)

    def recovered() -> None:
        """An op that refused, of which the block makes nothing."""
        if rank == 1:
            with contextlib.suppress(ValueError):
                comm.all_gather(x, group, dim=7)
        else:
            comm.all_gather(x, group)

    for block in (wrapped, another, recovered):
        try:
            with propagate_errors("Outer", group, x):
                block()
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
        else:
            said.append("nothing")
        said.append(str(comm.all_gather(torch.full((1,), rank), group).tolist()))
    return said


def different_ops(rank: int) -> None:
    """A collective on one rank, a loss on the other: both protocols begin with the same message."""
    if rank:
        comm.reduce_from_group(torch.ones(4, 5), dist.group.WORLD)
    else:
        vocab_parallel_cross_entropy(torch.ones(4, 5), torch.zeros(4, dtype=torch.int64), group=dist.group.WORLD)


def _experts(group: ProcessGroup) -> torch.Tensor:
    x = torch.randn(6, 4, requires_grad=True)
    experts = torch.arange(6, dtype=torch.int32)[:, None] % 4
    dispatch = Dispatch(x, experts, torch.bincount(experts.flatten(), minlength=4), 4, group=group)
    return dispatch.combine([dispatch.send_back(dispatch.receive(dispatch.in_flight[0]).rows)])


def _weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, requires_grad=True)


def _attention(group: ProcessGroup, algorithm: str) -> torch.Tensor:
    q = torch.randn(8, 1, 2, 16, requires_grad=True)
    return ring_attention(q, q, q, group=group, causal=True, algorithm=algorithm)


FORWARDS: dict[str, Callable[[ProcessGroup], torch.Tensor]] = {
    "all_gather_linear": lambda group: all_gather_linear(_weight(3, 8), _weight(6, 8), group=group),
    "linear_reduce_scatter": lambda group: linear_reduce_scatter(_weight(6, 8), _weight(4, 8), group=group),
    "column_parallel_linear": lambda group: column_parallel_linear(_weight(3, 8), _weight(6, 8), group=group),
    "ring": lambda group: _attention(group, "ring"),
    "ulysses": lambda group: _attention(group, "all_to_all"),
    "vocab_parallel_linear_cross_entropy": lambda group: vocab_parallel_linear_cross_entropy(
        _weight(5, 8), _weight(7, 8), torch.zeros(5, dtype=torch.int64), group=group, reduction="none"
    ),
    "expert_parallel": _experts,
    "all_gather": lambda group: comm.all_gather(_weight(2, 3), group),
    "all_to_all": lambda group: comm.all_to_all(_weight(2, 3), group),
}
# Ops by other names than their function's.
NAMES = {"ring": "ring_attention", "ulysses": "ring_attention", "expert_parallel": "all_to_all"}
NAMES_BACKWARD = {"ring": "backward of ring_attention", "ulysses": "backward of ring_attention"}


def leave_out_backwards(rank: int) -> dict[tuple[str, str], str]:
    """Rank 0 runs the backward of each op while rank 1 goes on with each other op; afterwards the group is usable."""
    group, said = dist.group.WORLD, {}
    for op, forward in FORWARDS.items():
        for other, following in FORWARDS.items():
            y = forward(group)
            try:
                y.sum().backward() if rank == 0 else following(group)
            except Exception as error:
                said[op, other] = f"{type(error).__name__}: {error}"
    assert comm.all_gather(torch.ones(1), group).tolist() == [1.0, 1.0]
    first = dist.new_group()  # here each kind of call is compared once, as on CUDA
    comm.set_consistency_checks(first, "first")
    for forward in 2 * list(FORWARDS.values()):
        forward(first).sum().backward()
    return said


def meet_a_raw_collective(rank: int, raw: str, timeout: float) -> str:
    """Rank 0 calls an op, rank 1 a collective of torch, which no message precedes."""
    _failure.REPORT_SECONDS = 0.3
    group, x = dist.new_group(timeout=datetime.timedelta(seconds=timeout)), torch.ones(4)
    dist.barrier()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "all_gather": lambda: dist.all_gather([torch.empty(4), torch.empty(4)], x, group=group),
        "barrier": lambda: dist.barrier(group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(4), x, group=group),
        "send": lambda: dist.send(x, group=group, group_dst=0),
    }
    try:
        CALLS["all_gather_linear"](group) if rank == 0 else calls[raw]()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def fail_while_data_is_under_way(rank: int, timeout: float) -> str:
    """Rank 1 fails between the agreement and its data, for which the others would take an announcement."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no more memory")

    _failure.REPORT_SECONDS = 0.3
    group, x = dist.new_group(timeout=datetime.timedelta(seconds=timeout)), torch.ones(4)
    dist.barrier()
    broken = mock.patch.object(_primitives, "_exchange", fail) if rank == 1 else contextlib.nullcontext()
    try:
        with broken, propagate_errors("Layer", group, x):
            comm.reduce_scatter(x, group)
    except RuntimeError as error:
        assert group not in consistency._posted
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def connect_at_attempt(rank: int, number: int, folder: str) -> int:
    """The attempt's number; before the one of this number, rank 1 fails as gloo does now and then."""
    attempts = Path(folder, "attempts")
    if rank == 1:
        attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
        if len(attempts.read_text()) < number:
            raise RuntimeError(f"{NOT_FORMED} with Connection closed by peer")
    dist.barrier()
    return len(attempts.read_text())


def process(rank: int) -> int:
    return os.getpid()


def kill_itself(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_alone_at_once(rank: int) -> None:
    if rank == 1:
        raise RuntimeError("alone")


def stay_silent(rank: int) -> None:
    if rank == 0:
        time.sleep(60)
