"""The paced link: chunks take the time that it sets, beside what the caller computes."""

import time

import pytest
import torch

from benchmarks.parallel.link import SimulatedLink, SimulatedTransport
from parallel_ops.comm.transport.base import Receive, Send
from ptx import aot

CPU = torch.device("cpu")
MIB = 1 << 20


def transport(seconds_per_mib, latency=0.0):
    return SimulatedTransport(4, 1, SimulatedLink(MIB / seconds_per_mib, latency), CPU)


def test_chunks_of_one_direction_follow_each_other():
    link, chunk = transport(0.02, latency=0.01), torch.zeros(MIB, dtype=torch.uint8)
    started = time.perf_counter()
    first, second = link.post("test", [Receive(chunk, 0), Receive(chunk.clone(), 2)])
    assert second._due - first._due == pytest.approx(0.03)
    first.wait()
    assert time.perf_counter() - started >= 0.03
    second.wait()
    assert time.perf_counter() - started >= 0.06


def test_both_directions_at_once_and_beside_the_caller():
    link, chunk = transport(0.1), torch.zeros(MIB, dtype=torch.uint8)
    sent, received = link.post("test", [Send(chunk, 0), Receive(chunk.clone(), 0)])
    # Due at a time that does not depend on when the caller waits, nor on the other direction.
    assert sent._due == received._due <= time.perf_counter() + 0.1
    time.sleep(0.05)  # as a computation would
    received.wait()
    sent.wait()
    assert time.perf_counter() >= received._due


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_arrives_is_not_zero(dtype):
    x = torch.zeros(3, 100, dtype=dtype)
    transport(1e-9).post("test", [Receive(x, 0)])[0].wait()
    assert x.isfinite().all()
    assert (x != 0).float().mean() > 0.9


@pytest.mark.aot
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_read_the_clock(capability):
    """Compiled for GPUs that are not there: the loop is kept, and reads the clock in every turn."""
    from benchmarks.parallel import link_kernels

    start = torch.empty(1, dtype=torch.int64, device="meta")
    with aot.recorded() as launches:
        link_kernels.note_time(start)
        link_kernels.hold(start, 5_000_000_000)
    for launch, reads in zip(launches, (1, 2), strict=True):
        assert aot.assembly(launch, capability).count("%globaltimer") == reads


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_chunks_take_their_time_on_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    link = SimulatedTransport(4, 1, SimulatedLink(MIB / 0.01), device)
    chunks = [Receive(torch.zeros(MIB, dtype=torch.uint8, device=device), 0) for _ in range(3)]
    for handle in link.post("test", chunks):  # the first compiles
        handle.wait()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for handle in link.post("test", chunks):
        handle.wait()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 29  # milliseconds; two clocks
    assert all(chunk.tensor.float().mean() > 0 for chunk in chunks)
