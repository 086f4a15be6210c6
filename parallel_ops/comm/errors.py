"""The board on which ranks write that they failed or lost others, and the errors made of it.

A backend's own error names an address at best. A rank that loses its connection therefore writes to the board in the
group's store, waits a moment for the other ranks to do so, and names those that have not: they are gone, stuck, or (in
a large group) have not noticed yet. A rank that fails also writes its error there, for ranks that lose it when it ends.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.compat import group_store

# Long enough for ranks that time out in the same collective, which they entered at slightly different times.
REPORT_SECONDS = 1.0
_POLL_SECONDS = 0.02


class PeerError(RuntimeError):
    """A rank of the group is gone, stuck, or makes other calls. The message names the op and, if known, the rank.

    Examples:
        >>> from parallel_ops import PeerError
        >>> try:
        ...     raise PeerError("all_gather: rank 1 is gone")
        ... except RuntimeError as error:
        ...     print(error)
        all_gather: rank 1 is gone
    """


class Board:
    """Texts that ranks write for each other in a store, one for each topic and rank.

    Needs no process group: it works before one is made, and for ranks whose connections are lost. The store's errors
    are raised as they are.

    Args:
        store: A store, or a client of its own for each thread: a client handles one request at a time.
        prefix: Separates boards of one store.
    """

    def __init__(self, store: Any, rank: int, ranks: int, prefix: str = "parallel_ops/board") -> None:
        self.store, self.rank, self.ranks, self._prefix = store, rank, ranks, prefix

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._prefix}/{topic}/{rank}"

    def write(self, topic: str, text: str = "-") -> None:
        """Writes this rank's text, which replaces an earlier one."""
        self.store.set(self._key(topic, self.rank), text)

    def write_first(self, topic: str, text: str) -> str:
        """Writes a text in the place of rank 0, unless a rank has; returns the text there."""
        return str(self.store.compare_set(self._key(topic, 0), "", text).decode(errors="replace"))

    def erase(self, topic: str) -> None:
        """Removes this rank's text."""
        self.store.delete_key(self._key(topic, self.rank))

    def having(self, topic: str, ranks: Iterable[int]) -> list[int]:
        """The members of ``ranks`` that have written."""
        return [rank for rank in ranks if self.store.check([self._key(topic, rank)])]

    def read(self, topic: str, ranks: Iterable[int]) -> dict[int, str]:
        """The texts of ``ranks``, which have written; in one request if the store can."""
        ranks = list(ranks)
        keys = [self._key(topic, rank) for rank in ranks]
        found = self.store.multi_get(keys) if self.store.has_extended_api() else [self.store.get(key) for key in keys]
        return {rank: text.decode(errors="replace") for rank, text in zip(ranks, found, strict=True)}

    def await_all(
        self, topic: str, ranks: Iterable[int], seconds: float, *, until: Callable[[], bool] = lambda: False
    ) -> list[int]:
        """Waits until ``ranks`` have written, or ``until`` returns true; returns those that have not."""
        missing, end = list(ranks), time.monotonic() + seconds
        while True:
            there = self.having(topic, missing)
            missing = [rank for rank in missing if rank not in there]
            if not missing or until() or time.monotonic() > end:
                return missing
            time.sleep(_POLL_SECONDS)

    def wait(self, topic: str, rank: int, seconds: float) -> str:
        """The text of one rank, for which many may wait.

        Raises:
            torch.distributed.DistStoreError: It did not come in time.
        """
        key = self._key(topic, rank)
        self.store.wait([key], timedelta(seconds=seconds))
        return str(self.store.get(key).decode(errors="replace"))

    def leave(self, seconds: float) -> None:
        """Waits a moment until all ranks have called it, since the store may end with this process."""
        key, end = self._key("left", 0), time.monotonic() + seconds
        left = self.store.add(key, 1)
        while left < self.ranks and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            left = self.store.add(key, 0)


def board_of(group: ProcessGroup) -> Board:
    """The board of a process group."""
    return Board(group_store(group), group.rank(), group.size(), f"parallel_ops/board/{group.group_name}")


class translate_backend_errors:
    """Turns an error of the backend in the block into a PeerError that names op, rank and suspects."""

    __slots__ = ("_group", "_op", "_what")

    def __init__(self, op: str, group: ProcessGroup, what: str = "lost the other ranks") -> None:
        self._op, self._group, self._what = op, group, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        # Running out of memory does not mean that another rank failed.
        if isinstance(error, RuntimeError) and not isinstance(error, PeerError | torch.OutOfMemoryError):
            group = self._group
            raise PeerError(
                f"{self._op}: rank {group.rank()} of {group.size()} {self._what}; {_suspects(group)}: {error}"
            ) from error


def _suspects(group: ProcessGroup) -> str:
    """Reports that this rank lost others, and names the ranks that do not."""
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    try:
        board = board_of(group)
        board.write("lost")
        missing = board.await_all("lost", others, REPORT_SECONDS)
        failures = board.read("failed", board.having("failed", others))
    except RuntimeError:
        return "the job's store is gone too, and with it probably rank 0 of the job"
    suspects = f"no report from {named(missing)} of the group" if missing else "all ranks reported a failure"
    return suspects + "".join(f"; rank {rank} {text}" for rank, text in failures.items())


def publish_failure(group: ProcessGroup, text: str) -> None:
    """Writes what failed on this rank, for ranks that lose it."""
    with contextlib.suppress(RuntimeError):
        board_of(group).write("failed", text)


def retract_failure(group: ProcessGroup) -> None:
    """Removes what ``publish_failure`` wrote."""
    with contextlib.suppress(RuntimeError):
        board_of(group).erase("failed")


@contextlib.contextmanager
def published_errors(group: ProcessGroup) -> Iterator[None]:
    """Publishes an error in the block for ranks that wait for messages of this one."""
    try:
        yield
    except Exception as error:
        publish_failure(group, f"raised {type(error).__name__}: {error}")
        raise


def named(ranks: Iterable[int]) -> str:
    """Formats ranks: ``"rank 3"``, ``"ranks 0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {', '.join(parts)}"
