"""The protocol of the symmetric transport, over devices of the CPU; and what it says where there is no GPU."""

import gc
import time
import types
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_ops.comm.errors import PeerError
from parallel_ops.comm.transport.base import Receive, Send
from parallel_ops.comm.transport.symmetric import transport as symmetric
from parallel_ops.comm.transport.symmetric import watch as _symmetric_watch
from parallel_ops.comm.transport.symmetric.transport import SymmetricTransport
from support import collectives
from support.distributed import Raised, ranks
from support.loopback import LoopbackGroup
from support.symmetric import Devices, FakeMemory


def run(size, rank_main, *, seed=0, one_queue=False, slot_bytes=1 << 16, timeout=600.0):
    devices = Devices(size, slot_bytes, seed, one_queue)
    return LoopbackGroup(size, seed=seed).run(
        lambda host: rank_main(SymmetricTransport(FakeMemory(devices, host), timeout=timeout))
    )


@pytest.mark.parametrize("one_queue", [False, True])
@settings(max_examples=20)
@given(size=st.integers(1, 16), seed=st.integers(0, 1000), batches=st.integers(1, 6), data=st.data())
def test_batches_of_any_size_arrive(one_queue, size, seed, batches, data):
    """Every rank sends every other a number of chunks a batch; some hosts run ahead of others by whole batches."""
    counts = data.draw(st.lists(st.integers(0, 3), min_size=batches, max_size=batches))
    late = data.draw(st.booleans())

    def content(batch, source, target, i):
        return torch.full((3 * i + source % 3,), 1000.0 * batch + 40 * source + 2 * target + i)

    def main(transport):
        rank, handles, got = transport.rank, [], []
        peers = [(rank + step) % size for step in range(1, size)]
        for batch, count in enumerate(counts):
            sent = [Send(content(batch, rank, p, i), p) for p in peers for i in range(count)]
            received = [Receive(torch.empty_like(content(batch, p, rank, i)), p) for p in peers for i in range(count)]
            got.append((batch, received))
            posted = transport.post(f"batch {batch}", sent + received)
            handles += posted
            for handle in [] if late else posted:
                handle.wait()
        for handle in handles:
            handle.wait()
        for batch, received in got:
            expected = [content(batch, p, rank, i) for p in peers for i in range(counts[batch])]
            assert all(torch.equal(r.tensor, e) for r, e in zip(received, expected, strict=True))
        return True

    assert run(size, main, seed=seed, one_queue=one_queue) == [True] * size


@given(size=st.integers(1, 16), seed=st.integers(0, 1000), rounds=st.integers(1, 4))
def test_barrier(size, seed, rounds):
    passed = [0] * size

    def main(transport):
        for i in range(rounds):
            passed[transport.rank] += 1
            transport.barrier("sync")
            assert min(passed) >= i + 1

    run(size, main, seed=seed)


def test_counters_wrap_around(monkeypatch):
    monkeypatch.setattr(symmetric._Link, "chunks", 2**32 - 2)

    def main(transport):
        total = 0.0
        for i in range(6):
            x, y = torch.tensor([float(i)]), torch.empty(1)
            for handle in transport.post("test", [Send(x, 1 - transport.rank), Receive(y, 1 - transport.rank)]):
                handle.wait()
            total += y.item()
        return total

    devices = Devices(2, 1024, 0, False)
    devices.flags = [[2**32 - 2] * 4 for _ in range(2)]
    group = LoopbackGroup(2, seed=0)
    assert group.run(lambda host: main(SymmetricTransport(FakeMemory(devices, host)))) == [15.0, 15.0]


def test_a_rank_that_does_not_come_frees_the_others_after_the_timeout():
    def main(transport):
        if transport.rank == 1:
            return None
        y = torch.empty(1)
        (handle,) = transport.post("gather", [Receive(y, 1)])
        message = failure(transport)
        with pytest.raises(PeerError, match="gather"):
            transport.post("next", [])
        with pytest.raises(PeerError, match="gather"):
            handle.wait()
        return message, transport._memory.released > 0

    outcomes = run(3, main, timeout=0.2)
    for rank in (0, 2):
        message = f"gather: rank {rank} of 3 waited 0.2 s for its transfers with ranks [1]; no report from ranks [1]"
        assert outcomes[rank] == (message, True)


