"""Errors of lost connections, with the op, the rank, and the ranks that have not reported.

A backend's own error names an address at best. A rank that loses its connection therefore writes a key to the group's
store, waits a moment for the keys of the other ranks, and names those without one: they are gone, stuck, or (in a large
group) have not noticed yet. A rank that fails also publishes its error there, for ranks that lose it when it ends.
"""

import contextlib
import time
from types import TracebackType

import torch
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.compat import group_store


class PeerError(RuntimeError):
    """A rank of the group is gone, stuck, or makes other calls. The message names the op and, if known, the rank."""


# Long enough for ranks that time out in the same collective, which they entered at slightly different times.
REPORT_SECONDS = 1.0
_POLL_SECONDS = 0.02


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
                f"{self._op}: rank {group.rank()} of {group.size()} {self._what}; {_silent(group)}: {error}"
            ) from error


def _silent(group: ProcessGroup) -> str:
    """Writes this rank's key and names the ranks without one."""
    missing = [rank for rank in range(group.size()) if rank != group.rank()]
    end = time.monotonic() + REPORT_SECONDS
    try:
        store = group_store(group)
        store.set(_lost_key(group, group.rank()), "1")
        while missing and time.monotonic() < end:
            missing = [rank for rank in missing if not store.check([_lost_key(group, rank)])]
            time.sleep(_POLL_SECONDS)
        failures = [
            f"; rank {rank} {store.get(_failure_key(group, rank)).decode(errors='replace')}"
            for rank in range(group.size())
            if rank != group.rank() and store.check([_failure_key(group, rank)])
        ]
    except RuntimeError:
        return "the job's store is gone too, and with it probably rank 0 of the job"
    if not missing:
        return "all ranks reported a failure" + "".join(failures)
    silent = f"no report from rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of the group"
    return silent + "".join(failures)


def publish_failure(group: ProcessGroup, text: str) -> None:
    """Publishes what failed on this rank, for ranks that lose it."""
    with contextlib.suppress(RuntimeError):
        group_store(group).set(_failure_key(group, group.rank()), text)


def retract_failure(group: ProcessGroup) -> None:
    """Removes what ``publish_failure`` wrote."""
    with contextlib.suppress(RuntimeError):
        group_store(group).delete_key(_failure_key(group, group.rank()))


def _lost_key(group: ProcessGroup, rank: int) -> str:
    return f"parallel_ops/lost/{group.group_name}/{rank}"


def _failure_key(group: ProcessGroup, rank: int) -> str:
    return f"parallel_ops/failed/{group.group_name}/{rank}"
