"""Communicators on tensors, the watchdog and the transport; NCCL answers as it is told, streams are written down."""

import dataclasses
import re
import time

import pytest
import torch

from support import nccl as support
from support import nccl_ranks
from support.distributed import Raised, ranks

_nccl = pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

from parallel_ops.comm import nccl, nccl_watchdog  # noqa: E402
from parallel_ops.comm import nccl_operations as ops  # noqa: E402
from parallel_ops.comm.nccl import Communicator, Config, CtaPolicy  # noqa: E402
from parallel_ops.comm.nccl_memory import Window, allocate  # noqa: E402
from parallel_ops.comm.nccl_transport import NcclTransport  # noqa: E402
from parallel_ops.comm.transport import PeerError, Receive, Send  # noqa: E402

fake = support.fake
STREAM = 0x57


@pytest.fixture(autouse=True)
def current_stream(monkeypatch):
    """There is no CUDA stream on a CPU; the fake takes any number."""
    monkeypatch.setattr(nccl, "_stream_handle", lambda stream, device: STREAM if stream is None else stream.cuda_stream)


def communicator(fake, *, size=4, rank=1, timeout=5.0):
    """On CPU tensors, whose addresses the fake writes down."""
    library = _nccl.Library.open(fake.path)
    native = _nccl.Communicator(library, bytes(128), size, rank, _nccl.Config(), timeout)
    return Communicator.from_native(native, library, torch.device("cpu"), timeout)


class Event:
    def __init__(self, done=False):
        self.done = done

    def query(self):
        if isinstance(self.done, Exception):
            raise self.done
        return self.done


def test_config_reaches_the_binding(fake):
    library = _nccl.Library.open(fake.path)
    values = {
        field.name: "x" if field.name.endswith("_name") else CtaPolicy.ZERO if field.name == "cta_policy" else 2
        for field in dataclasses.fields(Config)
    }
    native = Config(**values).to_native(library)
    comm = _nccl.Communicator(library, bytes(128), 1, 0, native, 1.0)
    assert comm.alive()
    assert fake.log()[-1].endswith("min=2 max=2 policy=2 net=x name=x")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_ctas": 0}, ValueError, "max_ctas must be at least 1, got 0"),
        ({"traffic_class": -1}, ValueError, "traffic_class must be at least 0, got -1"),
        ({"cga_cluster_size": 9}, ValueError, "cga_cluster_size must be 0 to 8, got 9"),
        ({"min_ctas": 8, "max_ctas": 4}, ValueError, "min_ctas must be at most max_ctas, got 8 and 4"),
        ({"max_ctas": 2.0}, TypeError, "max_ctas must be an integer, got float"),
        ({"net_name": 1}, TypeError, "net_name must be a string, got int"),
    ],
)
def test_bad_config(settings, error, message):
    with pytest.raises(error, match=message):
        Config(**settings)


def test_operations_count_what_nccl_counts(fake):
    """Reductions in elements of their type; data that is only moved in bytes, so that every dtype can be."""
    comm = communicator(fake, size=4, rank=1)
    x, big, out = torch.zeros(2, 3), torch.zeros(8, 3), torch.zeros(2, 3)
    flags = torch.zeros(5, dtype=torch.bool)
    comm.enqueue(
        "all of them",
        [
            ops.send(flags, 2),
            ops.receive(out, 3),
            ops.all_reduce(out, x, "max"),
            ops.reduce_scatter(x, big, "avg"),
            ops.all_gather(big, x),
            ops.broadcast(out, None, 0),
            ops.reduce(None, x.half(), 2),
            ops.all_to_all(torch.zeros(8, 3), big),
            ops.gather(big, x, 1),
            ops.scatter(x, None, 2),
        ],
    )
    log = [re.sub(r"\b[0-9a-f]{6,}\b", "ptr", line) for line in fake.log()[2:-1]]
    assert log == [
        "Send ptr count=5 type=1 peer=2 stream=57",
        "Recv ptr count=24 type=1 peer=3 stream=57",
        "AllReduce ptr ptr count=6 type=7 op=2 stream=57",
        "ReduceScatter ptr ptr count=6 type=7 op=4 stream=57",
        "AllGather ptr ptr count=24 type=1 stream=57",
        "Broadcast 0 ptr count=24 type=1 root=0 stream=57",
        "Reduce ptr 0 count=6 type=6 op=0 root=2 stream=57",
        "AlltoAll ptr ptr count=24 type=1 stream=57",
        "Gather ptr ptr count=24 type=1 root=1 stream=57",
        "Scatter 0 ptr count=24 type=1 root=2 stream=57",
    ]
    assert f"Send {flags.data_ptr():x} " in fake.log()[2]