def eventually(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def failure(transport):
    """The message of the failure that the transport comes to know of."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            transport.check()
        except PeerError as error:
            return str(error)
        time.sleep(0.01)
    return None


def alone(timeout=0.1):
    """Rank 0 of two, whose peer never comes, and its devices."""
    devices = Devices(2, 1024, 0, False)
    host = types.SimpleNamespace(rank=0, size=2, wait_until=lambda ready, op, what: ready())
    return SymmetricTransport(FakeMemory(devices, host), timeout=timeout), devices


def test_streams_are_freed_again_until_they_are_free():
    """A peer that was only late sets a flag back to what it had to say."""
    transport, devices = alone()
    memory, flags = transport._memory, devices.flags[0]
    release = memory.release

    def overwritten(values):
        release(values)
        if memory.released < 4:
            flags[1] = 0

    memory.release = overwritten
    handles = transport.post("gather", [Receive(torch.empty(1), 1), Receive(torch.empty(1), 1)])
    assert failure(transport) is not None
    eventually(lambda: not transport._watch._under_way)
    assert memory.released >= 4 and flags[1] == 2
    assert all(handle._event.done() for handle in handles)


def test_a_fault_of_the_watch_is_an_error_of_the_next_call_and_frees_the_streams():
    transport, devices = alone()

    def fault():
        raise RuntimeError("out of order")

    transport._memory.flags = fault
    (handle,) = transport.post("gather", [Receive(torch.empty(1), 1)])
    assert failure(transport) == "symmetric transport: rank 0 of 2 failed to watch its transfers: out of order"
    eventually(handle._event.done)
    assert devices.flags[0][1] == 1


def test_a_watch_that_cannot_begin_is_an_error_of_the_next_call(monkeypatch):
    def fail(device):
        raise RuntimeError(f"no driver for {device}")

    monkeypatch.setattr(_symmetric_watch, "begin_watch_thread", fail)
    transport, _ = alone()
    (handle,) = transport.post("gather", [Receive(torch.empty(1), 1)])
    assert failure(transport) == "symmetric transport: rank 0 of 2 cannot watch its transfers: no driver for cpu"
    eventually(handle._event.done)


def test_an_enqueuing_that_breaks_off_fails_the_transport_and_frees_its_streams():
    transport, devices = alone(timeout=10.0)
    copies = []

    def copy(target, source):
        copies.append(target)
        if len(copies) == 2:
            raise RuntimeError("invalid argument")

    transport._receives.copy = copy
    with pytest.raises(RuntimeError, match="invalid argument"):
        transport.post("gather", [Receive(torch.empty(1), 1), Receive(torch.empty(1), 1)])
    with pytest.raises(PeerError, match="gather: rank 0 of 2 failed to enqueue its transfers: invalid argument"):
        transport.post("next", [Receive(torch.empty(1), 1)])
    eventually(lambda: not transport._watch._under_way)
    assert devices.flags[0][1] == 2


def test_a_capture_is_refused_before_anything_is_enqueued(monkeypatch):
    def capturing(op, device_type, what):
        raise RuntimeError(f"{op}: {what}")

    transport, devices = alone()
    with monkeypatch.context() as patched:
        patched.setattr(symmetric, "refuse_capture", capturing)
        with pytest.raises(RuntimeError, match="gather: the symmetric transport cannot be captured"):
            transport.post("gather", [Send(torch.empty(1), 1)])
    assert not any(devices.queues)
    transport.check()
    (handle,) = transport.post("gather", [Send(torch.empty(1), 1)])
    handle.wait()


def test_a_handle_that_was_not_waited_for_keeps_its_memory_from_others():
    transport, _ = alone()
    waited, dropped = torch.empty(1), torch.empty(1)
    first, second = transport.post("gather", [Send(waited, 1), Send(dropped, 1)])
    first.wait()
    del first, second
    assert [t.data_ptr() for t in transport._memory.kept] == [dropped.data_ptr()]


def test_memory_stays_until_nothing_is_under_way_any_more():
    transport, devices = alone(timeout=5.0)
    memory, watch = weakref.ref(transport._memory), transport._watch
    (handle,) = transport.post("gather", [Receive(torch.empty(1), 1)])
    del transport, handle
    gc.collect()
    devices.run()
    assert memory() is not None and devices.flags[0][1] == 0
    watch._timeout, thread = 0.05, watch._thread
    del watch
    thread.join(10)
    devices.queues.clear()
    gc.collect()
    assert not thread.is_alive() and memory() is None and devices.flags[0][1] == 1


def test_a_batch_larger_than_a_slot():
    def main(transport):
        with pytest.raises(ValueError, match="take 1280 bytes, but a slot holds 1024; pass a larger slot_bytes"):
            transport.post(
                "test", [Send(torch.ones(100), 1 - transport.rank), Send(torch.ones(192), 1 - transport.rank)]
            )

    run(2, main, slot_bytes=1024)


def test_why_not_on_this_machine():
    assert symmetric.why_not(None) == "there is no group"
    for outcome in ranks(2).outcomes(collectives.symmetric_transport, {}):
        assert isinstance(outcome, Raised)
        assert outcome.type == "TransportUnavailable"
        assert "rank 0 of the group cannot use it: the group's backend is gloo" in outcome.message
    for outcome in ranks(2).outcomes(collectives.symmetric_transport, {"slot_bytes": 0}):
        assert outcome.type == "ValueError"
    if not torch.cuda.is_available():
        assert symmetric.why_not_here() == "torch finds no CUDA device"
    assert not dist.is_initialized()
