"""Compares what must be the same on every rank, before a mesh or a model is built.

Each rank writes its values to the store; rank 0 reads them all and writes one answer, which every rank reads: nothing,
or the error that all of them raise. So it needs no process group, which ranks of different plans or devices could not
form. Messages are the same on every rank.

All settings are compared, but for those of ``FREE``. Paths of data may differ, since nodes may have copies of their
own: the numbers of tokens and documents in them are compared instead. ``logging`` is for rank 0 alone.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import parallel_ops
from parallel_ops._internal.compat import group_store
from parallel_ops.comm import PeerError
from parallel_ops.train.launch.rendezvous import named

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings

# Sections, and keys of sections, that may differ between ranks.
FREE = ("logging", "data.paths")

_POLL_SECONDS = 0.02
# Rank 0 answers when its own wait is over, so the others wait a little longer.
_ANSWER_SECONDS = 10.0
# How long a rank that is to raise waits until the others have read the answer: the store may end with its process.
_LEAVING_SECONDS = 2.0
# Of keys that differ in an error; two files that have nothing in common would fill the screen.
_MOST_KEYS = 8


class Disagreement(ValueError):
    """Ranks that would not train the same run: the message names keys, values and ranks. Raised on every rank."""


def values_of(settings: "Settings") -> dict[str, Any]:
    """What must be the same on every rank, by ``section.key``: settings with their defaults, and versions."""
    sections = settings.model_dump(mode="json")
    sections["model"] |= dataclasses.asdict(settings.config)  # what a folder says, and defaults
    sections["data"]["seq_length"] = settings.seq_length
    found = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    free = {name for name in found if name in FREE or name.partition(".")[0] in FREE}
    versions = {"parallel_ops": parallel_ops.__version__, "torch": str(torch.__version__)}
    return versions | {name: value for name, value in found.items() if name not in free}


class Comparison:
    """One comparison between all ranks of a store: ``with Comparison(...) as compare: compare(values)``.

    An error of the block on one rank raises ``Disagreement`` on the others, with rank and message.

    Args:
        store: with a prefix that no other comparison has.
        seconds: how long to wait for the others.
    """

    def __init__(self, store: Any, rank: int, ranks: int, seconds: float) -> None:
        self._store = dist.PrefixStore("parallel_ops/comparison", store)  # type: ignore[attr-defined]
        self._rank, self._ranks, self._seconds = rank, ranks, seconds

    def __enter__(self) -> "Comparison":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Disagreement):
            self.fail(error)

    def __call__(self, values: Mapping[str, Any]) -> None:
        """Compares values that JSON can have; all ranks call it.

        Raises:
            Disagreement: on every rank, if a value differs, a rank failed before it came here, or does not come.
            PeerError: the store is gone.
        """
        if self._ranks == 1:
            return
        self._store.set(f"said/{self._rank}", json.dumps({"values": values}, default=str))
        if self._rank == 0:
            self._store.set("answer", self._judge())
        try:
            self._store.wait(["answer"], timedelta(seconds=self._seconds + _ANSWER_SECONDS))
            message = self._store.get("answer").decode()
        except dist.DistStoreError:
            raise Disagreement(f"rank 0 has not compared settings within {self._seconds:g} s") from None
        except dist.DistError as error:
            raise PeerError(f"rank 0 has ended before it compared settings: {error}") from error
        if message:
            self._leave()
            raise Disagreement(message)

    def fail(self, error: BaseException) -> None:
        """Makes the other ranks raise an error that this one has."""
        if self._ranks == 1:
            return
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        with contextlib.suppress(RuntimeError):  # this rank's own error says more
            self._store.set(f"said/{self._rank}", json.dumps({"error": said}))
            if self._rank == 0:
                self._store.set("answer", f"rank 0: {said}")
            self._store.wait(["answer"], timedelta(seconds=self._seconds))
            self._leave()

    def _judge(self) -> str:
        """The error of all ranks; empty if they agree."""
        missing, said = set(range(self._ranks)), {}
        end = time.monotonic() + self._seconds
        while missing:
            for rank in [rank for rank in missing if self._store.check([f"said/{rank}"])]:
                missing.remove(rank)
                said[rank] = json.loads(self._store.get(f"said/{rank}"))
                if "error" in said[rank]:
                    return f"rank {rank}: {said[rank]['error']}"
            if missing and time.monotonic() > end:
                return f"{named(missing)} of {self._ranks} did not come within {self._seconds:g} s"
            time.sleep(_POLL_SECONDS if missing else 0.0)
        return difference({rank: said[rank]["values"] for rank in sorted(said)})

    def _leave(self) -> None:
        end = time.monotonic() + _LEAVING_SECONDS
        with contextlib.suppress(dist.DistError):  # rank 0, which may have the store, has left first
            heard = self._store.add("heard", 1)
            while heard < self._ranks and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
                heard = self._store.add("heard", 0)


def comparison_of_world(seconds: float) -> Comparison:
    """A comparison between the ranks of the default process group; each makes as many as the others."""
    world = dist.group.WORLD
    if world is None:
        return Comparison(dist.HashStore(), 0, 1, seconds)  # type: ignore[attr-defined]
    store, rank = group_store(world), dist.get_rank()
    number = store.add(f"parallel_ops/comparisons/{rank}", 1)
    return Comparison(dist.PrefixStore(str(number), store), rank, dist.get_world_size(), seconds)  # type: ignore[attr-defined]


def difference(values: Mapping[int, Mapping[str, Any]]) -> str:
    """Which keys differ between ranks, with each value and its ranks; empty if none does."""
    found = []
    for key in dict.fromkeys(key for own in values.values() for key in own):
        ranks_of: dict[str, list[int]] = {}
        for rank, own in values.items():
            ranks_of.setdefault(json.dumps(own[key]) if key in own else "missing", []).append(rank)
        if len(ranks_of) > 1:
            most_first = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
            found.append(f"{key} is " + ", ".join(f"{value} on {named(ranks)}" for value, ranks in most_first))
    more = f"; and {len(found) - _MOST_KEYS} more" if len(found) > _MOST_KEYS else ""
    return f"the ranks have different settings: {'; '.join(found[:_MOST_KEYS])}{more}" if found else ""
