"""The number of pieces for ``overlap="auto"``, by an analytic model (``_internal/overlap_model.py``) and a measurement.

The model uses data sheets. On a GPU the candidates are therefore run and timed once for each (phase, rough shape,
dtype, group size, device, transport); the slowest rank's times count, and overlap must win by 2%. A choice by timing
may differ between two runs of a program, and with it the order of some sums, so with
``torch.use_deterministic_algorithms(True)`` the model decides alone. On a CPU the cores that multiply also copy the
messages, so nothing overlaps.
"""

import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_ops._internal import overlap_model
from parallel_ops._internal.overlap_model import MARGIN, Rates, Work, candidates
from parallel_ops._internal.overlap_schedule import FUSED, GATED, OFF, TAPERED
from parallel_ops.comm.device_rates import rates_of

Overlap = Literal["auto", "off", "bulk", "tapered", "gated", "fused"] | int
Reduction = Literal["exact", "backend"]

# Codes in the ops' schemas; positive numbers are pieces.
BULK, AUTO = -1, -2
_WORDS: dict[str, int] = {
    "off": OFF, "bulk": BULK, "auto": AUTO, "tapered": TAPERED, "gated": GATED, "fused": FUSED,
}  # fmt: skip


def encode(op: str, overlap: Overlap) -> int:
    """``overlap`` as the integer of the ops' schemas; raises TypeError or ValueError if it is not valid."""
    if isinstance(overlap, str) and overlap in _WORDS:
        return _WORDS[overlap]
    if isinstance(overlap, int) and not isinstance(overlap, bool) and overlap >= 1:
        return overlap
    words = ", ".join(map(repr, _WORDS))
    message = f"{op}: overlap must be one of {words} or a number of pieces of at least 1, got {overlap!r}"
    raise ValueError(message) if isinstance(overlap, int | str) else TypeError(message)


def decode(pieces: int) -> Overlap:
    """The inverse of ``encode``."""
    words = {code: word for word, code in _WORDS.items()}
    return words.get(pieces, pieces)  # type: ignore[return-value]


def is_exact(op: str, reduction: Reduction) -> bool:
    """``reduction`` as the flag of the ops' schemas; raises ValueError if it is not valid."""
    if reduction not in ("exact", "backend"):
        raise ValueError(f"{op}: reduction must be 'exact' or 'backend', got {reduction!r}")
    return reduction == "exact"


@dataclass(frozen=True)
class Task(Work):
    """What a choice is kept under.

    Attributes:
        dtype: of the product.
        transport: its name.
        bias: whether the product behind a gather has one.
    """

    dtype: torch.dtype = torch.bfloat16
    transport: str = ""
    bias: bool = False


def modelled(task: Work, rates: Rates | None) -> int:
    """The number of pieces by the model; ``OFF`` if the rates of the device are unknown."""
    return OFF if rates is None else overlap_model.choose(task, rates)


# Choices by group, task and device.
_measured: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[Task, torch.device], int]] = weakref.WeakKeyDictionary()


def may_measure(device: torch.device) -> bool:
    """Whether to time the candidates: on a GPU, not while a graph is captured, not in deterministic mode."""
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return False
    return not torch.cuda.is_current_stream_capturing()


def choose(task: Task, device: torch.device, group: ProcessGroup, run: Callable[[int], object]) -> int:
    """The number of pieces for ``task``, the same on every rank.

    Args:
        run: runs the task with a number of pieces; only called for timing, equally often on every rank.
    """
    known, key = _measured.setdefault(group, {}), (_alike(task), device)
    if key in known:
        return known[key]
    if not may_measure(device):
        return modelled(task, rates_of(device, task.dtype, group))
    ways = (*candidates(task), *([FUSED] if GATED in candidates(task) and not task.bias else []))
    seconds = torch.tensor([_fastest(run, way, device) for way in ways], device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    known[key] = pick(ways, seconds.tolist())
    return known[key]


def _alike(task: Task) -> Task:
    """Tasks whose rows differ by less than a quarter share a choice, so that not every sequence length is timed."""
    return replace(task, rows=_roughly(task.rows), sent=_roughly(task.sent))


def _roughly(n: int) -> int:
    """``n``, rounded down to three significant binary digits."""
    shift = max(0, n.bit_length() - 3)
    return n >> shift << shift


def pick(ways: Sequence[int], seconds: Sequence[float]) -> int:
    """The fastest way if it beats the first, ``OFF``, by more than the margin; otherwise ``OFF``."""
    best = min(range(len(seconds)), key=seconds.__getitem__)
    return ways[best] if seconds[best] < MARGIN * seconds[0] else OFF


def _fastest(run: Callable[[int], object], pieces: int, device: torch.device, repeats: int = 3) -> float:
    run(pieces)  # warm-up: libraries choose kernels, connections open
    best = math.inf
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        run(pieces)
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _synchronize(device: torch.device) -> None:
    # The stream, which waits for all messages of the task, and not the device: another stream may hold a pipeline's
    # receive from a stage that waits for this rank.
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
