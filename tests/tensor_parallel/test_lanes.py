"""Products that take turns on streams: nothing is read before it is there, and the caller's stream has waited for all.

Ranks enqueue what they would on a GPU; then any stream whose first entry can run may be the next to run it.
"""

import contextlib
import random

import pytest
import torch

from parallel_ops._internal.overlap_schedule import TAPERED
from parallel_ops.comm.transport.base import Capabilities, Endpoint, Send
from parallel_ops.tensor_parallel.linear import overlap
from parallel_ops.tensor_parallel.linear.lanes import Lanes, lanes_of

NCCL = 3  # its stream, behind the three of an op


class End(Endpoint):
    """What a test needs of a transport: messages alone."""

    def barrier(self, op):
        raise NotImplementedError("no schedule has a barrier")


class Rank(End):
    """One rank's streams, 0 the caller's, and its transport, whose stream waits for the one that is current."""

    def __init__(self, rank, mail, joins):
        super().__init__(rank, len(mail), Capabilities("enqueued", ("cpu",), True, True, True))
        self.queues, self.given, self.current = [[] for _ in range(4)], [0] * 4, 0
        self.mail, self.joins, self.got = mail, joins, 0

    @contextlib.contextmanager
    def on(self, lane):
        before, self.current = self.current, lane
        yield
        self.current = before

    def put(self, lane, action, ready=lambda: True):
        self.queues[lane].append((ready, action))
        self.given[lane] += 1

    def reached(self, lane):
        """Whether the stream has done what it was given so far."""
        queue, before = self.queues[lane], self.given[lane]
        return lambda: self.given[lane] - len(queue) >= before

    def follow(self, lane, other):
        if self.joins or lane:
            self.put(lane, lambda: None, self.reached(other))

    def _start(self, op, chunks):
        self.put(NCCL, lambda: None, self.reached(self.current))
        for chunk in chunks:
            if isinstance(chunk, Send):
                box = self.mail[self.rank][chunk.peer]
                self.put(NCCL, lambda chunk=chunk, box=box: box.append(chunk.tensor.clone()))
        for chunk in chunks:
            if not isinstance(chunk, Send):
                box = self.mail[chunk.peer][self.rank]
                self.put(NCCL, lambda chunk=chunk, box=box: chunk.tensor.copy_(box.pop(0)), lambda box=box: bool(box))
        done = self.reached(NCCL)

        class Handle:
            def wait(_):
                self.put(self.current, lambda: None, done)

        return [Handle()] * len(chunks)


def run(sizes, pieces, seed, monkeypatch, joins=True):
    """What each rank's caller sees: gathered rows, their products, and the parts of a scatter."""
    size = len(sizes)
    mail = [[[] for _ in range(size)] for _ in range(size)]
    ranks = [Rank(rank, mail, joins) for rank in range(size)]
    whole = torch.arange(sum(sizes) * 2.0).view(-1, 2)
    seen, lanes_used = [], set()
    for end in ranks:
        monkeypatch.setattr(overlap, "lanes_of", lambda device, transport: Lanes(transport))
        product = torch.full_like(whole, -1.0)

        def consume(span, rows, end=end, product=product):
            lanes_used.add(end.current)
            end.put(end.current, lambda: product[slice(*span)].copy_(2 * rows))

        def produce(span, out, end=end):
            end.put(end.current, lambda: out.copy_(whole[slice(*span)] * (end.rank + 1)))
            return out

        got = overlap.gather("test", end, whole.split(sizes)[end.rank].clone(), sizes, pieces, consume)
        results = []
        end.put(0, lambda results=results, got=got, product=product: results.extend((got.clone(), product.clone())))
        parts = overlap.scatter("test", end, sizes, pieces, torch.empty(0, 2), produce)
        end.put(0, lambda results=results, parts=parts: results.append(parts.clone()))
        seen.append(results)
    order = random.Random(seed)
    while waiting := [queue for end in ranks for queue in end.queues if queue]:
        ready = [queue for queue in waiting if queue[0][0]()]
        assert ready, "a deadlock"
        order.choice(ready).pop(0)[1]()
    scales = torch.arange(1.0, size + 1).view(-1, 1, 1)
    return lanes_used, [
        (torch.equal(got, whole), torch.equal(product, 2 * whole), torch.equal(parts, scales * own))
        for (got, product, parts), own in zip(seen, whole.split(sizes), strict=True)
    ]


