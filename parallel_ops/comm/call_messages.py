"""The message by which ranks compare a call before data moves: a fingerprint, integers of their own, and a text."""

import hashlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.compat import all_gather_single
from parallel_ops.comm.errors import named

_TEXT_BYTES = 320
# Tag of the messages, in no collective and in no transfer of an op.
_TAG = 0x6D657373
OK, FAILED = 0, 1


class Gather:
    """An all-gather of one message of every rank, under way until all is received and sent.

    A rank that is lost does not keep this one's message from the others: they may not have noticed yet, and would wait
    for it until the group's timeout.
    """

    __slots__ = ("_lost", "_message", "_received", "_receives", "_sends")

    def __init__(self, group: ProcessGroup, message: Tensor) -> None:
        self._message, self._received = message, message.new_empty((group.size(), message.numel()))
        self._lost: RuntimeError | None = None
        self._sends: list[dist.Work] = []
        self._receives: list[dist.Work] = []
        if not _has_tags(message):
            self._receives.append(all_gather_single(self._received.view(-1), message, group=group, async_op=True))
            return
        rank = group.rank()
        self._received[rank].copy_(message)
        for peer in ((rank + k) % group.size() for k in range(1, group.size())):
            try:
                self._sends.append(group.send([message], peer, _TAG))
                self._receives.append(group.recv([self._received[peer]], peer, _TAG))
            except RuntimeError as error:
                self._lost = error

    def receive(self, *seconds: timedelta) -> Tensor:
        """Waits for every rank's message, and returns them on the CPU."""
        if self._lost is not None:
            raise self._lost
        for work in self._receives:
            work.wait(*seconds)
        return self._received.cpu()

    def sent(self, *seconds: timedelta) -> None:
        """Waits until the other ranks have this one's message."""
        for work in self._sends:
            work.wait(*seconds)


def _has_tags(message: Tensor) -> bool:
    """True if the backend matches messages by tags, as gloo does and NCCL does not."""
    return not message.is_cuda


def texts_of(messages: Tensor) -> list[tuple[str, str]]:
    """Op and text of each message."""
    words = [bytes(row.numpy()).rstrip(b"\0").decode(errors="replace") for row in messages]
    return [(op, text) for op, _, text in (word.partition("\0") for word in words)]


def who_calls_what(texts: Sequence[str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"{named(ranks)}: {text}" for text, ranks in ranks_of.items())


def message_of(
    group: ProcessGroup, op: str, same: tuple[object, ...], own: tuple[int, ...], words: str, status: int,
    device: torch.device,
) -> Tensor:  # fmt: skip
    fingerprint = int.from_bytes(hashlib.blake2b(repr((op, same)).encode(), digest_size=7).digest(), "little")
    padded = [*own, *[0] * (2 * group.size() - len(own))]
    numbers = torch.tensor([status, fingerprint, len(own), *padded], dtype=torch.int64)
    text = f"{op}\0{words}".encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    return torch.cat([numbers.view(torch.uint8), torch.frombuffer(bytearray(text), dtype=torch.uint8)]).to(device)
