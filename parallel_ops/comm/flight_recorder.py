"""torch's flight recorder: the last collectives of this rank, for the report of a run that does not go on.

It is on by default, and keeps the calls of gloo and NCCL in a ring, with shapes, group and where in Python they were
made. torch's ``torchfrtrace`` reads its files.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch

_PREFIX = "rank_"


# Private functions, which torch may lack; JSON has what the file has.
_recorder: Any = torch._C._distributed_c10d


def _calls() -> list[dict[str, Any]]:
    """The calls on record, the oldest first; none where the recorder is off."""
    if not (hasattr(_recorder, "_dump_fr_trace") and hasattr(_recorder, "_dump_fr_trace_json")):
        return []
    found: list[dict[str, Any]] = json.loads(_recorder._dump_fr_trace_json()).get("entries", [])
    return found


def _described(call: dict[str, Any]) -> str:
    sizes = call["input_sizes"] or call["output_sizes"]
    elements = sum(math.prod(size) for size in sizes)
    dtypes = call["input_dtypes"] or call["output_dtypes"] or ["?"]
    number = call["p2p_seq_id"] if call["is_p2p"] else call["collective_seq_id"]
    name = call["profiling_name"].partition(":")[2] or call["profiling_name"]
    return f"{name} number {number} of group {call['process_group'][1]}, {elements} x {dtypes[0]}"


def report(folder: Path, rank: int) -> str:
    """Writes the record of this rank; returns what to add to an error about a call that does not return.

    The text names the oldest call that has not ended, and the file. It is empty where the recorder is off; a file that
    cannot be written is left out.
    """
    calls, found = _calls(), ""
    if not calls:
        return found
    waiting = (call for call in calls if not call["retired"] and call["state"] != "completed")
    if (call := next(waiting, None)) is not None:
        found += f"; rank {rank} waits in {_described(call)}"
    path = folder / f"{_PREFIX}{rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_recorder._dump_fr_trace())
    except OSError:
        return found
    return f"{found}; torch's flight recorder: {path}"
