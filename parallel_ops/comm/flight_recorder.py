"""torch's flight recorder: the last collectives of this rank, for the report of a run that does not go on.

The recorder keeps the calls of gloo and NCCL in a ring, with shapes, group and where in Python they were made. torch's
``torchfrtrace`` reads its files.
"""

import json
import math
import os
from pathlib import Path

import torch

_CALLS = "2000"
_PREFIX = "rank_"


def start() -> None:
    """Turns the recorder on, unless the user has set its size; before the first process group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _CALLS)


def unfinished() -> str:
    """The oldest call that this rank has made and that has not ended, in words; empty if there is none."""
    read = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if read is None:
        return ""
    entries = json.loads(read()).get("entries", [])
    waiting = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    if not waiting:
        return ""
    call = waiting[0]
    sizes = call["input_sizes"] or call["output_sizes"]
    elements = sum(math.prod(size) for size in sizes)
    dtypes = call["input_dtypes"] or call["output_dtypes"] or ["?"]
    number = call["p2p_seq_id"] if call["is_p2p"] else call["collective_seq_id"]
    name = call["profiling_name"].partition(":")[2] or call["profiling_name"]
    return f"{name} number {number} of group {call['process_group'][1]}, {elements} x {dtypes[0]}"


def dump(folder: Path, rank: int) -> Path | None:
    """Writes what this rank has recorded; ``None`` if there is nothing, or if it cannot be written."""
    recorder = torch._C._distributed_c10d
    read, as_json = (getattr(recorder, f"_dump_fr_trace{kind}", None) for kind in ("", "_json"))
    if read is None or as_json is None or not json.loads(as_json()).get("entries"):
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{_PREFIX}{rank}"
        path.write_bytes(read())
    except OSError:
        return None
    return path


def report(folder: Path, rank: int) -> str:
    """What to add to an error about a call that does not return: the call, and where the record is."""
    call = unfinished()
    path = dump(folder, rank)
    parts = [f"; rank {rank} waits in {call}"] if call else []
    parts += [f"; torch's flight recorder: {path}"] if path else []
    return "".join(parts)
