"""Do all ranks make the same call? Asked before data moves, so that a disagreement is an error on every rank.

Each rank gathers one message of fixed size from every other: a fingerprint of what must be the same, a few integers
that may differ (shard sizes, say) and a sentence for the error. Since all ranks read the same messages, all raise the
same error. A rank that finds its own arguments wrong says what is wrong in a message before it raises.

With CPU tensors every call asks: one small all-gather. With CUDA tensors reading the answer means waiting for the
device, so a rank asks only the first time that it makes a call in the group (and before it is captured in a CUDA
graph, so make each call once before capturing). What ranks do wrong there from the start is an error on all of them. If
one deviates later, from calls that others have made before, those others do not ask, and the group's timeout ends it.
"""

import contextlib
import dataclasses
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm._capture import refuse_capture
from parallel_ops.comm._compat import all_gather_single
from parallel_ops.comm._failure import naming_peers
from parallel_ops.comm._group import device_of_call, group_device_types, resolve_group
from parallel_ops.comm.transport import PeerError

_TEXT_BYTES = 256
_OK, _FAILED = 0, 1

# What this process asked about before, on CUDA, as (op, what must be the same). It must not depend on what may differ
# between ranks, or some would ask and others not.
_asked: weakref.WeakKeyDictionary[ProcessGroup, set[tuple[str, tuple[object, ...]]]] = weakref.WeakKeyDictionary()
# Programs whose shapes never repeat would fill memory; all ranks forget at the same call.
_MOST_ASKED = 4096


@dataclasses.dataclass(frozen=True)
class Call:
    """A call as the other ranks see it.

    Args:
        op: the function that the user called.
        same: what must be the same on every rank; compared by ``repr``.
        text: the call in words, for the error.
        own: integers that may differ between ranks, as many on every rank as ``same`` implies.
    """

    op: str
    same: tuple[object, ...]
    text: str
    own: tuple[int, ...] = ()


def agree(group: ProcessGroup, call: Call, device: torch.device) -> list[list[int]] | None:
    """``call.own`` of every rank, in rank order, at most two integers per rank of the group; ``None`` if not asked.

    Raises:
        ValueError: on every rank, if the ranks make different calls or one of them announced a failure.
        RuntimeError: the ranks have to ask, and the call is being captured in a CUDA graph.
    """
    if device.type == "cpu":
        return _ask(group, call, device)
    asked, key = _asked.setdefault(group, set()), (call.op, call.same)
    if key in asked:
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


@contextlib.contextmanager
def announcing_failure(op: str, group: str | None, *arguments: object) -> Iterator[None]:
    """Tells the other ranks of an error of the block, which this rank alone may have, so that they do not wait.

    Args:
        arguments: the tensors of the call: the others ask on their kind of device.
    """

    def announce(process_group: ProcessGroup, device: torch.device, error: Exception) -> None:
        if device.type == "cuda" and any(op == known for known, _ in _asked.get(process_group, ())):
            return  # the others may not ask, and would take the message for data
        _exchange(op, process_group, _message(process_group, Call(op, (), str(error)), _FAILED, device))

    with telling_of_failure(group, arguments, announce):
        yield


@contextlib.contextmanager
def telling_of_failure(
    group: str | None, arguments: Sequence[object], announce: Callable[[ProcessGroup, torch.device, Exception], object]
) -> Iterator[None]:
    """After an error of the block in its arguments calls ``announce``: group, where its message must be, the error."""
    try:
        yield
    except (TypeError, ValueError, IndexError) as error:
        if group is not None and not torch.compiler.is_compiling():
            process_group = resolve_group(group)
            device = device_of_call(group_device_types(process_group), arguments)
            if device is not None:
                with contextlib.suppress(PeerError):  # this rank's own error says more
                    announce(process_group, device, error)
        raise


def _ask(group: ProcessGroup, call: Call, device: torch.device) -> list[list[int]]:
    messages = _exchange(call.op, group, _message(group, call, _OK, device))
    end = 3 + 2 * group.size()
    numbers = messages[:, : 8 * end].contiguous().view(torch.int64).tolist()
    failed = [rank for rank, row in enumerate(numbers) if row[0] == _FAILED]
    if failed:
        what = _text(messages[failed[0], 8 * end :])
        raise ValueError(f"{call.op}: rank {failed[0]} of the group found its arguments wrong: {what}")
    if len({row[1] for row in numbers}) > 1:
        texts = [_text(row[8 * end :]) for row in messages]
        raise ValueError(f"{call.op}: the ranks of the group make different calls: {_who_calls_what(texts)}")
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
    text = call.text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    return torch.cat([numbers.view(torch.uint8), torch.frombuffer(bytearray(text), dtype=torch.uint8)]).to(device)


def _exchange(op: str, group: ProcessGroup, message: Tensor) -> Tensor:
    received = message.new_empty((group.size(), message.numel()))
    with naming_peers(op, group):
        all_gather_single(received.view(-1), message, group=group)
        return received.cpu()
announcing = announcing_failure  # SHIM
