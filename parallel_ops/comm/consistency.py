"""Do all ranks make the same call? Asked before data moves, so that a disagreement is an error on every rank.

Each rank gathers one message of fixed size from every other: a fingerprint of what must be the same, a few integers
that may differ (shard sizes, say) and a sentence for the error. Since all ranks read the same messages, all raise the
same error. It is the one protocol of the package: whatever an op sends, this message goes before it.

A rank on which something goes wrong (an error of the block of ``announcing``) says so in such a message, leaves it to
the backend to deliver and raises at once; the others read it where they next ask, and raise too. Every rank has then
asked as often as the others, so the group can go on.

With CPU tensors every call asks: one small all-gather (``set_consistency_checks`` can leave it at the first of a
kind, as on CUDA, for models so small that it shows). With CUDA tensors reading the answer means waiting for the
device, so a rank asks only the first time that it makes a call in the group (and before it is captured in a CUDA
graph, so make each call once before capturing). What ranks do wrong there from the start is an error on all of them. If
one deviates later, from calls that others have made before, those others do not ask, and the group's timeout ends it.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import hashlib
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import CodeType, TracebackType
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.compat import all_gather_single
from parallel_ops._internal.groups import device_of_call, group_device_types
from parallel_ops.comm._capture import refuse_capture
from parallel_ops.comm.errors import PeerError, publish_failure, retract_failure, translate_backend_errors

_TEXT_BYTES = 256
_OK, _FAILED = 0, 1

# What this process asked about before, where it asks once, as (op, what must be the same). It must not depend on what
# may differ between ranks, or some would ask and others not.
_asked: weakref.WeakKeyDictionary[ProcessGroup, set[tuple[str, tuple[object, ...]]]] = weakref.WeakKeyDictionary()
# Programs whose shapes never repeat would fill memory; all ranks forget at the same call.
_MOST_ASKED = 4096

# Groups in which calls with CPU tensors ask as those with CUDA tensors do.
_first_alone: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()

# Failures that are on their way: the group with them, since destroying it would wait until all its ranks had met.
_posted: dict[ProcessGroup, list[tuple[dist.Work, Tensor, Tensor]]] = {}
# How long a process that ends waits for them to arrive.
_LEAVING_SECONDS = 2.0

# What is marked with ``sends``.
_bodies: set[CodeType] = set()


class _Thread(threading.local):
    """The errors of which the ranks of a group know, in a block of ``announcing`` in the group."""

    def __init__(self) -> None:
        self.told: dict[ProcessGroup, list[BaseException]] = {}


_thread = _Thread()

F = TypeVar("F", bound=Callable[..., object])


@dataclasses.dataclass(frozen=True)
class Call:
    """A call as the other ranks see it.

    Args:
        op: the function that the user called.
        same: what must be the same on every rank; compared by ``repr``.
        text: the call in words, for the error; or what makes them, where ranks that do not ask should not have to.
        own: integers that may differ between ranks, as many on every rank as ``same`` implies.
    """

    op: str
    same: tuple[object, ...]
    text: str | Callable[[], str]
    own: tuple[int, ...] = ()


def set_consistency_checks(group: ProcessGroup, when: Literal["always", "first"]) -> None:
    """How often the ranks of ``group`` make sure that they make the same call, with CPU tensors.

    Args:
        group: all of its ranks must say the same between the same calls.
        when: ``"always"``, the default: a small all-gather before data moves, so that ranks that disagree all raise.
            ``"first"``: only at the first call of a kind, as always with CUDA tensors: what the ranks do wrong from the
            start is an error on all of them, a rank that deviates later ends in the group's timeout, and nobody looks
            for targets outside a sharded vocabulary.

    Raises: TypeError: ``group`` is not a process group. ValueError: another ``when``.
    """
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"set_consistency_checks: group must be a torch.distributed.ProcessGroup, got {type(group).__name__}"
        )
    if when not in ("always", "first"):
        raise ValueError(f"set_consistency_checks: when must be 'always' or 'first', got {when!r}")
    (_first_alone.add if when == "first" else _first_alone.discard)(group)


def _asks_once(group: ProcessGroup, device: torch.device) -> bool:
    return device.type == "cuda" or group in _first_alone


def check_consistency(
    group: ProcessGroup, call: Call, device: torch.device, *, known: bool = True
) -> list[list[int]] | None:
    """``call.own`` of every rank, in rank order, at most two integers per rank of the group; ``None`` if not asked.

    Args:
        device: of the tensors of the call.
        known: ``False`` where this rank needs the answer even of a call that it has made before.

    Raises:
        ValueError: on every rank, if the ranks make different calls or one of them announced a failure.
        RuntimeError: the ranks have to ask, and the call is being captured in a CUDA graph.
    """
    if not _asks_once(group, device):
        return _ask(group, call, device)
    asked, key = _asked.setdefault(group, set()), (call.op, call.same)
    if known and key in asked:
        return None
    refuse_capture(
        call.op,
        device.type,
        "the first call of its kind cannot be captured in a CUDA graph, since the ranks compare their arguments; "
        "make it once before capturing",
    )
    answer = _ask(group, call, device)
    if len(asked) >= _MOST_ASKED:
        asked.clear()
    asked.add(key)
    return answer


def sends(body: F) -> F:
    """Marks what asks and then sends data: an error out of it is not announced, since others would take it for data."""
    _bodies.add(body.__code__)
    return body


class propagate_errors:
    """Tells the other ranks of an error of the block, which this rank alone may have, so that they do not wait for it.

    Put one around what ends in a collective: the checks of an op, the forward of a module. Blocks of one group may be
    nested; an error is announced once. Errors that the others raise too, because they were agreed upon or because the
    connection is lost, are not, nor are errors where data is under way (``sends``): those who lose this rank then read
    what failed from the group's store. Under ``torch.compile`` it does nothing.

    Args:
        op: what failed, for the errors of the others.
        group: ``None`` for one rank.
        arguments: the tensors of the call: the others ask on their kind of device.
        asks: ``op`` is what ``agree`` is called with next. On CUDA, where ranks do not always ask, a message that they
            do not wait for would be taken for data: it is sent if they have never made that call, and from a block of
            which this is not known only if they have made none.
    """

    __slots__ = ("_arguments", "_asks", "_group", "_handled", "_op", "_outermost")

    def __init__(self, op: str, group: ProcessGroup | None, *arguments: object, asks: bool = False) -> None:
        self._op, self._arguments, self._asks = op, arguments, asks
        self._group = None if torch.compiler.is_compiling() else group

    def __enter__(self) -> None:
        if self._group is not None:
            self._handled = sys.exc_info()[1]
            self._outermost = self._group not in _thread.told
            if self._outermost:
                _thread.told[self._group] = []

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        group = self._group
        if group is None:
            return
        told = _thread.told.pop(group) if self._outermost else _thread.told[group]
        if isinstance(error, Exception) and not any(e in told or isinstance(e, PeerError) for e in self._chain(error)):
            told.append(error)
            with contextlib.suppress(Exception):  # this rank's own error says more
                self._announce(group, error)

    def _chain(self, error: BaseException) -> list[BaseException]:
        """The error and those that it came from, up to one that was being handled when the block began."""
        chain: list[BaseException] = []
        at: BaseException | None = error
        while at is not None and at is not self._handled and at not in chain:
            chain.append(at)
            at = at.__cause__ or at.__context__
        return chain

    def _announce(self, group: ProcessGroup, error: Exception) -> None:
        device = device_of_call(group_device_types(group), self._arguments) if group.size() > 1 else None
        if device is None:
            return
        if _asks_once(group, device) and any(not self._asks or op == self._op for op, _ in _asked.get(group, ())):
            return
        if isinstance(error, TypeError | ValueError | IndexError):
            text = f"found its arguments wrong: {error}"
        else:
            text = f"failed in {self._op}: {type(error).__name__}: {error}"
        publish_failure(group, text)
        if any(frame.f_code in _bodies for e in self._chain(error) for frame, _ in traceback.walk_tb(e.__traceback__)):
            return
        message = _message(group, Call(self._op, (), text), _FAILED, device)
        received = message.new_empty((group.size(), message.numel()))
        work = all_gather_single(received.view(-1), message, group=group, async_op=True)
        _posted.setdefault(group, []).append((work, message, received))


def agreed_error(group: ProcessGroup, message: str) -> ValueError:
    """An error that every rank of the group raises, so that nobody has to be told of it."""
    error = ValueError(message)
    if (told := _thread.told.get(group)) is not None:
        told.append(error)
    return error


def _forget_delivered(group: ProcessGroup) -> None:
    _posted[group] = [posted for posted in _posted[group] if not posted[0].is_completed()]
    if not _posted[group]:
        del _posted[group]
        retract_failure(group)


@atexit.register
def _leave() -> None:
    """A group whose ranks do not come for their message is not destroyed, since that would wait for them."""
    end = time.monotonic() + _LEAVING_SECONDS
    for group, messages in _posted.items():
        while (late := not all(work.is_completed() for work, *_ in messages)) and time.monotonic() < end:
            time.sleep(0.01)
        if late:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _ask(group: ProcessGroup, call: Call, device: torch.device) -> list[list[int]]:
    message = _message(group, call, _OK, device)
    received = message.new_empty((group.size(), message.numel()))
    with translate_backend_errors(call.op, group):
        all_gather_single(received.view(-1), message, group=group)
        messages = received.cpu()
    if group in _posted:
        _forget_delivered(group)
    end = 3 + 2 * group.size()
    numbers = messages[:, : 8 * end].contiguous().view(torch.int64).tolist()
    failed = [rank for rank, row in enumerate(numbers) if row[0] == _FAILED]
    if failed:
        raise agreed_error(group, f"{call.op}: rank {failed[0]} of the group {_text(messages[failed[0], 8 * end :])}")
    if len({row[1] for row in numbers}) > 1:
        texts = [_text(row[8 * end :]) for row in messages]
        raise agreed_error(group, f"{call.op}: the ranks of the group make different calls: {_who_calls_what(texts)}")
    return [row[3 : 3 + row[2]] for row in numbers]


def _text(message: Tensor) -> str:
    return bytes(message.tolist()).rstrip(b"\0").decode(errors="replace")


def _who_calls_what(texts: Sequence[str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items()
    )


def _message(group: ProcessGroup, call: Call, status: int, device: torch.device) -> Tensor:
    fingerprint = int.from_bytes(hashlib.blake2b(repr((call.op, call.same)).encode(), digest_size=7).digest(), "little")
    own = [*call.own, *[0] * (2 * group.size() - len(call.own))]
    numbers = torch.tensor([status, fingerprint, len(call.own), *own], dtype=torch.int64)
    words = call.text if isinstance(call.text, str) else call.text()
    text = words.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    return torch.cat([numbers.view(torch.uint8), torch.frombuffer(bytearray(text), dtype=torch.uint8)]).to(device)
