"""The two schedules that overlap communication with matmuls, over any transport, and the whole collectives.

    gather     whole = rows of all ranks        step k: chunk j of rank r + k arrives; own rows are there at once
    scatter    own   = sum over ranks of parts  step k: the part for rank r + k is sent; the own part is computed last

In step k every rank sends to one rank and receives from one, so the exchanges of a step form a permutation, and each
exchange is one grouped call that cannot deadlock. A shard is sent in ``chunks`` messages, the same number on every
rank. While a chunk is multiplied, the next ``IN_FLIGHT`` are being sent.

Producers are enqueued before consumers: one host thread posts an exchange, waits for it, then reads its rows. No kernel
here spins on a flag, so the order is correct for any number of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS). With one
queue an exchange that waits for the one before it blocks every matmul that was enqueued after it; then the next
exchange is posted only when a chunk has arrived.

No sums are formed in transit: every partial is sent once, to the rank that owns its rows, and that rank adds them in
rank order in fp32 (fp64 for fp64). The result does not depend on the order of arrival, so it has the same bits as the
unfused computation with the same chunks, on every run.

Whole shards go by one collective where the transport has it: an all-gather, and for a sum an all-to-all, or with
``grad_reduce="backend"`` the backend's own reduce-scatter, which is what the plain linears of other libraries call.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from parallel_ops.comm.sum_partials import sum_partials
from parallel_ops.comm.transport.base import (
    IN_FLIGHT,
    Exchange,
    Handle,
    Receive,
    Send,
    Transport,
    exchange_parts,
    in_flight,
)

Span = tuple[int, int]


def matrix(t: Tensor) -> Tensor:
    """``[..., N]`` as a contiguous matrix."""
    return t.flatten(0, -2).contiguous()


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``x W^T + b``."""
    if bias is None:
        return torch.mm(x, weight.t()) if out is None else torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t()) if out is None else torch.addmm(bias, x, weight.t(), out=out)


def spans(sizes: Sequence[int]) -> list[Span]:
    """First and last (exclusive) row of each rank."""
    ends = [0, *accumulate(sizes)]
    return list(pairwise(ends))