X = torch.zeros(4, 3)
BAD = [
    (lambda: ops.send(X, 4), ValueError, "send: the peer or root must be one of the 4 ranks, got 4"),
    (lambda: ops.send(X.t(), 0), ValueError, r"send: the input must be contiguous, got strides \(1, 3\)"),
    (lambda: ops.send([1], 0), TypeError, "send: the input must be a tensor, got list"),
    (lambda: ops.send(X.to("meta"), 0), ValueError, "send: the input is on meta, but this communicator works on cpu"),
    (lambda: ops.all_gather(X, X), ValueError, "all_gather: the output has 12 elements, but must have 48: 4 x the 12"),
    (lambda: ops.reduce_scatter(X, X), ValueError, "reduce_scatter: the input has 12 elements, but must have 48"),
    (lambda: ops.all_to_all(X[:1], X[:1]), ValueError, "all_to_all: the input has 3 elements, which 4 ranks cannot"),
    (lambda: ops.all_reduce(X, X.half()), TypeError, "input and output must have one dtype"),
    (lambda: ops.all_reduce(X, X, "mean"), ValueError, "reduction must be one of .*, got 'mean'"),
    (lambda: ops.all_reduce(X.bool(), X.bool()), TypeError, r"NCCL cannot reduce torch\.bool"),
    (lambda: ops.broadcast(X, None, 1), ValueError, "broadcast: rank 1 needs an input tensor, got None"),
    (lambda: ops.gather(None, X, 1), ValueError, "gather: rank 1 needs an output tensor, got None"),
    (lambda: X, TypeError, "operations must be made by this module's functions, got Tensor"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_operation_is_refused_before_any_starts(fake, make, error, message):
    comm = communicator(fake)
    with pytest.raises(error, match="my op: .*" + message):
        comm.enqueue("my op", [ops.send(X, 0), make()])
    assert len(fake.log()) == 1 and comm.alive


def test_split_and_close(fake):
    with communicator(fake, size=4, rank=2) as comm:
        child = comm.split(1, key=3, config=Config(split_share=True))
        assert (child.rank, child.size, child.device) == (1, 2, torch.device("cpu"))
        assert comm.split(None) is None
        with pytest.raises(ValueError, match="color must be None or at least 0, got -1"):
            comm.split(-1)
    assert fake.log()[-2:] == ["CommFinalize", "CommDestroy"] and not comm.alive
    comm.close()
    with pytest.raises(nccl.NcclError, match="it was finalized"):
        comm.check("late")


def test_an_error_in_the_block_aborts(fake):
    comm = communicator(fake)
    with pytest.raises(KeyError), comm:
        raise KeyError("mine")
    assert fake.log()[-1] == "CommAbort rank=1"
    with pytest.raises(nccl.NcclError, match="an error left its block: 'mine'"):
        comm.check("late")


def test_waiting_on_the_host(fake):
    comm = communicator(fake, timeout=0.1)
    comm.wait("done", Event(done=True))
    with pytest.raises(nccl.NcclError, match=r"stuck: rank 1 of 4: not done on the GPU within 0\.1 s") as caught:
        comm.wait("stuck", Event())
    assert caught.value.code == 8 and not comm.alive


def eventually(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(nccl_watchdog, "_INTERVAL", 0.005)


@pytest.mark.usefixtures("quick")
def test_watchdog_forgets_what_is_done(fake):
    comm = communicator(fake, timeout=0.3)
    events = [Event(), Event(done=True)]
    for event in events:
        comm.watch("fine", event)
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
    comm.watch("step", event)
    eventually(lambda: not comm.alive)
    fake.background()
    assert fake.log()[-1] == "CommAbort rank=1"
    with pytest.raises(nccl.NcclError, match="next: rank 1 of 4: the communicator is no more; .*" + message):
        comm.enqueue("next", [ops.send(X, 0)])


@pytest.mark.usefixtures("quick")
def test_watchdog_keeps_nothing_alive(fake):
    comm = communicator(fake)
    comm.watch("step", Event())
    thread = comm._watchdog._thread
    del comm
    eventually(lambda: fake.log()[-1] == "CommAbort rank=1")
    eventually(lambda: not thread.is_alive())


def test_windows(fake):
    comm = communicator(fake)
    memory = torch.zeros(8192, dtype=torch.uint8)
    page = memory[-memory.data_ptr() % 4096 :][:64]
    window = Window(comm, page)
    window.close()
    register, deregister = fake.log()[-2:]
    assert register == f"CommWindowRegister {page.data_ptr():x} size=64 flags=1"
    assert deregister == "CommWindowDeregister 1234"
    with pytest.raises(ValueError, match="must be contiguous, not empty and aligned to 4096 bytes"):
        Window(comm, page[1:])
    with pytest.raises(ValueError, match="tensor is on meta, the communicator on cpu"):
        Window(comm, page.to("meta"))
    with pytest.raises(ValueError, match=r"shape must have at least one element, got \(0, 4\)"):
        allocate((0, 4), torch.float32)


class Streams:
    """Writes down what is ordered, between what NCCL was asked."""

    def __init__(self, fake):
        self.fake, self.steps, self.event = fake, [], Event()
        self.side = type("Stream", (), {"cuda_stream": 0x99})()

    def fork(self):
        self.steps.append(("fork", len(self.fake.log())))

    def mark(self):
        self.steps.append(("mark", len(self.fake.log())))
        return self.event

    def join(self, event):
        assert event is self.event
        self.steps.append(("join", len(self.fake.log())))


@pytest.fixture
def streams(fake):
    return Streams(fake)


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
    assert streams.steps == [("fork", 1), ("mark", 5), ("join", 5), ("join", 5)]
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


def test_barrier_waits_for_all(fake, streams):
    streams.event.done = True
    end = transport(fake, streams)
    end.barrier("end")
    assert re.match("AllReduce .* count=1 type=2 op=0 stream=99", fake.log()[2])
    streams.event.done = False
    end = transport(fake, streams, timeout=0.1)
    with pytest.raises(PeerError, match=r"end: rank 1 failed at a barrier of 4 ranks: .*within 0\.1 s"):
        end.barrier("end")


def test_unique_id_goes_to_all_ranks():
    first, second = ranks(2).run(nccl_ranks.exchange, support.build(), [22803, 22803], None, False)
    assert first == second and len(first) == 128


@pytest.mark.parametrize(
    ("versions", "failing", "broken", "messages"),
    [
        ([22803, 22705], None, False, ["got rank 0: 2.28.3, rank 1: 2.27.5"] * 2),
        ([22803] * 2, 1, False, ["rank 1 of the group is not ready: no device here", "no device here"]),
        ([22803] * 2, 0, False, ["no device here", "rank 0 of the group is not ready: no device here"]),
        ([22803] * 2, None, True, ["unique_id: NCCL", "rank 0 of the group is not ready: unique_id: NCCL"]),
    ],
)
def test_a_rank_that_cannot_take_part_is_an_error_everywhere(versions, failing, broken, messages):
    outcomes = ranks(2).outcomes(nccl_ranks.exchange, support.build(), versions, failing, broken)
    for outcome, message in zip(outcomes, messages, strict=True):
        assert isinstance(outcome, Raised) and message in outcome.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_every_rank_says_so():
    message = "NCCL needs a CUDA device, and torch sees none"
    for outcome in ranks(2).outcomes(nccl_ranks.without_gpu, 10.0):
        assert isinstance(outcome, Raised) and outcome.type == "NotSupported" and message in outcome.message
    for outcome in ranks(2).outcomes(nccl_ranks.transport_without_gpu):
        assert isinstance(outcome, Raised) and outcome.type == "TransportUnavailable" and message in outcome.message
    for outcome in ranks(2).outcomes(nccl_ranks.without_gpu, -1.0):
        assert isinstance(outcome, Raised) and outcome.type == "ValueError"


def test_arguments_of_a_communicator():
    with pytest.raises(TypeError, match=r"group must be a torch\.distributed\.ProcessGroup, got str"):
        Communicator("world")
    for timeout in (0, -1.0, float("inf"), "10"):
        with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
            nccl._check_timeout(timeout)
    with pytest.raises(ValueError, match="device must be a CUDA device, got cpu"):
        nccl._cuda_device(torch.device("cpu"))
