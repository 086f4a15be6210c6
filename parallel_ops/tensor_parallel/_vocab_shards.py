"""How the ranks of a group share a vocabulary, and the one all-gather of a vocab-parallel loss.

A rank must know where its shard starts before it can tell whose a target is, and ranks must agree on rows and options
before they exchange anything of that size. Both ride in the all-gather of the statistics itself: a message is a header
of a few integers and a payload of fixed size, the same in every call on every rank, so that ranks that disagree still
meet, read each other's headers, and all raise. A rank that finds its own arguments wrong says so in a header before it
raises.

    the layout is known (every call after the first)    one all-gather
    it is not, or some rank's shard changed its size    one all-gather without statistics, then as above
    the statistics are longer than the payload          a second all-gather, for them alone

On CPU every rank reads the headers. On CUDA that would mean waiting for the device, so they are read only by a rank
that does not know the layout, or that calls with this number of rows and these options for the first time; after that
they are compared on the device, and disagreement makes the losses NaN.
"""

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm._agreement import telling_of_failure
from parallel_ops.comm._group import resolve_group
from parallel_ops.comm._primitives import gathered

# 10,922 rows of plain fp32 statistics: enough for the usual batch, little enough to cost hardly more than no payload.
PAYLOAD_BYTES = 128 << 10

_UNKNOWN = -1
_FAILED = -2

R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class _Header:
    """What a rank tells the others with every message."""

    start: int = _UNKNOWN  # where it believes its shard to start,
    vocab: int = _UNKNOWN  # and how large it believes the vocabulary to be
    cols: int = 0
    rows: int = _FAILED
    agreed: int = 0  # fingerprint of the options that must be the same everywhere
    reads: int = 1
    bad_row: int = -1
    bad_target: int = 0


_HEADER_BYTES = 8 * len(dataclasses.fields(_Header))


def check_target_values(op: str, target: Tensor, vocab: int, ignore_index: int) -> None:
    """ValueError for a target outside the vocabulary on CPU; on CUDA the loss of such a row is NaN instead."""
    if target.device.type == "cpu" and (bad := _first_bad_target(target, vocab, ignore_index)) is not None:
        raise ValueError(_bad_target(op, *bad, vocab))


def _first_bad_target(target: Tensor, vocab: int, ignore_index: int) -> tuple[int, int] | None:
    flat = target.flatten()
    bad = ((flat < 0) | (flat >= vocab)) & (flat != ignore_index)
    if not bool(bad.any()):
        return None
    row = int(bad.int().argmax())
    return row, int(flat[row])


def _bad_target(op: str, row: int, value: int, vocab: int, where: str = "") -> str:
    return f"{op}: target {value} in row {row}{where} is outside the vocabulary [0, {vocab}) and is not ignore_index"


@contextlib.contextmanager
def announcing_failure(op: str, group: str | None, *arguments: object) -> Iterator[None]:
    """Tells the other ranks of an error of the block, which this rank alone may have, so that they do not wait.

    Args:
        arguments: the tensors of the call: the others exchange messages on their kind of device.
    """

    def announce(process_group: ProcessGroup, device: torch.device, _: Exception) -> None:
        gathered(op, _message(_tensor([_Header()], device)[0], None), process_group)

    with telling_of_failure(group, arguments, announce):
        yield


def _tensor(headers: Sequence[_Header], device: torch.device) -> Tensor:
    return torch.tensor([dataclasses.astuple(h) for h in headers], dtype=torch.int64, device=device)


def _message(header: Tensor, payload: Tensor | None) -> Tensor:
    message = torch.empty(_HEADER_BYTES + PAYLOAD_BYTES, dtype=torch.uint8, device=header.device)
    message[:_HEADER_BYTES] = header.view(torch.uint8)
    if payload is not None:
        message[_HEADER_BYTES : _HEADER_BYTES + payload.nbytes] = payload.flatten().view(torch.uint8)
    return message


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shard sizes of a group, in rank order, seen from one rank."""

    sizes: tuple[int, ...]
    rank: int

    @property
    def starts(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(self.sizes))[:-1]

    @property
    def start(self) -> int:
        return self.starts[self.rank]

    @property
    def vocab(self) -> int:
        return sum(self.sizes)


class _GroupState:
    """What this process remembers of a group."""

    def __init__(self) -> None:
        self.layouts: dict[int, Layout] = {}  # by the size of this rank's shard: a model may have several vocabularies
        self.headers: dict[tuple[Layout, int, int], Tensor] = {}  # on CUDA: what all ranks are expected to send


_states: weakref.WeakKeyDictionary[ProcessGroup, _GroupState] = weakref.WeakKeyDictionary()


def known_layout(group: str, cols: int) -> Layout:
    """The layout that the forward of this rank's shard of ``cols`` columns found."""
    return _states[resolve_group(group)].layouts[cols]


class _LayoutChanged(Exception):
    """Some rank did not know the layout of the group, which is known now."""


