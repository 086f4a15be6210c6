"""When calls of c10d's NCCL backend return to the host and when they end, for ranks that something else runs.

From the sources of torch 2.13 (``ProcessGroupNCCL::pointToPoint``, ``initNCCLComm``) and NCCL 2.30
(``ncclTransportP2pSetup``):

- A collective or a batch of messages uses its group's communicator. A message outside a batch uses one of its two ranks
  within the group if torch initialises lazily, the group's if eagerly (``init_process_group(device_id=)``).
- A communicator that is made lazily is made in its first operation, which returns once all of its ranks have come.
- The first message from one rank to another on a communicator returns once the other side is posted too, the first
  collective once all ranks have posted it: the two sides connect.
- Operations of a communicator run in order: one that waits for its peers holds back those behind it. The messages of a
  batch run at once, and end together. NCCL promises no buffer, so a send ends with its receive.
- All ranks make the same collectives of a group in the same order.
- With NCCL_LAUNCH_ORDER_IMPLICIT=1 and an older driver (``getImplicitOrder``) the operations of a rank run in order
  over all communicators.

And CUDA's (its C++ Programming Guide, "Lazy Loading", on concurrent kernels; ``cudaFree``): the first launch of a
kernel and memory that goes back to the device may wait for all operations that the rank has posted.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

Ranks = tuple[int, ...]


class Broken(RuntimeError):
    """Calls that NCCL would not carry out."""


class Message(NamedTuple):
    """One message of an operation, as one of its two ranks posts it.

    Attributes:
        peer: The other rank. receives: This rank receives. size: Its bytes. tensor: To move the data from or to.
        key: Equal on both sides.
    """

    peer: int
    receives: bool
    size: int
    tensor: Tensor | None = None
    key: Any = None


class Operation:
    """A call of one rank.

    Attributes:
        name: Of the collective, or of a batch. messages: Those of a batch that are not done; empty for a collective.
        may_return: The host has it behind it. done: The GPU has.
    """

    def __init__(self, rank: int, communicator: Any, ranks: Ranks, name: str, messages: Sequence[Message]) -> None:
        self.rank, self.communicator, self.ranks, self.name = rank, communicator, ranks, name
        self.collective, self.messages = not messages, list(messages)
        # What its two or more sides connect for, and those sides.
        self.connects: dict[Any, set[int]] = {
            ((m.peer, rank) if m.receives else (rank, m.peer)): {rank, m.peer} for m in messages
        } or {"collectives": set(ranks)}
        self.may_return = self.done = False
        self.ahead: list[Operation] = []  # what must end before

    def __str__(self) -> str:
        messages = (f"{'from' if m.receives else 'to'} {m.peer}" for m in self.messages)
        at = "" if self.may_return else ", on the host"
        return f"{' '.join([self.name, *messages])} in {self.communicator}{at}"


class Rules:
    """All communicators of a job.

    Args:
        eager: torch makes a group's communicator with the group.
        one_by_one: NCCL runs the operations of a rank in order over all communicators.
    """

    def __init__(self, *, eager: bool, one_by_one: bool = False) -> None:
        self.eager, self.one_by_one = eager, one_by_one
        self._made: dict[Any, set[int]] = {}
        self._sides: dict[tuple[Any, Any], set[int]] = {}
        # By communicator: the operations of each rank, and those whose host stands.
        self._queues: dict[Any, dict[int, deque[Operation]]] = {}
        self._returning: dict[Any, list[Operation]] = {}

    def post(
        self, rank: int, group: str, ranks: Ranks, name: str, messages: Sequence[Message] = (), batch: bool = False
    ) -> Operation:
        """A rank calls a collective or, with ``messages``, sends and receives.

        Raises:
            Broken: Another rank calls something else.
        """
        communicator: Any = f"group {group} of ranks {list(ranks)}"
        if messages and not batch and not self.eager:
            (message,) = messages
            ranks = min(rank, message.peer), max(rank, message.peer)
            communicator += f", its ranks {ranks[0]} and {ranks[1]}"
        operation = Operation(rank, communicator, ranks, name, messages)
        operation.ahead = self.of(rank) if self.one_by_one else []
        self._made.setdefault(communicator, set()).add(rank)
        for link in operation.connects:
            self._sides.setdefault((communicator, link), set()).add(rank)
        self._queues.setdefault(communicator, {}).setdefault(rank, deque()).append(operation)
        self._returning.setdefault(communicator, []).append(operation)
        self._go_on(communicator)
        return operation

    def pending(self) -> Iterator[Operation]:
        """What has not ended, the first of each queue."""
        return (queue[0] for queues in self._queues.values() for queue in queues.values() if queue)

    def of(self, rank: int) -> list[Operation]:
        """What a rank has posted that has not ended."""
        return [operation for queues in self._queues.values() for operation in queues.get(rank, ())]

    def receives_posted(self) -> int:
        everything = (o for queues in self._queues.values() for queue in queues.values() for o in queue)
        return sum(message.receives for operation in everything for message in operation.messages)

    def _go_on(self, communicator: Any) -> None:
        standing = self._returning[communicator]
        for operation in standing:
            made = self.eager or self._made[communicator] >= set(operation.ranks)
            connected = (self._sides[communicator, link] >= sides for link, sides in operation.connects.items())
            operation.may_return = made and all(connected)
        standing[:] = [operation for operation in standing if not operation.may_return]
        reached = [*self._queues] if self.one_by_one else [communicator]
        while any(self._end(queue[0]) for each in reached for queue in self._queues[each].values() if queue):
            pass

    def _first(self, rank: int, communicator: Any) -> Operation | None:
        queue = self._queues[communicator].get(rank)
        return queue[0] if queue and queue[0].may_return and all(other.done for other in queue[0].ahead) else None

    def _end(self, operation: Operation) -> bool:
        """Ends what can end of an operation that is first on its rank; returns whether something could."""
        if self._first(operation.rank, operation.communicator) is not operation:
            return False
        found = [self._first(rank, operation.communicator) for rank in operation.ranks]
        if operation.collective:
            others = [other for other in found if other is not None and other.collective]
            if len(kinds := {other.name for other in others}) > 1:
                raise Broken(f"ranks call {' and '.join(sorted(kinds))} in {operation.communicator}")
            if len(others) < len(operation.ranks):
                return False
            for other in others:
                self._leave(other)
            return True
        moved = False
        for message in [m for m in operation.messages if not m.receives]:
            other = self._first(message.peer, operation.communicator)
            fits = (m for m in (other.messages if other else ()) if m.receives and m.peer == operation.rank)
            if other is not None and (received := next(fits, None)) is not None:
                self._move(message, received, operation)
                operation.messages.remove(message)
                other.messages.remove(received)
                moved = True
                if not other.messages:
                    self._leave(other)
        if moved and not operation.messages:
            self._leave(operation)
        return moved

    def _move(self, sent: Message, received: Message, operation: Operation) -> None:
        if sent.size != received.size or sent.key != received.key:
            raise Broken(
                f"{operation} sends {sent.key} of {sent.size} bytes, received as {received.key}, {received.size}"
            )
        if sent.tensor is not None and received.tensor is not None:
            received.tensor.copy_(sent.tensor)

    def _leave(self, operation: Operation) -> None:
        operation.done = True
        self._queues[operation.communicator][operation.rank].popleft()
