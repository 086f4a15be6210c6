"""The watchdog of a communicator: what is done, stuck or failed; NCCL answers as it is told."""

import time

import pytest
import torch

from support import nccl as support

pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

from parallel_ops.comm.nccl import communicator as nccl
from parallel_ops.comm.nccl import operations as ops
from parallel_ops.comm.nccl import watchdog as nccl_watchdog
from support import nccl_communicator
from support.nccl_communicator import Event, communicator, eventually

fake, recorded = support.fake, nccl_communicator.recorded


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(nccl_watchdog, "_INTERVAL", 0.005)


@pytest.mark.usefixtures("quick")
def test_watchdog_forgets_what_is_done(fake):
    comm = communicator(fake, timeout=0.3)
    events = [Event(), Event(done=True)]
    for event in events:
        comm._watchdog.watch("fine", event)
    events[0].done = True
    eventually(lambda: comm._watchdog.pending() == 0)
    time.sleep(0.4)
    assert comm.alive


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("event", "background", "message"),
    [
        (Event(), 0, r"because step of rank 1 of 4 was not done on the GPU within 0\.1 s: a peer is gone"),
        (Event(), 6, r"step: rank 1 of 4: NCCL 2\.28\.3 reported \"remote process exited"),
        (Event(done=RuntimeError("illegal address")), 0, "after this error of step: illegal address"),
    ],
    ids=["stuck", "remote error", "CUDA error"],
)
def test_watchdog_aborts(fake, event, background, message):
    comm = communicator(fake, timeout=0.1)
    fake.background(error=background)
    comm._watchdog.watch("step", event)
    eventually(lambda: not comm.alive)
    fake.background()
    assert fake.log()[-1] == "CommAbort rank=1"
    with pytest.raises(nccl.NcclError, match="next: rank 1 of 4: the communicator is no more; .*" + message):
        comm.enqueue("next", [ops.send(torch.ones(1), 0)])


@pytest.mark.usefixtures("quick")
def test_watchdog_keeps_nothing_alive(fake):
    comm = communicator(fake)
    comm._watchdog.watch("step", Event())
    thread = comm._watchdog._thread
    del comm
    eventually(lambda: fake.log()[-1] == "CommAbort rank=1")
    eventually(lambda: not thread.is_alive())


@pytest.mark.usefixtures("quick")
def test_what_is_enqueued_is_watched(fake, recorded):
    comm = communicator(fake, timeout=0.1)
    recorded.next = Event()
    assert comm.enqueue("step", [ops.send(torch.ones(1), 0)]) is recorded.next
    eventually(lambda: not comm.alive)
    with pytest.raises(nccl.NcclError, match=r"because step of rank 1 of 4 was not done on the GPU within 0\.1 s"):
        comm.check("next")


def test_a_watchdog_that_fails_is_an_error_of_the_next_call(fake, monkeypatch):
    def fail(device):
        raise RuntimeError(f"no driver for {device}")

    monkeypatch.setattr(nccl_watchdog, "begin_watch_thread", fail)
    comm = communicator(fake)
    comm.enqueue("step", [ops.send(torch.ones(1), 0)])
    eventually(lambda: not comm.alive)
    with pytest.raises(nccl.NcclError, match="aborted after this error of the watchdog: no driver for cpu"):
        comm.check("next")
    assert fake.log()[-1] == "CommAbort rank=1"
