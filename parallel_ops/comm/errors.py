"""What a rank says when it loses the others: which op, which rank, and who else has not been heard of.

A backend's own error names an address at best. So every rank that loses contact leaves a note in the store of its
group, waits a moment for the notes of the others, and names those who left none: they are gone, stuck, or (in a large
group) have not noticed yet. A rank that fails leaves word of what failed there too, for those who lose it because it
has ended.
"""

import contextlib
import time
from types import TracebackType

import torch
from torch.distributed import ProcessGroup

from parallel_ops._internal.compat import group_store


class PeerError(RuntimeError):
    """A rank of the group is gone, stuck, or does something else. The message names it, if known, and the op."""


class TransportUnavailable(RuntimeError):
    """A transport that this machine, driver or backend does not have. The message says what is missing."""


# Long enough for ranks that time out in the same collective, which they entered at slightly different times.
NOTE_SECONDS = 1.0
_POLL_SECONDS = 0.02


class translate_backend_errors:
    """Turns an error of the backend in the block into a PeerError that names op, rank and suspects."""

    __slots__ = ("_group", "_op", "_what")

    def __init__(self, op: str, group: ProcessGroup, what: str = "lost the other ranks") -> None:
        self._op, self._group, self._what = op, group, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        # Running out of memory is no news of a peer.
        if isinstance(error, RuntimeError) and not isinstance(error, PeerError | torch.OutOfMemoryError):
            group = self._group
            raise PeerError(
                f"{self._op}: rank {group.rank()} of {group.size()} {self._what}; {_silent(group)}: {error}"
            ) from error


def _silent(group: ProcessGroup) -> str:
    """Leaves this rank's note and says who has left none."""
    missing = [rank for rank in range(group.size()) if rank != group.rank()]
    end = time.monotonic() + NOTE_SECONDS
    try:
        store = group_store(group)
        store.set(_note(group, group.rank()), "1")
        while missing and time.monotonic() < end:
            missing = [rank for rank in missing if not store.check([_note(group, rank)])]
            time.sleep(_POLL_SECONDS)
        said = [
            f"; rank {rank} {store.get(_word(group, rank)).decode(errors='replace')}"
            for rank in range(group.size())
            if rank != group.rank() and store.check([_word(group, rank)])
        ]
    except RuntimeError:
        return "the job's store is gone too, and with it probably rank 0 of the job"
    if not missing:
        return "all ranks reported a failure" + "".join(said)
    silent = f"no word from rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of the group"
    return silent + "".join(said)


def publish_failure(group: ProcessGroup, text: str) -> None:
    """Of what failed on this rank, for ranks that lose it."""
    with contextlib.suppress(RuntimeError):
        group_store(group).set(_word(group, group.rank()), text)


def retract_failure(group: ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError):
        group_store(group).delete_key(_word(group, group.rank()))


def _note(group: ProcessGroup, rank: int) -> str:
    return f"parallel_ops/lost/{group.group_name}/{rank}"


def _word(group: ProcessGroup, rank: int) -> str:
    return f"parallel_ops/failed/{group.group_name}/{rank}"
