"""Compares settings between ranks before a mesh or a model is built.

Each rank writes its values to the store. Rank 0 reads all of them and writes one answer, empty or the error that every
rank raises. This needs no process group, which ranks of different plans or devices could not form.

All settings are compared except ``FREE``. Paths of data may differ, since nodes may have their own copies: the numbers
of tokens and documents are compared instead. ``logging`` concerns rank 0 only.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import parallel_ops
from parallel_ops._internal.distributed.compat import group_store
from parallel_ops.comm.errors import Board, PeerError, named

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings

# Sections, and keys of sections, that may differ between ranks.
FREE = ("logging", "data.paths", "data.sources", "evaluation.paths")

# Rank 0 answers at the end of its own wait, so the others wait a little longer.
_ANSWER_SECONDS = 10.0
# How long a rank whose run does not begin waits for the others to read the answer.
_LEAVING_SECONDS = 2.0
# Differing keys in an error: unrelated files would fill the screen.
_MOST_KEYS = 8


class Disagreement(ValueError):
    """Settings differ between ranks; the message names keys, values and ranks. Raised on every rank."""


def values_of(settings: "Settings") -> dict[str, Any]:
    """The values that every rank must share, by ``section.key``: settings with defaults, and versions."""
    from parallel_ops.train.settings.model import LoraSettings  # needs pydantic, as settings do

    sections = settings.model_dump(mode="json")
    sections["lora"] = sections["lora"] or dict.fromkeys(LoraSettings.model_fields)
    sections["model"] |= dataclasses.asdict(settings.config)  # of a folder, and defaults
    sections["data"]["seq_length"] = settings.seq_length
    sections["data"]["weights"] = [source.weight for source in settings.data.sources]
    found = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    free = {name for name in found if name in FREE or name.partition(".")[0] in FREE}
    versions = {"parallel_ops": parallel_ops.__version__, "torch": str(torch.__version__)}
    return versions | {name: value for name, value in found.items() if name not in free}


class Comparison:
    """One comparison between all ranks of a store: ``with Comparison(...) as compare: compare(values)``.

    If the block raises on one rank, the others raise ``Disagreement`` with that rank and message.

    Args:
        store: A store with a prefix of its own.
        seconds: How long to wait for the other ranks.
    """

    def __init__(self, store: Any, rank: int, ranks: int, seconds: float) -> None:
        self._board, self._seconds = Board(store, rank, ranks, "parallel_ops/comparison"), seconds

    def __enter__(self) -> "Comparison":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not isinstance(error, Disagreement):
            self.fail(error)

    def __call__(self, values: Mapping[str, Any]) -> None:
        """Compares JSON values; all ranks call it.

        Raises:
            Disagreement: A value differs, or a rank failed or did not arrive; raised on every rank.
            PeerError: The store is gone.
        """
        try:
            message = self._answer({"values": values}, _ANSWER_SECONDS)
        except dist.DistStoreError:
            raise Disagreement(f"rank 0 has not compared settings within {self._seconds:g} s") from None
        except dist.DistError as error:
            raise PeerError(f"rank 0 has ended before it compared settings: {error}") from error
        if message:
            raise Disagreement(message)

    def fail(self, error: BaseException) -> None:
        """Makes the other ranks raise this rank's error."""
        with contextlib.suppress(RuntimeError):  # this rank raises its own error
            self._answer({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}, 0.0)

    def _answer(self, report: dict[str, Any], margin: float) -> str:
        """Reports to rank 0, and returns its answer: the error for all ranks, empty if the values are equal."""
        board, rank = self._board, self._board.rank
        if board.ranks == 1:
            return ""
        board.write("report", json.dumps(report, default=str))
        if rank == 0:
            board.write("answer", f"rank 0: {report['error']}" if "error" in report else self._compare())
        message = board.wait("answer", 0, self._seconds + margin)
        if message:
            with contextlib.suppress(dist.DistError):  # rank 0, which may own the store, has exited first
                board.leave(_LEAVING_SECONDS)
        return message

    def _compare(self) -> str:
        reports: dict[int, dict[str, Any]] = {}

        def failed() -> bool:
            new = self._board.having("report", set(range(self._board.ranks)) - set(reports))
            reports.update({rank: json.loads(text) for rank, text in self._board.read("report", new).items()})
            return any("error" in report for report in reports.values())

        missing = self._board.await_all("report", range(self._board.ranks), self._seconds, until=failed)
        if failed():
            return next(f"rank {rank}: {report['error']}" for rank, report in reports.items() if "error" in report)
        if missing:
            return f"{named(missing)} of {self._board.ranks} did not come within {self._seconds:g} s"
        return difference({rank: reports[rank]["values"] for rank in sorted(reports)})


def comparison_of_world(seconds: float) -> Comparison:
    """A comparison between the ranks of the default process group; all ranks make the same number of them."""
    world = dist.group.WORLD
    if world is None:
        return Comparison(dist.HashStore(), 0, 1, seconds)  # type: ignore[attr-defined]
    store, rank = group_store(world), dist.get_rank()
    number = store.add(f"parallel_ops/comparisons/{rank}", 1)
    return Comparison(dist.PrefixStore(str(number), store), rank, dist.get_world_size(), seconds)  # type: ignore[attr-defined]


def difference(values: Mapping[int, Mapping[str, Any]]) -> str:
    """The keys that differ between ranks, with each value and its ranks; empty if all are equal."""
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
