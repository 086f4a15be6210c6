"""When it pays to cut the communication of a linear into pieces that overlap with its product. Numbers alone, no torch.

    T_g(r)  a product of r rows: waves of tiles on the processors that are free, each wave a full one
    T_c     messages: a latency for each, and bytes / bandwidth
    T_s     staging: the gather's own rows are copied to their place
    T_r     reduction: one kernel reads the parts of all ranks and writes their sum

    plain   T_g + T_c + T_r                                         one collective, one product (cuBLAS) beside nothing
    gather  T_s, then the own rows; each product when its messages have arrived
    scatter each product, then its messages; the own rows at the end, and T_r
    gated   T_s + T_b + max(T_g'', T_c' + T_g'' / P)                shards are pulled, one product waits for their flags

Products take a piece of a shard, or with ``TAPERED`` as many whole shards that lie beside each other as had their turn
before (gather) or have it later (scatter): 1, 2, 4. Of ranks whose shards lie otherwise the slowest counts. ``gated``
has the waves of the whole product, on all processors, at the rate of our own product (``gated_share`` of a library's);
T_b are two barriers.

Products take turns on ``lanes`` streams. A product starts when its messages are there and the one before it on its
stream has ended; its tiles run in order on the first processors that are free. So with two streams the next product
fills the last wave of the one before, and with one every product ends on a wave that is not full.

Pieces cost: waves that are not full at the end; processors that a transport takes which copies by kernels, for a
gather until all has arrived; a latency for each message; and the host, which cannot enqueue pieces faster than it
calls. A plan with pieces takes at least as long as its host.

``plain`` is what other libraries do, with the same calls. Pieces are chosen only if they beat it by a margin, so the
choice is never slower than ``plain`` as far as the model is right.
"""

import math
from dataclasses import dataclass

from parallel_ops._internal.overlap_schedule import GATED, LANES, OFF, TAPERED, Phase, Processors, cut, finished, orders

CANDIDATES = (OFF, TAPERED, 1, 2, 4)

# Largest ratio to the time without overlap at which overlap is chosen.
MARGIN = 0.98

TILE = (128, 256)  # what libraries' large 16-bit products are made of

# What large products, messages and copies reach of data sheets. A clone reaches 90 % on an H200.
_FLOPS_SHARE, _LINK_SHARE, _MEMORY_SHARE = 0.66, 0.8, 0.9


@dataclass(frozen=True)
class Rates:
    """What the model believes of a device, its links and its host.

    Attributes:
        flops: of one processor, per second. processors: streaming multiprocessors.
        bandwidth: bytes per second that one rank sends. memory_bandwidth: bytes per second, reads and writes together.
        latency: seconds of a message. launch: seconds between two kernels.
        taken: processors that a transport which copies by kernels keeps from the products beside it. Assumed.
        host_product, host_message: seconds in which the host enqueues a product on its stream, and a message. Of the
            latter 25 us were measured (Python and torch without a backend, AMD EPYC, 2026-11); the rest is assumed for
            NCCL.
        gated_share: rate of the product that waits for flags over that of a library's. Assumed: its loop has the
            tensor-core instructions of a plain product of the same tiles, but no copies by descriptors.
        host_pull: seconds in which the host enqueues a copy and its flag. Assumed.
    """

    flops: float
    processors: int
    bandwidth: float
    memory_bandwidth: float
    latency: float = 10e-6
    launch: float = 4e-6
    taken: int = 16
    host_product: float = 12e-6
    host_message: float = 40e-6
    gated_share: float = 0.9
    host_pull: float = 10e-6


def rates_of_sheet(flops: float, processors: int, link: float, memory_bandwidth: float) -> Rates:
    """Rates by a data sheet: dense FLOP/s of products, bytes per second of the link one way and of the memory."""
    return Rates(
        flops=_FLOPS_SHARE * flops / processors,
        processors=processors,
        bandwidth=_LINK_SHARE * link,
        memory_bandwidth=_MEMORY_SHARE * memory_bandwidth,
    )


@dataclass(frozen=True)
class Work:
    """A product and the communication beside it. Equal on every rank, since all must choose the same.

    Attributes:
        phase: whether the input is gathered or the output scattered.
        rows, columns, inner: the product is ``[rows, inner] @ [inner, columns]``, ``rows`` those of all ranks.
        sent: largest number of bytes that a rank sends.
        size: number of ranks.
        itemsize: bytes of an element.
        exact: sums are in rank order in fp32, also without pieces.
        takes_processors: messages are copied by kernels.
        pulled: ranks may read each other's memory, so ``GATED`` is a way.
        lanes: streams on which products take turns.
    """

    phase: Phase
    rows: int
    columns: int
    inner: int
    sent: int
    size: int
    itemsize: int = 2
    exact: bool = True
    takes_processors: bool = True
    pulled: bool = False
    lanes: int = LANES


@dataclass(frozen=True)
class Times:
    """A way to do the work, in seconds.

    Attributes:
        pieces: of each rank's shard; ``OFF`` for none, ``TAPERED`` or ``GATED``.
        tiles, waves: of each product, the largest. products: how many there are.
        product: the largest product alone. computing: all of them, if no message is waited for. communication: all
            messages. staging, reduction: see the module.
        host: in which the host enqueues everything. total: what the way takes.
    """

    pieces: int
    tiles: int
    waves: int
    products: int
    product: float
    computing: float
    communication: float
    staging: float
    reduction: float
    host: float
    total: float


