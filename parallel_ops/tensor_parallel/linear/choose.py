"""The choice of ``overlap="auto"``: whole collectives, or the number of chunks that is the fastest.

On a GPU ``auto`` runs and times the candidates once for each (phase, rough shape, dtype, group, transport): a warm-up
and three runs of each. The slowest rank's times count, and chunks must win by 2 %. A choice by timing may differ
between two runs of a program, and with it the order of some sums. With ``torch.use_deterministic_algorithms(True)``,
and while a graph is captured, a rule decides, by the bytes that are sent and the time of the matmul:

    whole   matmul + message                   message = latency + bytes / bandwidth
    cut     the longer of the two, and what the last (gather) or the first (scatter) chunk cannot hide of the other;
            ``_TAX`` more for the matmuls, as small ones take longer, and a latency for each message

On a CPU the cores that multiply also copy the messages, so whole collectives are taken.
"""

import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_ops.comm.device_rates import Rates, rates_of

Phase = Literal["gather", "scatter"]

# Code of whole collectives; positive numbers are chunks of each rank's shard.
OFF = 0
CANDIDATES = (OFF, 1, 2, 4)
# Largest ratio to the time of whole collectives at which chunks are taken.
MARGIN = 0.98
# How much longer the matmuls of chunks take together than the whole one; assumed, 1.00 to 1.18 on CPUs.
_TAX = 1.1


@dataclasses.dataclass(frozen=True)
class Product:
    """A matmul and the communication beside it, equal on every rank: the cache key of a choice.

    Attributes:
        phase: whether the input is gathered or the output scattered.
        rows, columns, inner: the matmul is ``[rows, inner] @ [inner, columns]``, ``rows`` those of all ranks.
        sent: largest number of bytes that a rank sends. size: number of ranks.
        exact: sums are in rank order, also without chunks.
        transport: its name.
    """

    phase: Phase
    rows: int
    columns: int
    inner: int
    sent: int
    size: int
    exact: bool
    dtype: torch.dtype
    transport: str


# Choices that were measured, by group, then by call and device.
_measured: weakref.WeakKeyDictionary[ProcessGroup, dict[Hashable, int]] = weakref.WeakKeyDictionary()


def may_measure(device: torch.device) -> bool:
    """Whether to time the candidates: on a GPU, not while a graph is captured, not in deterministic mode."""
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return False
    return not torch.cuda.is_current_stream_capturing()


def choose(product: Product, device: torch.device, group: ProcessGroup, run: Callable[[int], object]) -> int:
    """``OFF`` or a number of chunks, the same on every rank.

    Args:
        run: runs the matmul in a way; only called for timing, equally often on every rank.
    """
    known, key = _measured.setdefault(group, {}), (product, device)
    if key not in known:
        if not may_measure(device):
            return by_rule(product, rates_of(device, product.dtype, group))
        known[key] = pick(_seconds_of(group, device, run))
    return known[key]


def pick(seconds: Sequence[float]) -> int:
    """The fastest of ``CANDIDATES`` if it beats the first, ``OFF``, by more than the margin; otherwise ``OFF``."""
    best = min(range(len(seconds)), key=seconds.__getitem__)
    return CANDIDATES[best] if seconds[best] < MARGIN * seconds[0] else OFF


def by_rule(product: Product, rates: Rates | None) -> int:
    """The choice by bytes and the time of the matmul; ``OFF`` if the rates of the device are unknown."""
    if rates is None:
        return OFF
    multiplied = 2 * product.rows * product.columns * product.inner / rates.flops
    message = product.sent / rates.bandwidth
    seconds = [multiplied + message + rates.latency]
    for chunks in CANDIDATES[1:]:
        products, messages = _TAX * multiplied, message + (product.size - 1) * chunks * rates.latency
        one = products / (product.size * chunks), messages / ((product.size - 1) * chunks)
        seconds.append(max(messages + one[0], products + (0.0 if product.phase == "gather" else one[1])))
    return pick(seconds)


def _seconds_of(group: ProcessGroup, device: torch.device, run: Callable[[int], object]) -> list[float]:
    """Seconds of each of ``CANDIDATES``: the best of three runs, of the slowest rank."""
    seconds = torch.tensor([_fastest(run, way, device) for way in CANDIDATES], device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    found: list[float] = seconds.tolist()
    return found


def roughly(n: int) -> int:
    """``n``, rounded down to three significant binary digits: not every sequence length is timed."""
    shift = max(0, n.bit_length() - 3)
    return n >> shift << shift


def _fastest(run: Callable[[int], object], way: int, device: torch.device) -> float:
    run(way)  # warm-up: libraries choose kernels, connections open
    best = math.inf
    for _ in range(3):
        _synchronize(device)
        start = time.perf_counter()
        run(way)
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _synchronize(device: torch.device) -> None:
    # The stream, which waits for all messages of the call, and not the device: another stream may hold a pipeline's
    # receive from a stage that waits for this rank.
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
