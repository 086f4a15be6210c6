"""The two schedules that overlap communication with matrix products, over any transport.

    gather     whole = rows of all ranks        step k: piece j of rank r + k arrives; own rows are there at once
    scatter    own   = sum over ranks of parts  step k: the part for rank r + k is sent; the own part is computed last

In step k every rank sends to one rank and receives from one, so the exchanges of a step form a permutation, and each
exchange is one grouped call that cannot deadlock. A shard is sent in ``pieces`` messages, the same number on every
rank. While a piece is multiplied, the next ``IN_FLIGHT`` are being sent. With ``TAPERED`` shards are sent whole, and
those that lie beside each other are multiplied together, 1, 2 and 4 in a gather, 4, 2 and 1 in a scatter: fewer
products, which are larger, where messages are faster. On GPUs products take turns on two streams (``lanes.py``).

Producers are enqueued before consumers: one host thread posts an exchange, waits for it, then reads its rows. No kernel
here spins on a flag, so the order is correct for any number of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS). With one
queue an exchange that waits for the one before it blocks every product that was enqueued after it; then the next
exchange is posted only when a piece has arrived.

No sums are formed in transit: every partial is sent once, to the rank that owns its rows, and that rank adds them in
rank order in fp32 (fp64 for fp64). The result does not depend on the order of arrival, so it has the same bits as the
unfused computation with the same pieces, on every run.

Whole shards go by one collective where the transport has it: an all-gather, and for a sum an all-to-all, or with
``reduction="backend"`` the backend's own reduce-scatter, which is what the plain linears of other libraries call.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from parallel_ops._internal.overlap_schedule import Phase, cut, order
from parallel_ops.comm.sum_partials import sum_partials
from parallel_ops.comm.transport.base import TORCH_MEMORY, Handle, Receive, Send, Transport, Workspace
from parallel_ops.comm.transport.exchange import IN_FLIGHT, Exchange, exchange_parts, in_flight
from parallel_ops.tensor_parallel.linear.lanes import lanes_of

Span = tuple[int, int]


def spans(sizes: Sequence[int]) -> list[Span]:
    """First and last (exclusive) row of each rank."""
    ends = [0, *accumulate(sizes)]
    return list(pairwise(ends))


def split(span: Span, pieces: int) -> list[Span]:
    """``span`` in ``pieces`` nearly equal parts; some are empty if there are fewer rows."""
    start, rows = span[0], span[1] - span[0]
    return [(start + rows * j // pieces, start + rows * (j + 1) // pieces) for j in range(pieces)]


def _messages(phase: Phase, rank: int, sizes: Sequence[int], pieces: int) -> list[list[Span]]:
    """The spans of other ranks in the order of their steps, those that one product takes together."""
    size, where = len(sizes), spans(sizes)
    messages = (span for k in range(1, size) for span in split(where[(rank + k) % size], cut(pieces)))
    return [[next(messages) for _ in range(count)] for count in order(phase, size, rank, pieces)]


def _joined(group: Sequence[Span]) -> Span:
    return group[0][0], group[-1][1]


def gather_order(rank: int, sizes: Sequence[int], pieces: int) -> Iterator[Span]:
    """The spans in the order in which ``gather`` calls ``consume`` on ``rank``."""
    yield from split(spans(sizes)[rank], cut(pieces))
    yield from map(_joined, _messages("gather", rank, sizes, pieces))


def scatter_order(rank: int, sizes: Sequence[int], pieces: int) -> Iterator[Span]:
    """The spans in the order in which ``scatter`` calls ``produce`` on ``rank``."""
    yield from map(_joined, _messages("scatter", rank, sizes, pieces))
    yield from split(spans(sizes)[rank], cut(pieces))


def start_gather(
    op: str, transport: Transport, shard: Tensor, sizes: Sequence[int], memory: Workspace = TORCH_MEMORY
) -> tuple[Tensor, Handle]:
    """Starts an all-gather: the rows of all ranks, complete after ``handle.wait()``, which may be called repeatedly.

    Args:
        memory: of the rows.
    """
    whole = memory.empty((sum(sizes), *shard.shape[1:]), shard)
    if len(set(sizes)) == 1 and (handle := transport.all_gather(op, whole, shard)) is not None:
        return whole, handle
    where, rank = spans(sizes), transport.rank
    own = whole[slice(*where[rank])]
    own.copy_(shard)
    others = [(rank + k) % transport.size for k in range(1, transport.size)]
    sends = [Send(own, peer, own) for peer in others]
    receives = [Receive(whole[slice(*where[peer])], peer) for peer in others]
    return whole, Exchange(op, transport, sends, receives)


def gather(
    op: str,
    transport: Transport,
    shard: Tensor,
    sizes: Sequence[int],
    pieces: int,
    consume: Callable[[Span, Tensor], None],
    memory: Workspace = TORCH_MEMORY,
) -> Tensor:
    """Returns the rows of all ranks; calls ``consume(span, rows)`` for each piece as soon as it has arrived.

    Args:
        shard: ``[sizes[rank], H]``, contiguous.
        pieces: messages for each shard, or ``TAPERED``.
        memory: of the rows.
    """
    rank, size = transport.rank, transport.size
    whole = memory.empty((sum(sizes), *shard.shape[1:]), shard)
    where = spans(sizes)
    whole[slice(*where[rank])].copy_(shard)
    mine = split(where[rank], cut(pieces))
    groups = _messages("gather", rank, sizes, pieces)
    ahead, lanes = in_flight(transport), lanes_of(shard.device, transport)
    posted: deque[Exchange] = deque()
    leaves = [(k, own) for k in range(1, size) for own in mine]
    steps = zip(leaves, [span for group in groups for span in group], strict=True)

    def post() -> None:
        for (k, own), span in steps:
            to, source = (rank - k) % size, (rank + k) % size
            leaving, landing = whole[slice(*own)], whole[slice(*span)]
            with lanes.messages():
                posted.append(Exchange(op, transport, [Send(leaving, to, leaving)], [Receive(landing, source)]))
            return

    with lanes:
        for _ in range(ahead if ahead == 1 else max([ahead, *map(len, groups)])):
            post()
        for span in mine:
            with lanes.product():
                consume(span, whole[slice(*span)])
        for group in groups:
            with lanes.product():
                for _ in group:
                    posted.popleft().wait()
                    post()
                consume(_joined(group), whole[slice(*_joined(group))])
    return whole


def scatter(
    op: str,
    transport: Transport,
    sizes: Sequence[int],
    pieces: int,
    like: Tensor,
    produce: Callable[[Span, Tensor | None], Tensor],
    memory: Workspace = TORCH_MEMORY,
) -> Tensor:
    """Returns ``[P, sizes[rank], N]``, the parts that all ranks computed for this rank's rows, in rank order.

    Args:
        like: ``[any, N]``: dtype, device and columns of a part.
        produce: ``produce(span, out)`` computes this rank's part for the rows of ``span``, into ``out`` if given.
        memory: of all parts, where ranks have equal rows. Elsewhere parts are in memory of torch's: all at once where
            products take turns on streams, else until they were sent.
    """
    rank, size = transport.rank, transport.size
    where, total, columns = spans(sizes), sum(sizes), like.shape[1:]
    first = where[rank][0]
    parts, lanes = None, lanes_of(like.device, transport)
    if memory is TORCH_MEMORY or len(set(sizes)) > 1:
        landing = like.new_empty((size, sizes[rank], *columns))
        if lanes.count > 1:
            parts = like.new_empty((total, *columns))
    else:  # both at once, so that either all ranks have them where others can write, or none
        parts, landing = memory.empty((2, total, *columns), like)
        landing = landing.view(size, sizes[rank], *columns)
    mine, groups = split(where[rank], cut(pieces)), _messages("scatter", rank, sizes, pieces)
    ahead = max([IN_FLIGHT, *map(len, groups)])
    posted: deque[Exchange] = deque()
    steps = ((k, own) for k in range(1, size) for own in mine)
    with lanes:
        for group in groups:
            with lanes.product():
                start, stop = _joined(group)
                part = produce((start, stop), None if parts is None else parts[start:stop])
                for span in group:
                    k, own = next(steps)
                    to, source, rows = (rank + k) % size, (rank - k) % size, slice(own[0] - first, own[1] - first)
                    at = None if parts is None else landing[rank, rows]
                    leaving = Send(part[span[0] - start : span[1] - start], to, at)
                    posted.append(Exchange(op, transport, [leaving], [Receive(landing[source, rows], source)]))
                    if len(posted) > ahead:
                        posted.popleft().wait()
        for span in mine:
            with lanes.product():
                produce(span, landing[rank, span[0] - first : span[1] - first])
    for exchange in posted:
        exchange.wait()
    return landing


class Scattered:
    """A reduce-scatter on its way, over any transport.

    Args:
        handle: of what arrives. partials: ``[P, ...]``, the parts of all ranks in rank order; or, if ``summed``, their
        sum ``[...]`` alone.
    """

    def __init__(self, handle: Handle, partials: Tensor, *, summed: bool) -> None:
        self._handle, self._partials, self._summed = handle, partials, summed

    def wait(self) -> None:
        """Until everything has arrived. May be called repeatedly."""
        self._handle.wait()

    def total(self, bias: Tensor | None = None) -> Tensor:
        """The sum of the parts and ``bias`` ``[N]``; called once."""
        self.wait()
        if not self._summed:
            return sum_partials(self._partials, bias)
        return self._partials if bias is None else self._partials.add_(bias)


def start_scatter(
    op: str, transport: Transport, parts: Tensor, sizes: Sequence[int], shape: Sequence[int], *, exact: bool,
    memory: Workspace = TORCH_MEMORY,
) -> Scattered:  # fmt: skip
    """Starts a reduce-scatter of whole parts.

    Args:
        parts: ``[sum(sizes), N]``, contiguous: this rank's part of all rows; must not change before the wait.
        shape: of the result, ``[sizes[rank], N]`` or its rows in several dimensions.
        exact: send every part as it is and add in rank order; otherwise a backend that sums parts of equal sizes does.
        memory: of the parts of other ranks, until their sum was taken.
    """
    rank, even = transport.rank, len(set(sizes)) == 1
    if even and not exact:
        total = parts.new_empty(tuple(shape))
        if (handle := transport.reduce_scatter(op, total, parts)) is not None:
            return Scattered(handle, total, summed=True)
    landing = (memory if even else TORCH_MEMORY).empty((transport.size, *shape), parts)
    if even and (handle := transport.all_to_all(op, landing, parts)) is not None:
        return Scattered(handle, landing, summed=False)
    rows = [of_rank.view(sizes[rank], *parts.shape[1:]) for of_rank in landing]
    return Scattered(exchange_parts(op, transport, rows, parts.split(list(sizes))), landing, summed=False)
