"""Checks that all ranks make the same call, before data moves, so that a disagreement raises on every rank.

Each rank gathers one message of fixed size from every other: a fingerprint of what must be the same, a few integers
that may differ (shard sizes, for example) and a text for the error. All ranks read the same messages, so all raise the
same error. This is the package's only protocol: the message precedes whatever an op sends, in its backward too, so a
rank that leaves out an op or a backward ends all ranks with an error that names both calls. On CPU messages travel
point to point with a tag of their own, so that no backend takes data for a message or a message for data.

A rank that fails alone (an error inside ``propagate_errors``) posts such a message, does not wait for its delivery, and
raises at once. The other ranks read it at their next check and raise too. All ranks have then made the same number of
checks, so the group stays usable.

With CPU tensors every call is checked, by one small all-gather; ``set_consistency_checks`` can limit this to the first
call of a kind, for models so small that it shows. With CUDA tensors reading the result waits for the device, so only
the first call of a kind in a group is checked, and always before it is captured in a CUDA graph: make each call once
before capturing. A disagreement from the start raises on all ranks. If a rank deviates later, from calls that the
others have made before, the group's timeout ends it, or gloo aborts a process that receives more bytes than it expects.
"""

import atexit
import contextlib
import ctypes
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import CodeType, TracebackType
from typing import Literal, NamedTuple, TypeVar

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from parallel_ops._internal.distributed.compat import suspended_modes
from parallel_ops._internal.distributed.groups import device_of_call, group_device_types
from parallel_ops.comm.call_messages import FAILED, OK, Gather, message_of, texts_of, who_calls_what
from parallel_ops.comm.errors import PeerError, publish_failure, retract_failure, translate_backend_errors

# The calls that were checked before, where one check is enough, as (op, what must be the same). It must not depend on
# what may differ between ranks, or some ranks would check and others not.
_checked: weakref.WeakKeyDictionary[ProcessGroup, set[tuple[str, tuple[object, ...]]]] = weakref.WeakKeyDictionary()
# Programs whose shapes never repeat would fill memory. All ranks clear the set at the same call.
_MOST_CHECKED = 4096

# Groups in which calls with CPU tensors are checked once, like those with CUDA tensors.
_first_only: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()

# What other ranks may not have read yet, with its buffers, by group: failures, and this rank's message beside one.
_posted: dict[ProcessGroup, list["Gather"]] = {}
# The same in groups that have lost a rank, which end when the user ends them: the others wait for it meanwhile.
_last_message: weakref.WeakKeyDictionary[ProcessGroup, "Gather"] = weakref.WeakKeyDictionary()
# How long a process that ends waits for their delivery.
_LEAVING_SECONDS = 2.0

# Code marked with ``communicates``.
_bodies: set[CodeType] = set()


class _Thread(threading.local):
    """For each group with an open ``propagate_errors`` block: the errors that its ranks have received."""

    def __init__(self) -> None:
        self.reported: dict[ProcessGroup, list[BaseException]] = {}


_thread = _Thread()

F = TypeVar("F", bound=Callable[..., object])


class CallSignature(NamedTuple):
    """A call as the other ranks see it.

    Args:
        op: the function that the user called.
        same: what must be the same on every rank; compared by ``repr``.
        text: the call as text, for the error, or a function that makes it, called only if the call is checked.
        own: integers that may differ between ranks; their number must follow from ``same``.
    """

    op: str
    same: tuple[object, ...]
    text: str | Callable[[], str]
    own: tuple[int, ...] = ()


def set_consistency_checks(group: ProcessGroup, when: Literal["always", "first"]) -> None:
    """Sets how often calls with CPU tensors in ``group`` are compared between ranks.

    Args:
        group: all of its ranks must set the same between the same calls.
        when: ``"always"``, the default: a small all-gather before data moves, so that ranks that disagree all raise.
            ``"first"``: only at the first call of a kind, as with CUDA tensors. A disagreement from the start then
            raises on all ranks, a rank that deviates later ends in the group's timeout or an abort of gloo, and targets
            outside a sharded vocabulary are not detected.

    Raises: TypeError: ``group`` is not a process group. ValueError: another ``when``.
    """
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"set_consistency_checks: group must be a torch.distributed.ProcessGroup, got {type(group).__name__}"
        )
    if when not in ("always", "first"):
        raise ValueError(f"set_consistency_checks: when must be 'always' or 'first', got {when!r}")
    (_first_only.add if when == "first" else _first_only.discard)(group)


def _checks_once(group: ProcessGroup, device: torch.device) -> bool:
    return device.type == "cuda" or group in _first_only


def check_consistency(
    group: ProcessGroup, call: CallSignature, device: torch.device, *, known: bool = True
) -> list[list[int]] | None:
    """Compares ``call`` between the ranks of ``group``.

    Args:
        device: Device of the call's tensors.
        known: ``False`` if the result is needed even for a call that was checked before.

    Returns:
        ``call.own`` of every rank, in rank order, at most two integers per rank of the group; ``None`` if the call was
        checked before.

    Raises:
        ValueError: on every rank, if the ranks make different calls or one of them failed.
        RuntimeError: a call that must be checked is being captured in a CUDA graph.
    """
    if not _checks_once(group, device):
        return _compare(group, call, device)
    checked, key = _checked.setdefault(group, set()), (call.op, call.same)
    if known and key in checked:
        return None
    refuse_capture(
        call.op,
        device.type,
        "the first call of its kind cannot be captured in a CUDA graph, since the ranks compare their arguments; "
        "make it once before capturing",
    )
    result = _compare(group, call, device)
    if len(checked) >= _MOST_CHECKED:
        checked.clear()
    checked.add(key)
    return result


