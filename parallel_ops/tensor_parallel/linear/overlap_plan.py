"""How much to overlap: what the caller says, or what an analytic model and a measurement say.

    T_g     products of matrices, by the number of waves of tiles that they make on the device
    T_c     messages: bytes / bandwidth, and a latency for each exchange
    whole   T_g + T_c
    gather  max(T_g', T_c' + T_g' / pieces of all ranks)          the last piece arrives, then is multiplied
    scatter max(T_g' + T_c' / exchanges, T_g' / pieces + T_c')    the first piece is made, then leaves

Smaller pieces hide more and make worse products (T_g' > T_g: fewer tiles than the device has processors), so there is
a best number, and it may be none. The model knows data sheets and not the machine; on a GPU its answer is therefore
checked once for each (phase, rough shape, dtype, group size, device, transport): the candidates are run and timed, the
ranks take the slowest rank's times, and overlapping must win by 2% to be chosen. A choice by timing may differ between
two runs of a program and with it the order of some sums, so ``torch.use_deterministic_algorithms(True)`` leaves the
choice to the model alone. On a CPU the cores that multiply also copy the messages: there is nothing to hide behind.
"""

import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_ops.comm.device_rates import Rates, rates_of

Overlap = Literal["auto", "off", "bulk"] | int
Phase = Literal["gather", "scatter"]

# As they stand in an op's schema; other numbers are pieces.
OFF, BULK, AUTO = 0, -1, -2
_WORDS: dict[str, int] = {"off": OFF, "bulk": BULK, "auto": AUTO}

_CANDIDATES = (OFF, 1, 2, 4)

# By how much overlapping must be faster than not.
_MARGIN = 0.98

_TILE = (128, 256)  # what libraries' large 16-bit products are made of


def encode(op: str, overlap: Overlap) -> int:
    """``overlap`` as a number of an op's schema, or an error that says what it must be."""
    if isinstance(overlap, str) and overlap in _WORDS:
        return _WORDS[overlap]
    if isinstance(overlap, int) and not isinstance(overlap, bool) and overlap >= 1:
        return overlap
    message = f"{op}: overlap must be 'auto', 'off', 'bulk' or a number of pieces of at least 1, got {overlap!r}"
    raise ValueError(message) if isinstance(overlap, int | str) else TypeError(message)


def decode(pieces: int) -> Overlap:
    """What the user called it: the ``overlap`` of which ``encode`` made this number."""
    words: dict[int, Overlap] = {OFF: "off", BULK: "bulk", AUTO: "auto"}
    return words.get(pieces, pieces)


@dataclass(frozen=True)
class Task:
    """A product and the communication next to it: the same on every rank, since all must choose alike.

    Attributes:
        rows: of the whole activation. columns, inner: the product is ``[rows, inner] @ [inner, columns]``.
        sent: the most bytes that a rank sends.
        transport: the name of what sends them.
    """

    phase: Phase
    rows: int
    columns: int
    inner: int
    sent: int
    size: int
    dtype: torch.dtype
    transport: str


def product_seconds(rates: Rates, rows: int, columns: int, inner: int) -> float:
    """A product as waves of tiles; the last wave costs as much as a full one."""
    tiles = math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
    waves = math.ceil(tiles / rates.processors)
    return rates.launch + waves * 2 * _TILE[0] * _TILE[1] * inner / rates.flops


def predict(task: Task, rates: Rates, pieces: int) -> float:
    """Seconds of the task with so many pieces for each shard, ``OFF`` for none."""
    communication = task.sent / rates.bandwidth
    if pieces == OFF:
        return product_seconds(rates, task.rows, task.columns, task.inner) + communication + rates.latency
    parts, exchanges = task.size * pieces, (task.size - 1) * pieces
    compute = parts * product_seconds(rates, math.ceil(task.rows / parts), task.columns, task.inner)
    communication += exchanges * rates.latency
    if task.phase == "gather":
        return max(compute, communication + compute / parts)
    return max(compute + communication / exchanges, communication + compute / parts)


def modelled(task: Task, rates: Rates | None) -> int:
    """The number of pieces that the model would choose; ``OFF`` where nothing is known of the device."""
    if rates is None:
        return OFF
    best = min(_CANDIDATES, key=lambda pieces: predict(task, rates, pieces))
    return best if predict(task, rates, best) < _MARGIN * predict(task, rates, OFF) else OFF


# The choices of each group, made once for each task and device.
_measured: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[Task, torch.device], int]] = weakref.WeakKeyDictionary()


def may_measure(device: torch.device) -> bool:
    """Only where a timing is worth something, and where it neither disturbs a capture nor a promise of determinism."""
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return False
    return not torch.cuda.is_current_stream_capturing()


def choose(task: Task, device: torch.device, group: ProcessGroup, run: Callable[[int], object]) -> int:
    """The number of pieces for ``task``, the same on every rank.

    Args:
        run: does the task with so many pieces; called only to be timed, on every rank as often.
    """
    known, key = _measured.setdefault(group, {}), (_alike(task), device)
    if key in known:
        return known[key]
    if not may_measure(device):
        return modelled(task, rates_of(device, task.dtype, group))
    seconds = torch.tensor([_fastest(run, pieces, device) for pieces in _CANDIDATES], device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    known[key] = pick(seconds.tolist())
    return known[key]


def _alike(task: Task) -> Task:
    """Tasks whose rows differ by less than a quarter share a choice: else sequences of any length would be timed."""
    return replace(task, rows=_roughly(task.rows), sent=_roughly(task.sent))


def _roughly(n: int) -> int:
    """``n``, rounded down to three binary digits."""
    shift = max(0, n.bit_length() - 3)
    return n >> shift << shift


def pick(seconds: list[float]) -> int:
    """The fastest of the candidates, if it beats the first, ``OFF``, by more than the margin."""
    best = min(range(len(seconds)), key=seconds.__getitem__)
    return _CANDIDATES[best] if seconds[best] < _MARGIN * seconds[0] else OFF


def _fastest(run: Callable[[int], object], pieces: int, device: torch.device, repeats: int = 3) -> float:
    run(pieces)  # libraries choose kernels and connections are made
    best = math.inf
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        run(pieces)
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _synchronize(device: torch.device) -> None:
    # The stream, which is behind all that the task sent, and not the device: on another stream a pipeline's receive may
    # wait for a stage that waits for this one.
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
