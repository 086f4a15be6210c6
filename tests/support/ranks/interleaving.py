"""Ranks as threads of which one runs at a time, in a random order, with messages as NCCL orders them."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from support.ranks.turns import Turns, without_failures
from support.transports.nccl_rules import Message, Operation, Rules


class World:
    """The ranks of a run.

    Args:
        size: Number of ranks. seed: Of the order in which they run.
        eager, one_by_one: How torch makes communicators, and NCCL orders operations; see ``nccl_rules``.

    Attributes:
        dist: In place of ``torch.distributed``, for the rank that calls it.
        most_posted: The most receives that were posted and had not ended.
    """

    def __init__(self, size: int, seed: int, *, eager: bool = False, one_by_one: bool = False) -> None:
        self.size, self.rules = size, Rules(eager=eager, one_by_one=one_by_one)
        self._turns, self._thread = Turns(size, seed), threading.local()
        self.dist, self.most_posted = Distributed(self), 0

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What ``function(rank)`` returned on each rank.

        Raises PeerError if no rank could go on, or the error that a rank raised.
        """

        def main(rank: int) -> Any:
            self._thread.rank = rank
            return function(rank)

        return without_failures(self._turns.outcomes(main))

    @property
    def rank(self) -> int:
        """The rank of this thread."""
        rank: int = self._thread.rank
        return rank

    def post(self, group: "Group", name: str, messages: Sequence[Message] = ()) -> "Work":
        """A call of this rank, which returns when it would."""
        operation = self.rules.post(self.rank, group.group_name, group.ranks, name, messages)
        self.most_posted = max(self.most_posted, self.rules.receives_posted())
        self._turns.give(self.rank, lambda: operation.may_return, operation, "to return")
        return Work(self, operation)

    def wait(self, operation: Operation) -> None:
        if not operation.done:
            self._turns.give(self.rank, lambda: operation.done, operation, "for its end")

    def synchronize(self) -> None:
        """Waits for all that this rank has posted, as loading a kernel may, and giving memory back to the device."""
        for operation in self.rules.of(self.rank):
            self.wait(operation)


class Group:
    """A process group."""

    def __init__(self, world: World, name: str, ranks: Sequence[int]) -> None:
        self._world, self.group_name, self.ranks = world, name, tuple(ranks)
        self.bound_device_id = "cuda:0" if world.rules.eager else None

    def rank(self) -> int:
        return self.ranks.index(self._world.rank)

    def size(self) -> int:
        return len(self.ranks)

    def _get_backend(self, device: Any) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=60)))


class Distributed:
    """What ``parallel_ops.pipeline_parallel.link`` calls of ``torch.distributed``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.group = SimpleNamespace(WORLD=Group(world, "0", range(world.size)))
        self._formed: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in range(world.size)}

    def get_rank(self) -> int:
        return self._world.rank

    def new_group(self, ranks: Sequence[int], *, timeout: Any) -> Group | None:
        """Named by its number, so all ranks must form the same groups in the same order."""
        assert not self._world.rules.eager, "a world splits its communicator"
        formed = self._formed[self._world.rank]
        formed.append(tuple(ranks))
        assert all(other[: len(formed)] == formed[: len(other)] for other in self._formed.values()), self._formed
        return Group(self._world, str(len(formed)), ranks) if self._world.rank in ranks else None

    def split_group(self, *, split_ranks: Sequence[Sequence[int]], timeout: Any) -> Group:
        """Named by its ranks and the number of groups that this rank has."""
        self._world.wait(self._world.post(self.group.WORLD, f"split into {split_ranks}").operation)
        (ranks,) = (ranks for ranks in split_ranks if self._world.rank in ranks)
        formed = self._formed[self._world.rank]
        formed.append(tuple(ranks))
        return Group(self._world, f"{ranks} {len(formed)}", ranks)

    def isend(self, tensor: Tensor, *, group: Group, group_dst: int) -> "Work":
        return self._world.post(group, "isend", [Message(group.ranks[group_dst], False, tensor.nbytes, tensor.clone())])

    def irecv(self, tensor: Tensor, *, group: Group, group_src: int) -> "Work":
        tensor.fill_(float("nan"))
        return self._world.post(group, "irecv", [Message(group.ranks[group_src], True, tensor.nbytes, tensor)])


class Work:
    """As ``torch.distributed.Work``."""

    def __init__(self, world: World, operation: Operation) -> None:
        self._world, self.operation = world, operation

    def wait(self) -> None:
        self._world.wait(self.operation)

    def is_completed(self) -> bool:
        return self.operation.done