def refuse_capture(op: str, device_type: str, what: str) -> None:
    """RuntimeError if the current stream is being captured in a CUDA graph."""
    if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{op}: {what}")


def communicates(body: F) -> F:
    """Marks a function that checks and then sends data.

    An error out of it is not posted, since the other ranks would take the message for data.
    """
    _bodies.add(body.__code__)
    return body


class propagate_errors:
    """Makes an error of the block, which may be this rank's alone, an error on the other ranks too.

    Put it around what ends in a collective: the checks of an op, the forward of a module. Blocks of one group may be
    nested; an error is posted once. Not posted are errors that the other ranks raise anyway (from a check, or because
    the connection is lost) and errors while data is being sent (``communicates``): ranks that lose this one then read
    what failed from the group's store. Under ``torch.compile`` the block does nothing.

    Args:
        op: What failed, for the errors on the other ranks.
        group: ``None`` for one rank.
        arguments: The tensors of the call. The other ranks check on their kind of device.
        checked: ``op`` is the next call given to ``check_consistency``. On CUDA, where not every call is checked, the
            others could take a message for data: it is sent only if they have never made that call, or, if
            ``checked`` is False, only if they have made no call.
    """

    __slots__ = ("_arguments", "_checked", "_group", "_handled", "_op", "_outermost")

    def __init__(self, op: str, group: ProcessGroup | None, *arguments: object, checked: bool = False) -> None:
        self._op, self._arguments, self._checked = op, arguments, checked
        self._group = None if torch.compiler.is_compiling() else group

    def __enter__(self) -> None:
        if self._group is not None:
            self._handled = sys.exc_info()[1]
            self._outermost = self._group not in _thread.reported
            if self._outermost:
                _thread.reported[self._group] = []

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        group = self._group
        if group is None:
            return
        reported = _thread.reported.pop(group) if self._outermost else _thread.reported[group]
        if isinstance(error, Exception) and not any(
            e in reported or isinstance(e, PeerError) for e in self._chain(error)
        ):
            reported.append(error)
            with contextlib.suppress(Exception):  # this rank's own error is more specific
                self._post(group, error)

    def _chain(self, error: BaseException) -> list[BaseException]:
        """The error and its causes, up to one that was being handled when the block began."""
        chain: list[BaseException] = []
        at: BaseException | None = error
        while at is not None and at is not self._handled and at not in chain:
            chain.append(at)
            at = at.__cause__ or at.__context__
        return chain

    def _post(self, group: ProcessGroup, error: Exception) -> None:
        device = device_of_call(group_device_types(group), self._arguments) if group.size() > 1 else None
        if device is None:
            return
        if _checks_once(group, device) and any(
            not self._checked or op == self._op for op, _ in _checked.get(group, ())
        ):
            return
        if isinstance(error, TypeError | ValueError | IndexError):
            text = f"rejected its arguments: {error}"
        else:
            text = f"failed in {self._op}: {type(error).__name__}: {error}"
        publish_failure(group, text)
        if any(frame.f_code in _bodies for e in self._chain(error) for frame, _ in traceback.walk_tb(e.__traceback__)):
            return
        message = message_of(group, self._op, (), (), text, FAILED, device)
        _posted.setdefault(group, []).append(Gather(group, message))


def shared_error(group: ProcessGroup, message: str) -> ValueError:
    """An error that every rank of the group raises, so that ``propagate_errors`` does not post it."""
    error = ValueError(message)
    if (reported := _thread.reported.get(group)) is not None:
        reported.append(error)
    return error


@atexit.register
def _leave() -> None:
    """Waits a moment for ranks that have not read a failure of this one."""
    end = time.monotonic() + _LEAVING_SECONDS
    for group, gathers in _posted.items():
        for gather in gathers:
            try:
                left = timedelta(seconds=max(0.01, end - time.monotonic()))
                gather.receive(left)
                gather.sent(left)
            except RuntimeError:
                # Destroying the group would wait for its other ranks.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                break


def _compare(group: ProcessGroup, call: CallSignature, device: torch.device) -> list[list[int]]:
    if is_in_torch_dispatch_mode():
        # Selective recomputation would take what was received for a result that it has kept, and not receive it again.
        with suspended_modes():
            return _exchange(group, call, device)
    return _exchange(group, call, device)


def _exchange(group: ProcessGroup, call: CallSignature, device: torch.device) -> list[list[int]]:
    words = call.text if isinstance(call.text, str) else call.text()
    with translate_backend_errors(call.op, group):
        gather = Gather(group, message_of(group, call.op, call.same, call.own, words, OK, device))
    try:
        with translate_backend_errors(call.op, group):
            messages = gather.receive()
    except PeerError:
        _last_message[group] = gather
        raise
    if _posted.pop(group, None):  # messages arrive in order
        retract_failure(group)
    end = 3 + 2 * group.size()
    numbers = messages[:, : 8 * end].contiguous().view(torch.int64).tolist()
    failed = [rank for rank, row in enumerate(numbers) if row[0] == FAILED]
    if failed:
        # No wait for the sends: that rank may be gone, and gloo does not end a send under way before the timeout.
        _posted[group] = [gather]
        text = texts_of(messages[failed, 8 * end :])[0][1]
        raise shared_error(group, f"{call.op}: rank {failed[0]} of the group {text}")
    with translate_backend_errors(call.op, group):
        gather.sent()
    if len({row[1] for row in numbers}) > 1:
        calls = texts_of(messages[:, 8 * end :])
        same_op = len({op for op, _ in calls}) == 1
        texts = [text if same_op else f"{op} ({text})" for op, text in calls]
        raise shared_error(group, f"{call.op}: the ranks of the group make different calls: {who_calls_what(texts)}")
    return [row[3 : 3 + row[2]] for row in numbers]