class VocabShards:
    """One call of a vocab-parallel loss on this rank. ``agreed`` is what all ranks must pass alike."""

    def __init__(self, op: str, group: str, cols: int, target: Tensor, ignore_index: int, agreed: tuple[object, ...]):
        self.op, self.cols, self.target, self.ignore_index = op, cols, target, ignore_index
        self.group = resolve_group(group)
        self._agreed = hash(agreed)  # of numbers: the same in every process
        self._sent: dict[tuple[Layout, int, int], Tensor] = {}
        self._state = _states.setdefault(self.group, _GroupState())
        self._on_cpu = target.device.type == "cpu"

    def with_layout(self, call: Callable[[Layout], R]) -> R:
        """``call(layout)``; again if a rank turned out not to know the layout, so that every rank takes part again."""
        while True:
            try:
                return call(self._state.layouts.get(self.cols) or self._learn_layout())
            except _LayoutChanged:
                continue

    def _learn_layout(self) -> Layout:
        header = _Header(cols=self.cols, rows=self.target.numel(), agreed=self._agreed)
        self._read(gathered(self.op, _message(_tensor([header], self.target.device)[0], None), self.group))
        raise AssertionError("unreachable: this rank's own header does not know the layout")

    def gather(self, layout: Layout, statistics: Tensor) -> Tensor:
        """``statistics`` of all ranks, stacked in rank order."""
        payload = statistics if statistics.nbytes <= PAYLOAD_BYTES else None
        received = self._exchange(layout, payload)  # read before a gather of a size that ranks may disagree on
        if payload is None:
            whole = gathered(self.op, statistics, self.group)
        else:
            end = _HEADER_BYTES + payload.nbytes
            whole = received[:, _HEADER_BYTES:end].contiguous().view(statistics.dtype).view(-1, *statistics.shape)
        if not self._on_cpu:
            agree = (_headers(received) == self._expected(layout)).all()
            whole = torch.where(agree, whole, torch.nan)
        return whole

    def agree(self, layout: Layout) -> None:
        """Checks that all ranks make the same call, for callers that exchange something else before ``gather``."""
        self._exchange(layout, None)

    def _exchange(self, layout: Layout, payload: Tensor | None) -> Tensor:
        """The messages of all ranks, and what they give reason to raise, where this rank reads them."""
        read = self._on_cpu or self._key(layout) not in self._state.headers
        own = self._expected(layout)[self.group.rank()]
        received = gathered(self.op, _message(own, payload), self.group)
        if read:
            try:
                self._read(received)
            except (ValueError, _LayoutChanged):
                # A call that failed is not known: the next of its kind is read again.
                self._state.headers.pop(self._key(layout), None)
                raise
        return received

    def _key(self, layout: Layout) -> tuple[Layout, int, int]:
        return layout, self.target.numel(), self._agreed

    def _expected(self, layout: Layout) -> Tensor:
        """The headers of all ranks as they should be; on CPU this rank's says whether a target is wrong."""
        key = self._key(layout)
        known = self._sent if self._on_cpu else self._state.headers  # on CPU a header depends on the target's values
        if key not in known:
            headers = [
                _Header(start, layout.vocab, cols, self.target.numel(), self._agreed, reads=int(self._on_cpu))
                for start, cols in zip(layout.starts, layout.sizes, strict=True)
            ]
            if self._on_cpu and (bad := _first_bad_target(self.target, layout.vocab, self.ignore_index)) is not None:
                headers[layout.rank] = dataclasses.replace(headers[layout.rank], bad_row=bad[0], bad_target=bad[1])
            known[key] = _tensor(headers, self.target.device)
        return known[key]

    def _read(self, received: Tensor) -> None:
        """Raises what any rank's header gives reason for; every rank that reads raises the same."""
        headers = [_Header(*values) for values in _headers(received).tolist()]
        failed = [rank for rank, h in enumerate(headers) if h.rows == _FAILED]
        if failed:
            raise ValueError(f"{self.op}: rank {failed[0]} of the group found its arguments wrong; see its error")
        if len({h.rows for h in headers}) > 1:
            raise ValueError(
                f"{self.op}: the ranks of the group must have the same rows, got {[h.rows for h in headers]} rows"
            )
        if len({h.agreed for h in headers}) > 1:
            raise ValueError(f"{self.op}: the ranks of the group must pass the same options and dtypes")
        layout = Layout(tuple(h.cols for h in headers), self.group.rank())
        bad = [(rank, h) for rank, h in enumerate(headers) if h.bad_row >= 0 and h.vocab == layout.vocab]
        if bad:
            rank, h = bad[0]
            raise ValueError(_bad_target(self.op, h.bad_row, h.bad_target, layout.vocab, f" (on rank {rank})"))
        self._state.layouts[self.cols] = layout
        if all((h.start, h.vocab) == (start, layout.vocab) for h, start in zip(headers, layout.starts, strict=True)):
            return
        if not all(h.reads for h in headers):
            raise ValueError(
                f"{self.op}: some ranks changed the size of their vocabulary shard and others did not; "
                "use another process group for another split of the vocabulary"
            )
        raise _LayoutChanged


def _headers(received: Tensor) -> Tensor:
    return received[:, :_HEADER_BYTES].contiguous().view(torch.int64)
