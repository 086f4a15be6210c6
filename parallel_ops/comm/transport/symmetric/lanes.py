"""What the symmetric transport needs of a device: queues of copies and flags, and memory that all ranks can reach."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a lane."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Orders what the caller enqueues or does next after the point."""
        ...

    def keep(self, tensor: Tensor) -> None:
        """The memory of ``tensor``, which the caller drops, is not used anew before the point."""
        ...


class Lane(Protocol):
    """A queue of copies and flags, executed in order beside the caller."""

    def begin(self) -> None:
        """What follows comes after all that the caller has enqueued so far."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None: ...

    def set_flag(self, rank: int, index: int, value: int) -> None: ...

    def wait_flag(self, index: int, value: int) -> None: ...

    def event(self) -> Event: ...


class Memory(Protocol):
    """Workspaces and flags of all ranks, all 0 at first, as one rank sees them."""

    rank: int
    size: int
    slot_bytes: int
    device: torch.device

    def slot(self, owner: int, peer: int, index: int) -> Tensor:
        """Slot ``index`` (0 or 1) in the workspace of ``owner`` for what it sends to ``peer``; uint8."""
        ...

    def lane(self) -> Lane: ...

    def flags(self) -> list[int]:
        """This rank's flags now: ``posted`` by every rank, then ``pulled`` by every rank."""
        ...

    def release(self, values: Sequence[int]) -> None:
        """Sets this rank's flags at once, past everything enqueued."""
        ...
