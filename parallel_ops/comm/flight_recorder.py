"""torch's flight recorder: the last collectives of this rank, for the report of a run that does not go on.

It is on by default, and keeps calls in rings, one for each backend, with shapes, group and where in Python they were
made. torch's ``torchfrtrace`` reads its files.
"""

import functools
import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_PREFIX = "rank_"
# To ask NCCL's ring queries events, for which CUDA may never answer where a call of its own hangs.
_SECONDS = 10.0

# Private functions, which torch may lack; JSON has what the file has.
_recorder: Any = torch._C._distributed_c10d


class _Request(_recorder._Request):  # type: ignore[misc]
    def body(self) -> bytes:
        return b""

    def params(self) -> dict[str, str]:
        return {}


class _Response(_recorder._Response):  # type: ignore[misc]
    content = "{}"

    def set_content(self, content: str, _: str) -> None:
        self.content = content

    def set_status(self, _: int) -> None:
        pass


# A ring: its calls, the oldest first, and a function that returns its file.
Ring = tuple[list[dict[str, Any]], Callable[[], bytes]]


def _rings() -> Iterator[Ring]:
    """The rings that this torch has. That of NCCL is empty where its answer takes too long."""
    if hasattr(_recorder, "_dump_nccl_trace"):
        yield _calls_of_nccl(), _recorder._dump_nccl_trace
    if not (hasattr(_recorder, "_dump_fr_trace") and hasattr(_recorder, "_dump_fr_trace_json")):
        return
    # Since 2.15 "nccl" is this implementation, unless TORCH_DIST_USE_NCCL2=0 is set. Its ring asks CUDA nothing.
    if hasattr(_recorder, "ProcessGroupNCCL2"):
        text = _recorder._dump_fr_trace_json(backend="nccl2")
        yield _entries(text), functools.partial(_recorder._dump_fr_trace, backend="nccl2")
    yield _entries(_recorder._dump_fr_trace_json()), _recorder._dump_fr_trace  # gloo's


def _calls_of_nccl() -> list[dict[str, Any]]:
    # Unlike ``_dump_nccl_trace_json`` it does not hold the GIL.
    ask, response = _recorder._get_handler("dump_nccl_trace_json"), _Response()
    thread = threading.Thread(target=ask, args=(_Request(), response), daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return _entries(response.content)


def _entries(text: str | bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text).get("entries", [])
    return found


def _waiting(calls: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The oldest call that has not ended. Those of a batch have no state but that of the batch, which stands behind."""

    def number(call: dict[str, Any]) -> tuple[Any, ...]:
        return call["pg_id"], call["collective_seq_id"], call["p2p_seq_id"]

    batches = {number(call): call for call in calls if call["profiling_name"].endswith("coalesced")}
    states = ((call, batches.get(number(call), call)) for call in calls)
    return next((call for call, of in states if not of["retired"] and of["state"] != "completed"), None)


def _described(call: dict[str, Any]) -> str:
    sizes = call["input_sizes"] or call["output_sizes"]
    elements = sum(math.prod(size) for size in sizes)
    dtypes = call["input_dtypes"] or call["output_dtypes"] or ["?"]
    number = call["p2p_seq_id"] if call["is_p2p"] else call["collective_seq_id"]
    name = call["profiling_name"].partition(":")[2] or call["profiling_name"]
    return f"{name} number {number} of group {call['process_group'][1]}, {elements} x {dtypes[0]}"


def report(folder: Path, rank: int) -> str:
    """Writes the record of this rank; returns what to add to an error about a call that does not return.

    The text names the oldest call that has not ended, and the file, which has the calls of its backend. It is empty
    where the recorder is off; a file that cannot be written is left out.
    """
    records = [(calls, dump) for calls, dump in _rings() if calls]
    if not records:
        return ""
    found, (_, dump) = "", records[0]
    waiting = [(call, name) for calls, name in records if (call := _waiting(calls)) is not None]
    if waiting:
        call, dump = min(waiting, key=lambda pair: pair[0]["time_created_ns"])
        found = f"; rank {rank} waits in {_described(call)}"
    path = folder / f"{_PREFIX}{rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dump())
    except OSError:
        return found
    return f"{found}; torch's flight recorder: {path}"
