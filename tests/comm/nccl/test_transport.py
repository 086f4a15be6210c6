"""The transport over a communicator: NCCL answers as it is told, the order of streams is written down."""

import re

import pytest
import torch

from support import nccl as support

pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

from parallel_ops.comm.errors import PeerError
from parallel_ops.comm.nccl import communicator as nccl
from parallel_ops.comm.nccl.transport import NcclTransport
from parallel_ops.comm.transport.base import Receive, Send
from support import nccl_communicator
from support.nccl_communicator import Event, communicator

fake, recorded = support.fake, nccl_communicator.recorded
X = torch.zeros(4, 3)


class Streams:
    """Writes down what is ordered, between what NCCL was asked."""

    def __init__(self, fake, recorded):
        self.fake, self.recorded, self.steps = fake, recorded, []
        self.side = type("Stream", (), {"cuda_stream": 0x99})()

    def fork(self):
        self.steps.append(("fork", len(self.fake.log())))

    def join(self, event):
        assert event is self.recorded.next
        self.steps.append(("join", len(self.fake.log())))


@pytest.fixture
def streams(fake, recorded):
    return Streams(fake, recorded)


def transport(fake, streams, **arguments):
    return NcclTransport.from_communicator(communicator(fake, **arguments), streams)


def test_transport_posts_a_batch_as_one_launch_on_the_side_stream(fake, streams):
    end = transport(fake, streams)
    assert (end.rank, end.size, end.capabilities.name, end.capabilities.stream_ordered) == (1, 4, "nccl", True)
    x, y = torch.arange(6.0), torch.empty(3, dtype=torch.int64)
    first, second = end.post("exchange", [Send(x, 2), Receive(y, 0)])
    assert fake.log()[1:] == [
        "GroupStart",
        f"Send {x.data_ptr():x} count=24 type=1 peer=2 stream=99",
        f"Recv {y.data_ptr():x} count=24 type=1 peer=0 stream=99",
        "GroupEnd",
    ]
    first.wait()
    second.wait()
    assert streams.steps == [("fork", 1), ("join", 5), ("join", 5)]
    assert end.post("nothing", []) == [] and len(fake.log()) == 5


def test_transport_raises_peer_error(fake, streams):
    end = transport(fake, streams)
    (handle,) = end.post("exchange", [Send(X, 2)])
    fake.background(error=6)
    with pytest.raises(PeerError, match=r"exchange: rank 1 failed waiting for its transfers: .*remote process exited"):
        handle.wait()
    with pytest.raises(PeerError, match=r"more: rank 1 could not start its transfers with ranks \[0, 2\]"):
        end.post("more", [Send(X, 2), Receive(X, 0)])
    with pytest.raises(PeerError, match="end: rank 1 failed at a barrier of 4 ranks"):
        end.barrier("end")


def test_transport_refuses_bad_chunks_before_any_starts(fake, streams):
    end = transport(fake, streams)
    with pytest.raises(ValueError, match=r"op: chunks\[1\] is on meta, but nccl sends from cpu"):
        end.post("op", [Send(X, 2), Receive(X.to("meta"), 0)])
    assert len(fake.log()) == 1 and streams.steps == []


def test_a_capture_is_refused_before_the_side_stream_is_drawn_into_it(fake, streams, monkeypatch):
    def capturing(op, device_type, what, stream=None):
        raise RuntimeError(f"{op}: {what}")

    end = transport(fake, streams)
    monkeypatch.setattr(nccl, "refuse_capture", capturing)
    with pytest.raises(RuntimeError, match="exchange: this communicator cannot be captured in a CUDA graph"):
        end.post("exchange", [Send(X, 2)])
    assert streams.steps == [] and len(fake.log()) == 1


def test_barrier_waits_for_all(fake, streams, recorded):
    end = transport(fake, streams)
    end.barrier("end")
    assert re.match("AllReduce .* count=1 type=2 op=0 stream=99", fake.log()[2])
    recorded.next = Event()
    end = transport(fake, streams, timeout=0.1)
    with pytest.raises(PeerError, match=r"end: rank 1 failed at a barrier of 4 ranks: .*within 0\.1 s"):
        end.barrier("end")