@pytest.mark.parametrize("pieces", [TAPERED, 1, 2])
@pytest.mark.parametrize("sizes", [[2, 2], [3] * 8, [2, 5, 1, 3]])
def test_streams_in_any_order(sizes, pieces, monkeypatch, trials):
    for seed in range(trials or 10):
        used, seen = run(sizes, pieces, seed, monkeypatch)
        assert used == {0, 1}
        assert all(all(same) for same in seen)


def test_a_caller_that_does_not_wait_for_all_streams_is_found(monkeypatch):
    assert not all(all(same) for seed in range(5) for same in run([3] * 4, 1, seed, monkeypatch, joins=False)[1])


def test_streams_are_joined_after_an_error():
    end = Rank(0, [[[], []], [[], []]], True)

    def failing():
        with Lanes(end) as lanes, lanes.product(), lanes.product():
            raise RuntimeError("in a product")

    with pytest.raises(RuntimeError, match="in a product"):
        failing()
    assert end.given[0] == 2  # a wait for each of the others


def test_one_stream_where_a_second_cannot_help(monkeypatch):
    """On CPUs, over a transport that the host waits for, and with one hardware queue."""
    end, gpu = Rank(0, [[[], []], [[], []]], True), torch.device("cuda", 0)
    assert lanes_of(torch.device("cpu"), end).count == 1
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert lanes_of(gpu, end).count == 1
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    end._capabilities = Capabilities("host", ("cuda",), True, False, False)
    assert lanes_of(gpu, end).count == 1


class Link(End):
    """Rank 0 of ranks whose rows are known, over a stream of a GPU."""

    def __init__(self, rows):
        super().__init__(0, len(rows), Capabilities("known", ("cuda",), True, True, True))
        self.rows, self.stream = rows, torch.cuda.Stream()

    def _start(self, op, chunks):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for chunk in chunks:
                if not isinstance(chunk, Send):
                    torch.cuda._sleep(200_000)  # so that who does not wait is too early
                    chunk.tensor.copy_(self.rows[chunk.peer])
        event = self.stream.record_event()

        class Handle:
            def wait(_):
                torch.cuda.current_stream().wait_event(event)

        return [Handle()] * len(chunks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pieces", [TAPERED, 1])
def test_on_a_gpu_eager_and_captured(pieces, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    sizes, numbers = [256] * 4, torch.Generator().manual_seed(0)

    def integers(*shape):  # whose products are exact
        return torch.randint(-1, 2, shape, generator=numbers).to("cuda", torch.bfloat16)

    whole, weight = integers(1024, 512), integers(384, 512)
    end, out, total = Link(whole.split(sizes)), torch.zeros_like(whole @ weight.t()), torch.zeros(256, 512).cuda()
    assert lanes_of(whole.device, end).count == 2

    def step():
        def consume(span, rows):
            torch.mm(rows, weight.t(), out=out[slice(*span)])

        got = overlap.gather("test", end, whole[:256].clone(), sizes, pieces, consume)
        parts = overlap.scatter(
            "test", end, sizes, pieces, whole[:0], lambda span, part: torch.mul(got[slice(*span)], 2, out=part)
        )
        total.copy_(parts.float().sum(0))

    want, sums = whole @ weight.t(), 2 * whole[:256].float() + sum(rows.float() for rows in whole.split(sizes)[1:])
    step()
    assert torch.equal(out, want) and torch.equal(total, sums)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    out.zero_(), total.zero_()
    graph.replay()
    assert torch.equal(out, want) and torch.equal(total, sums)