def split(span: Span, chunks: int) -> list[Span]:
    """``span`` in ``chunks`` nearly equal parts; some are empty if there are fewer rows."""
    start, rows = span[0], span[1] - span[0]
    return [(start + rows * j // chunks, start + rows * (j + 1) // chunks) for j in range(chunks)]


def _of_others(rank: int, sizes: Sequence[int], chunks: int) -> Iterator[tuple[int, Span]]:
    """The chunks of the other ranks in the order of their steps, each with its step."""
    where = spans(sizes)
    return ((k, span) for k in range(1, len(sizes)) for span in split(where[(rank + k) % len(sizes)], chunks))


def gather_order(rank: int, sizes: Sequence[int], chunks: int) -> list[Span]:
    """The spans in the order in which ``gather`` calls ``consume`` on ``rank``."""
    return [*split(spans(sizes)[rank], chunks), *(span for _, span in _of_others(rank, sizes, chunks))]


def scatter_order(rank: int, sizes: Sequence[int], chunks: int) -> list[Span]:
    """The spans in the order in which ``scatter`` calls ``produce`` on ``rank``."""
    return [*(span for _, span in _of_others(rank, sizes, chunks)), *split(spans(sizes)[rank], chunks)]


def gather(
    op: str, transport: Transport, shard: Tensor, sizes: Sequence[int], chunks: int,
    consume: Callable[[Span, Tensor], None],
) -> Tensor:  # fmt: skip
    """Returns the rows of all ranks; calls ``consume(span, rows)`` for each chunk as soon as it has arrived.

    Args:
        shard: ``[sizes[rank], H]``, contiguous.
        chunks: messages for each shard.
    """
    rank, size = transport.rank, transport.size
    whole, where = shard.new_empty((sum(sizes), *shard.shape[1:])), spans(sizes)
    whole[slice(*where[rank])].copy_(shard)
    mine, arriving = split(where[rank], chunks), list(_of_others(rank, sizes, chunks))
    posted: deque[Exchange] = deque()
    steps = zip(mine * (size - 1), arriving, strict=True)

    def post() -> None:
        for own, (k, span) in steps:
            sends = [Send(whole[slice(*own)], (rank - k) % size)]
            receives = [Receive(whole[slice(*span)], (rank + k) % size)]
            posted.append(Exchange(op, transport, sends, receives))
            return

    for _ in range(in_flight(transport)):
        post()
    for span in mine:
        consume(span, whole[slice(*span)])
    for _, span in arriving:
        posted.popleft().wait()
        post()
        consume(span, whole[slice(*span)])
    return whole


def scatter(
    op: str, transport: Transport, sizes: Sequence[int], chunks: int, like: Tensor,
    produce: Callable[[Span, Tensor | None], Tensor],
) -> Tensor:  # fmt: skip
    """Returns ``[P, sizes[rank], N]``, the parts that all ranks computed for this rank's rows, in rank order.

    Args:
        chunks: messages for each rank's rows.
        like: ``[any, N]``: dtype, device and columns of a part.
        produce: ``produce(span, out)`` computes this rank's part for the rows of ``span``, into ``out`` if given.
    """
    rank, size = transport.rank, transport.size
    mine = split((0, sizes[rank]), chunks)
    landing = like.new_empty((size, sizes[rank], *like.shape[1:]))
    posted: deque[Exchange] = deque()
    for own, (k, span) in zip(mine * (size - 1), _of_others(rank, sizes, chunks), strict=True):
        sends = [Send(produce(span, None), (rank + k) % size)]
        source = (rank - k) % size
        posted.append(Exchange(op, transport, sends, [Receive(landing[source, slice(*own)], source)]))
        if len(posted) > IN_FLIGHT:
            posted.popleft().wait()
    first = spans(sizes)[rank][0]
    for start, stop in mine:
        produce((first + start, first + stop), landing[rank, start:stop])
    for exchange in posted:
        exchange.wait()
    return landing


def start_gather(op: str, transport: Transport, shard: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Handle]:
    """Starts an all-gather: the rows of all ranks, complete after ``handle.wait()``, which may be called repeatedly."""
    whole = shard.new_empty((sum(sizes), *shard.shape[1:]))
    if len(set(sizes)) == 1 and (handle := transport.all_gather(op, whole, shard)) is not None:
        return whole, handle
    where, rank = spans(sizes), transport.rank
    own = whole[slice(*where[rank])]
    own.copy_(shard)
    others = [(rank + k) % transport.size for k in range(1, transport.size)]
    receives = [Receive(whole[slice(*where[peer])], peer) for peer in others]
    return whole, Exchange(op, transport, [Send(own, peer) for peer in others], receives)


class PendingReduceScatter:
    """A reduce-scatter on its way, over any transport.

    Args:
        handle: of what arrives. partials: ``[P, ...]``, the parts of all ranks in rank order; or, if ``summed``, their
        sum ``[...]`` alone.
    """

    def __init__(self, handle: Handle, partials: Tensor, *, summed: bool) -> None:
        self._handle, self._partials, self._summed = handle, partials, summed

    def total(self, bias: Tensor | None = None) -> Tensor:
        """Waits; the sum of the parts and ``bias`` ``[N]``. Called once."""
        self._handle.wait()
        if not self._summed:
            return sum_partials(self._partials, bias)
        return self._partials if bias is None else self._partials.add_(bias)


def start_scatter(
    op: str, transport: Transport, parts: Tensor, sizes: Sequence[int], shape: Sequence[int], *, exact: bool
) -> PendingReduceScatter:
    """Starts a reduce-scatter of whole parts.

    Args:
        parts: ``[sum(sizes), N]``, contiguous: this rank's part of all rows; must not change before the wait.
        shape: of the result, ``[sizes[rank], N]`` or its rows in several dimensions.
        exact: send every part as it is and add in rank order; otherwise a backend that sums parts of equal sizes does.
    """
    rank, even = transport.rank, len(set(sizes)) == 1
    if even and not exact:
        total = parts.new_empty(tuple(shape))
        if (handle := transport.reduce_scatter(op, total, parts)) is not None:
            return PendingReduceScatter(handle, total, summed=True)
    landing = parts.new_empty((transport.size, *shape))
    if even and (handle := transport.all_to_all(op, landing, parts)) is not None:
        return PendingReduceScatter(handle, landing, summed=False)
    rows = [of_rank.view(sizes[rank], *parts.shape[1:]) for of_rank in landing]
    exchange = exchange_parts(op, transport, rows, parts.split(list(sizes)))
    return PendingReduceScatter(exchange, landing, summed=False)
