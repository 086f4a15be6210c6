"""Sends and receives between the pipeline ranks of a process group.

gloo matches messages by their ranks alone: one group carries them all. On NCCL, operations of one communicator run in
order, so a receive that is posted ahead holds back all that is behind it; and a first operation blocks the host until
the other side has posted its own, in c10d (communicators of two ranks are made in their first operation) and in NCCL
(``ncclTransportP2pSetup`` connects each direction of each pair). Messages then go through channels: a group of two
ranks for each ordered pair that talks, which has sent one element before the first step. Whether torch makes
communicators lazily or eagerly (``init_process_group(device_id=)``; since 2.15 always) makes no difference for them.
"""

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.compat import group_timeout
from parallel_ops.comm.errors import translate_backend_errors
from parallel_ops.pipeline_parallel.messages import Work
from parallel_ops.pipeline_parallel.receives import Key

# From a pipeline rank to another.
Pair = tuple[int, int]
# Device types whose backend, gloo, needs no channels.
MATCHED_BY_RANK = ("cpu",)


class GroupLink:
    """``isend`` and ``irecv`` over the ranks of a pipeline.

    Args:
        group: The ranks of the pipeline.
        channels: By (from, to), the group of two that carries those messages; none where the backend matches messages
            by their ranks.
    """

    def __init__(self, group: ProcessGroup, channels: Mapping[Pair, ProcessGroup] | None = None) -> None:
        self._group, self._channels = group, channels or {}

    def send(self, tensor: torch.Tensor, rank: int, key: Key | str) -> Work:
        group, peer = self._route((self._group.rank(), rank), rank)
        return _Named(self._group, f"could not send the {key}", lambda: dist.isend(tensor, group=group, group_dst=peer))

    def receive(self, tensor: torch.Tensor, rank: int, key: Key | str) -> Work:
        group, peer = self._route((rank, self._group.rank()), rank)
        return _Named(self._group, f"did not get the {key}", lambda: dist.irecv(tensor, group=group, group_src=peer))

    def _route(self, pair: Pair, peer: int) -> tuple[ProcessGroup, int]:
        """The group that carries a message, and the peer's rank in it."""
        if not self._channels:
            return self._group, peer
        channel = self._channels[pair]
        return channel, 1 - channel.rank()


def one_by_one(*, captured: bool = False) -> bool:
    """Whether NCCL runs all operations of a GPU one by one, over all groups, so that messages would wait in a circle.

    It does with ``NCCL_LAUNCH_ORDER_IMPLICIT=1`` and a driver before CUDA 12.3, or before 12.9 where a graph captures
    them: ``getImplicitOrder`` in src/enqueue.cc of NCCL 2.26 to 2.30.
    """
    asked = os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") not in ("", "0")
    return asked and _driver() < (12090 if captured else 12030)


def _driver() -> int:
    """The CUDA version of the driver: 12030 for 12.3."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def connected_link(
    group: ProcessGroup, pipelines: Sequence[Sequence[int]], pairs: Iterable[Pair], device: torch.device
) -> GroupLink:
    """A link with a channel for each ordered pair, over which one element has gone. All ranks of the job call it.

    Args:
        group: The ranks of this pipeline; gives the channels its timeout.
        pipelines: The global ranks of all pipelines, stage by stage.
        pairs: (from, to) by pipeline rank, the same on all ranks.
        device: Device of the messages.

    Raises:
        ValueError: NCCL would run operations one by one.
    """
    if one_by_one():
        raise ValueError(
            "pipeline: NCCL_LAUNCH_ORDER_IMPLICIT=1, which PARALLEL_OPS_TRANSPORT=nccl sets, makes NCCL run the "
            "operations of all groups one by one with drivers before CUDA 12.3, and messages of a pipeline would wait "
            "for each other: take a newer driver, or leave both variables out"
        )
    rank, found, element = group.rank(), dict[Pair, ProcessGroup](), torch.zeros(1, device=device)
    timeout = timedelta(seconds=group_timeout(group, device))
    for together in _rounds(pairs):
        alone = [(other,) for other in range(group.size()) if not any(other in pair for pair in together)]
        members = [sorted(ranks[r] for r in some) for some in (*together, *alone) for ranks in pipelines]
        channel = _form(members, timeout)
        for sender, receiver in together:
            if rank in (sender, receiver):
                assert channel is not None
                found[sender, receiver] = channel
                link = GroupLink(group, found)
                if rank == sender:
                    link.send(element, receiver, "first message").wait()
                else:
                    link.receive(element, sender, "first message").wait()
    return GroupLink(group, found)


def _rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """The pairs in rounds in which no rank has two.

    Rounds are the one order on all ranks in which first messages cannot wait for each other in a circle; a line of
    stages has four, however long it is.
    """
    rounds: list[list[Pair]] = []
    for pair in sorted(pairs):
        fits = (some for some in rounds if not any(set(pair) & set(other) for other in some))
        if (found := next(fits, None)) is None:
            rounds.append(found := [])
        found.append(pair)
    return rounds


def _form(members: list[list[int]], timeout: timedelta) -> ProcessGroup | None:
    """The one of several disjoint groups, each of two ranks or of one, that has this rank."""
    world = dist.group.WORLD
    assert world is not None
    if world.bound_device_id is not None:
        # Communicators split off the default group's, in one collective of all ranks. Each rank must get one, of one
        # rank too: torch names a group by how many its ranks have.
        return dist.split_group(split_ranks=members, timeout=timeout)
    groups = {tuple(ranks): dist.new_group(ranks, timeout=timeout) for ranks in members if len(ranks) == 2}
    return next((group for ranks, group in groups.items() if dist.get_rank() in ranks), None)


class _Named:
    """A message on its way whose errors name it."""

    __slots__ = ("_group", "_what", "_work")

    def __init__(self, group: ProcessGroup, what: str, start: Callable[[], Work | None]) -> None:
        self._group, self._what = group, what
        with translate_backend_errors("pipeline", group, what):
            work = start()
        assert work is not None
        self._work = work

    def wait(self) -> None:
        with translate_backend_errors("pipeline", self._group, self._what):
            self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()
