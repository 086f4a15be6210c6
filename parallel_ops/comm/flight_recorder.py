"""torch's flight recorder: the last collectives of this rank, for the report of a run that does not go on.

It is on by default, and keeps calls in rings, one for each backend, with shapes, group and where in Python they were
made. torch's ``torchfrtrace`` reads its files.
"""

import functools
import http.client
import json
import math
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_PREFIX = "rank_"
# To ask NCCL's ring queries events, for which CUDA may never answer where a call of its own hangs.
_SECONDS = 10.0

# Private functions, which torch may lack; JSON has what the file has.
_recorder: Any = torch._C._distributed_c10d
# One that waits for CUDA would wait for it in its destructor, too.
_servers: list[Any] = []
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
    """By torch's server for such questions: asked in Python they hold the GIL, as long as CUDA does not answer."""
    if not torch.cuda.is_initialized():
        return []
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as own:
        own.settimeout(_SECONDS)
        connection = http.client.HTTPConnection("localhost")
        connection.sock = own
        try:
            _servers.append(_recorder._WorkerServer(f"{folder}/socket"))
            own.connect(f"{folder}/socket")
            connection.request("POST", "/handler/dump_nccl_trace_json")
            text = connection.getresponse().read()
        except (OSError, RuntimeError, http.client.HTTPException):
            return []
        _servers[-1].shutdown()
    return _entries(text)


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
