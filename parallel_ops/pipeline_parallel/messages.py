"""Messages between the stages of a pipeline: activations forward, their gradients backward.

Each ordered pair of ranks is a channel whose messages arrive in the order in which they were sent. The sender sends as
its list of actions says. The receiver knows that list and when to post each receive (``receives``), and nothing is
negotiated. Nobody waits for a send before the end of the step.

A message between stages on the same rank is handed over, not sent. Where tensor-parallel ranks hold the same rows
(no sequence parallelism), each sends its part, and the receivers gather the whole over their faster links (Narayanan et
al., arXiv:2104.04473, section 4.1).
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.compat import capturing
from parallel_ops.comm import primitives
from parallel_ops.pipeline_parallel.cut import Stages
from parallel_ops.pipeline_parallel.receives import Key, Place, read_by, receives_of, sent_by
from parallel_ops.planner.schedules.action import Action


class Work(Protocol):
    """A message on its way, as ``torch.distributed.Work``."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Link(Protocol):
    """Sends and receives between pipeline ranks without waiting. Messages of an ordered pair keep their order."""

    def send(self, tensor: Tensor, rank: int, key: Key | str) -> Work: ...

    def receive(self, tensor: Tensor, rank: int, key: Key | str) -> Work: ...


class Piggyback(Protocol):
    """What goes with each message in the same buffer: a few integers.

    Attributes:
        size: Their number.
    """

    size: int

    def leaving(self, key: Key) -> Tensor:
        """Those of a message that is sent, int64 ``[size]``."""

    def arrived(self, key: Key, values: Tensor) -> None:
        """Takes those of a message that was received."""


def pairs_of(schedule: Sequence[Sequence[Action]], stages: Stages) -> set[tuple[int, int]]:
    """The ordered pairs of different ranks between which a schedule's messages go, as (from, to)."""
    keys = ((rank, sent_by(action, stages.count)) for rank, order in enumerate(schedule) for action in order)
    pairs = {(rank, stages.rank_of(key.stage)) for rank, key in keys if key is not None}
    return {(sender, receiver) for sender, receiver in pairs if sender != receiver}


class Messages:
    """The messages of one rank.

    Args:
        schedule: The actions of all ranks.
        rank: This pipeline rank.
        share: Tensor-parallel ranks that hold the same rows, each of which sends a part; ``None`` for one rank.
        piggyback: Goes with each message; the same on all ranks of ``share``.

    Attributes:
        bytes_sent, sent: What this rank has sent, and in how many messages.
    """

    def __init__(
        self, schedule: Sequence[Sequence[Action]], stages: Stages, rank: int, link: Link, *,
        share: ProcessGroup | None = None, piggyback: Piggyback | None = None,
    ) -> None:  # fmt: skip
        self.stages, self.rank, self.link, self._share, self._piggyback = stages, rank, link, share, piggyback
        self._parts = 1 if share is None else share.size()
        self.bytes_sent = self.sent = 0
        self._receives = receives_of(schedule, stages, rank)
        self._shape, self._dtype, self._device = torch.Size(()), torch.float32, torch.device("cpu")
        self._posted: dict[Key, tuple[Work, Tensor]] = {}
        self._here: dict[Key, Tensor] = {}
        self._leaving: deque[tuple[Work, Tensor]] = deque()

    def begin(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Starts a step whose messages have this shape."""
        self._shape, self._dtype, self._device = torch.Size(shape), dtype, device

    def reach(self, place: Place) -> None:
        """Posts the receives of a place of this rank's list; called at each, in their order."""
        for peer, key in self._receives.get(place, ()):
            shape = self._part_shape
            if self._ridden:
                shape = torch.Size([shape.numel() + self._ridden])
            buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._posted[key] = self.link.receive(buffer, peer, key), buffer

    def send(self, key: Key, tensor: Tensor) -> None:
        """Hands a message to the rank of its stage. The tensor must not be changed afterwards.

        Raises:
            ValueError: It has another shape or dtype than the messages of this step.
        """
        if tensor.shape != self._shape or tensor.dtype != self._dtype:
            raise ValueError(
                f"pipeline: the {key} must be {list(self._shape)} {self._dtype}, "
                f"got {list(tensor.shape)} {tensor.dtype}"
            )
        peer = self.stages.rank_of(key.stage)
        if peer == self.rank:
            self._here[key] = tensor
            if self._piggyback is not None:
                self._piggyback.arrived(key, self._piggyback.leaving(key))
            return
        part = self._part(tensor)
        if self._piggyback is not None:
            # As they are, bit by bit.
            part = torch.cat([part.reshape(-1), self._piggyback.leaving(key).to(torch.int64).view(self._dtype)])
        self._leaving.append((self.link.send(part, peer, key), part))
        self.bytes_sent, self.sent = self.bytes_sent + part.nbytes, self.sent + 1
        while self._leaving and not capturing(part) and self._leaving[0][0].is_completed():
            self._leaving.popleft()

    def receive(self, action: Action) -> Tensor | None:
        """What an action reads that has been reached; waits for it. ``None`` at the ends of the model."""
        key = read_by(action, self.stages.count)
        if key is None:
            return None
        if key in self._here:
            return self._here.pop(key)
        work, part = self._posted.pop(key)
        work.wait()
        if self._piggyback is not None:
            sent = part.numel() - self._ridden
            self._piggyback.arrived(key, part[sent:].clone().view(torch.int64))
            part = part[:sent].view(self._part_shape)
        return self._whole(part)

    def end(self) -> None:
        """Waits until all messages of the step are sent."""
        while self._leaving:
            self._leaving.popleft()[0].wait()

    @property
    def _part_shape(self) -> torch.Size:
        """The shape of this rank's part of a message."""
        return self._shape if self._share is None else torch.Size([-(-self._shape.numel() // self._parts)])

    @property
    def _ridden(self) -> int:
        """Elements of a message that are the piggyback's."""
        return 0 if self._piggyback is None else self._piggyback.size * torch.int64.itemsize // self._dtype.itemsize

    def _part(self, tensor: Tensor) -> Tensor:
        """This rank's part of a message, padded where it does not divide."""
        if self._share is None:
            return tensor.contiguous()
        flat = tensor.reshape(-1)
        size = -(-flat.numel() // self._parts)
        part = flat[self._share.rank() * size : (self._share.rank() + 1) * size]
        return F.pad(part, (0, size - part.numel()))

    def _whole(self, part: Tensor) -> Tensor:
        if self._share is None:
            return part
        flat = primitives.gathered("pipeline message", part, self._share).view(-1)
        return flat[: self._shape.numel()].view(self._shape)
