"""The two schedules that overlap communication with matrix products, over any transport.

    gather     whole = rows of all ranks        step k: piece j of rank r + k arrives; own rows are there at once
    scatter    own   = sum over ranks of parts  step k: the part for rank r + k is sent; the own part is computed last

In step k every rank sends to one rank and receives from one, so the exchanges of a step form a permutation, and each
exchange is one grouped call that cannot deadlock. A shard is sent in ``pieces`` messages, the same number on every
rank. While a piece is multiplied, the next ``IN_FLIGHT`` are being sent. With ``PAIRS`` or ``QUADS`` shards are
sent whole, and two or four that lie beside each other are multiplied at once: fewer products, which are larger, where
messages are faster.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from parallel_ops._internal.overlap_model import cut
from parallel_ops.comm.sum_partials import sum_partials
from parallel_ops.comm.transport.base import TORCH_MEMORY, Handle, Receive, Send, Transport, Workspace
from parallel_ops.comm.transport.exchange import IN_FLIGHT, Exchange, exchange_parts, in_flight

Span = tuple[int, int]


def spans(sizes: Sequence[int]) -> list[Span]:
    """First and last (exclusive) row of each rank."""
    ends = [0, *accumulate(sizes)]
    return list(pairwise(ends))


def split(span: Span, pieces: int) -> list[Span]:
    """``span`` in ``pieces`` nearly equal parts; some are empty if there are fewer rows."""
    start, rows = span[0], span[1] - span[0]
    return [(start + rows * j // pieces, start + rows * (j + 1) // pieces) for j in range(pieces)]


def _messages(rank: int, sizes: Sequence[int], pieces: int, steps: Iterable[int]) -> list[list[Span]]:
    """The spans of other ranks in the order of their steps, those that one product takes together."""
    where, (a_shard, together) = spans(sizes), cut(pieces)
    found: list[list[Span]] = []
    for k in steps:
        for span in split(where[(rank + k) % len(sizes)], a_shard):
            if found and len(found[-1]) < together and found[-1][-1][1] == span[0]:
                found[-1].append(span)
            else:
                found.append([span])
    return found


def _joined(group: Sequence[Span]) -> Span:
    return group[0][0], group[-1][1]


def gather_order(rank: int, sizes: Sequence[int], pieces: int) -> Iterator[Span]:
    """The spans in the order in which ``gather`` calls ``consume`` on ``rank``."""
    yield from split(spans(sizes)[rank], cut(pieces)[0])
    yield from map(_joined, _messages(rank, sizes, pieces, range(1, len(sizes))))


def scatter_order(rank: int, sizes: Sequence[int], pieces: int) -> Iterator[Span]:
    """The spans in the order in which ``scatter`` calls ``produce`` on ``rank``."""
    yield from map(_joined, _messages(rank, sizes, pieces, range(1, len(sizes))))
    yield from split(spans(sizes)[rank], cut(pieces)[0])


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
        pieces: messages for each shard, ``PAIRS`` or ``QUADS``.
        memory: of the rows.
    """
    rank, size = transport.rank, transport.size
    whole = memory.empty((sum(sizes), *shard.shape[1:]), shard)
    where = spans(sizes)
    whole[slice(*where[rank])].copy_(shard)
    a_shard, together = cut(pieces)
    mine = split(where[rank], a_shard)
    groups = _messages(rank, sizes, pieces, range(1, size))
    posted: deque[Exchange] = deque()
    leaves = [(k, own) for k in range(1, size) for own in mine]
    steps = zip(leaves, [span for group in groups for span in group], strict=True)

    def post() -> None:
        for (k, own), span in steps:
            to, source = (rank - k) % size, (rank + k) % size
            leaving, landing = whole[slice(*own)], whole[slice(*span)]
            posted.append(Exchange(op, transport, [Send(leaving, to, leaving)], [Receive(landing, source)]))
            return

    ahead = in_flight(transport)
    for _ in range(ahead if ahead == 1 else max(ahead, together)):
        post()
    for span in mine:
        consume(span, whole[slice(*span)])
    for group in groups:
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
        memory: of all parts, where ranks have equal rows.
    """
    rank, size = transport.rank, transport.size
    where, total, columns = spans(sizes), sum(sizes), like.shape[1:]
    first = where[rank][0]
    parts = None
    if memory is TORCH_MEMORY or len(set(sizes)) > 1:
        landing = like.new_empty((size, sizes[rank], *columns))
    else:  # both at once, so that either all ranks have them where others can write, or none
        parts, landing = memory.empty((2, total, *columns), like)
        landing = landing.view(size, sizes[rank], *columns)
    a_shard, together = cut(pieces)
    mine = split(where[rank], a_shard)
    posted: deque[Exchange] = deque()
    steps = ((k, own) for k in range(1, size) for own in mine)
    for group in _messages(rank, sizes, pieces, range(1, size)):
        start, stop = _joined(group)
        part = produce((start, stop), None if parts is None else parts[start:stop])
        for span in group:
            k, own = next(steps)
            to, source, rows = (rank + k) % size, (rank - k) % size, slice(own[0] - first, own[1] - first)
            leaving = Send(part[span[0] - start : span[1] - start], to, None if parts is None else landing[rank, rows])
            posted.append(Exchange(op, transport, [leaving], [Receive(landing[source, rows], source)]))
            if len(posted) > max(IN_FLIGHT, together):
                posted.popleft().wait()
    for span in mine:
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