def product(rates: Rates, rows: int, columns: int, inner: int, processors: int | None = None) -> tuple[int, int, float]:
    """Tiles, waves and seconds of a product on ``processors``, by default all; the last wave counts as a full one."""
    tiles = math.ceil(rows / TILE[0]) * math.ceil(columns / TILE[1])
    waves = math.ceil(tiles / (processors or rates.processors))
    return tiles, waves, rates.launch + waves * _tile(rates, inner)


def _tile(rates: Rates, inner: int) -> float:
    """Seconds of a tile."""
    return 2 * TILE[0] * TILE[1] * inner / rates.flops


def times(work: Work, rates: Rates, pieces: int) -> Times:
    """The work with ``pieces`` pieces a shard, or without overlap for ``OFF``."""
    own = math.ceil(work.rows / work.size)
    reduction = staging = 0.0
    if work.phase == "scatter" and (work.exact or pieces != OFF):
        reduction = rates.launch + (work.size + 1) * own * work.columns * work.itemsize / rates.memory_bandwidth
    if pieces == OFF:
        tiles, waves, seconds = product(rates, work.rows, work.columns, work.inner)
        communication = rates.latency + work.sent / rates.bandwidth
        total = seconds + communication + reduction
        # Two calls: the host is ahead of the device.
        return Times(OFF, tiles, waves, 1, seconds, seconds, communication, 0.0, reduction, 0.0, total)
    if pieces == GATED:
        return _gated(work, rates)
    # At least one is left, so that products end.
    free = max(1, rates.processors - rates.taken) if work.takes_processors else rates.processors
    a_shard = cut(pieces)
    messages = (work.size - 1) * a_shard
    communication = messages * rates.latency + work.sent / rates.bandwidth
    if work.phase == "gather":
        staging = rates.launch + 2 * own * work.inner * work.itemsize / rates.memory_bandwidth
    found = []
    for order in orders(work.phase, work.size, pieces):
        rows = {n: min(work.rows, math.ceil(n * work.rows / (work.size * a_shard))) for n in (1, *order)}
        each = {n: product(rates, rows[n], work.columns, work.inner, free) for n in rows}
        tiles, waves, largest = max(each.values())
        counts = {n: each[n][0] for n in each}
        computing, device = (
            _in_turns(work, rates, free, order, a_shard, counts, message)
            for message in (0.0, communication / max(1, messages))
        )
        parts = len(order) + a_shard
        host = parts * rates.host_product + messages * rates.host_message
        total = max(staging + device + reduction, host)
        found.append(
            Times(pieces, tiles, waves, parts, largest, computing, communication, staging, reduction, host, total)
        )  # fmt: skip
    return max(found, key=lambda way: way.total)


def _in_turns(
    work: Work, rates: Rates, free: int, order: tuple[int, ...], own: int, tiles: dict[int, int], message: float
) -> float:
    """Seconds until the last product and message are done.

    Args:
        free: processors beside messages. order: messages of each product. own: products of own rows. tiles: of the
            product of so many messages' rows. message: seconds of one.
    """
    since = [(0.0, free)]
    if work.phase == "gather" and free < rates.processors:  # the others are free once all messages have arrived
        since.append((sum(order) * message, rates.processors - free))
    processors = Processors(work.lanes, since, rates.launch, _tile(rates, work.inner), tiles)
    return finished(work.phase, order, own, processors.run, message)


def _gated(work: Work, rates: Rates) -> Times:
    own, messages = math.ceil(work.rows / work.size), work.size - 1
    tiles, waves, seconds = product(rates, work.rows, work.columns, work.inner)
    seconds = rates.launch + (seconds - rates.launch) / rates.gated_share
    communication = messages * rates.latency + work.sent / rates.bandwidth
    # Rows are copied to the workspace and to their place.
    staging = 2 * (rates.launch + 2 * own * work.inner * work.itemsize / rates.memory_bandwidth) + 2 * rates.latency
    total = staging + max(seconds, communication + seconds / work.size)
    host = rates.host_product + (messages + 4) * rates.host_pull
    return Times(GATED, tiles, waves, 1, seconds, seconds, communication, staging, 0.0, host, max(total, host))


def candidates(work: Work) -> tuple[int, ...]:
    """The ways to do the work that the model knows, ``OFF`` first."""
    return (*CANDIDATES, GATED) if work.pulled and work.phase == "gather" else CANDIDATES


def choose(work: Work, rates: Rates) -> int:
    """The way that beats ``OFF`` by more than the margin and all others; else ``OFF``."""
    seconds = {way: times(work, rates, way).total for way in candidates(work)}
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < MARGIN * seconds[OFF] else OFF


def reason(work: Work, rates: Rates) -> str:
    """Why ``choose`` chooses so: what pieces save, or what they cost."""
    whole, chosen = times(work, rates, OFF), choose(work, rates)
    best = min((times(work, rates, way) for way in candidates(work) if way != OFF), key=lambda way: way.total)
    if chosen != OFF:
        hidden = whole.total - best.total
        return f"hides {1e6 * hidden:,.0f} of {1e6 * whole.communication:,.0f} us of communication"
    costs = {
        "waves that are not full": best.computing - whole.computing,
        "the host": best.total if best.host >= best.total else 0.0,
        "staging and sums": best.staging + best.reduction - whole.reduction,
        "latencies": best.communication - whole.communication,
    }
    largest = max(costs, key=costs.__getitem__)
    return f"pieces take {best.total / whole.total:.2f} of the plain time at best; most costs {largest}"
