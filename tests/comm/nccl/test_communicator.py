"""Communicators on tensors: settings, operations and their beginning; NCCL answers as it is told."""

import dataclasses
import re

import pytest
import torch

from support import nccl as support
from support.distributed import Raised, ranks

_nccl = pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

from parallel_ops.comm.nccl import communicator as nccl  # noqa: E402
from parallel_ops.comm.nccl import operations as ops  # noqa: E402
from parallel_ops.comm.nccl import rendezvous as nccl_rendezvous  # noqa: E402
from parallel_ops.comm.nccl.communicator import Communicator, Config, CtaPolicy  # noqa: E402
from support import nccl_communicator, nccl_ranks  # noqa: E402
from support.nccl_communicator import Event, communicator  # noqa: E402

fake, recorded = support.fake, nccl_communicator.recorded


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
    x, out, flags = torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(5, dtype=torch.bool)
    comm.enqueue("all of them", [ops.send(flags, 2), ops.receive(out, 3), ops.all_reduce(out, x, "max")])
    log = [re.sub(r"\b[0-9a-f]{6,}\b", "ptr", line) for line in fake.log()[2:-1]]
    assert log == [
        "Send ptr count=5 type=1 peer=2 stream=57",
        "Recv ptr count=24 type=1 peer=3 stream=57",
        "AllReduce ptr ptr count=6 type=7 op=2 stream=57",
    ]
    assert f"Send {flags.data_ptr():x} " in fake.log()[2]


X = torch.zeros(4, 3)
BAD = [
    (lambda: ops.send(X, 4), ValueError, "send: the peer must be one of the 4 ranks, got 4"),
    (lambda: ops.send(X.t(), 0), ValueError, r"send: the input must be contiguous, got strides \(1, 3\)"),
    (lambda: ops.send([1], 0), TypeError, "send: the input must be a tensor, got list"),
    (lambda: ops.send(X.to("meta"), 0), ValueError, "send: the input is on meta, but this communicator works on cpu"),
    (lambda: ops.all_reduce(X, X.half()), TypeError, "input and output must have one dtype"),
    (lambda: ops.all_reduce(X, X[:1]), ValueError, "all_reduce: input and output must have one size, got 3 and 12"),
    (lambda: ops.all_reduce(X, None), TypeError, "all_reduce: the input must be a tensor, got None"),
    (lambda: ops.all_reduce(X, X, "mean"), ValueError, "reduction must be one of .*, got 'mean'"),
    (lambda: ops.all_reduce(X.bool(), X.bool()), TypeError, r"NCCL cannot reduce torch\.bool"),
    (lambda: X, TypeError, "operations must be made by this module's functions, got Tensor"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_operation_is_refused_before_any_starts(fake, make, error, message):
    comm = communicator(fake)
    with pytest.raises(error, match="my op: .*" + message):
        comm.enqueue("my op", [ops.send(X, 0), make()])
    assert len(fake.log()) == 1 and comm.alive


def test_close(fake):
    with communicator(fake, size=4, rank=2) as comm:
        assert (comm.rank, comm.size, comm.device) == (2, 4, torch.device("cpu"))
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
            nccl_rendezvous.check_timeout(timeout)
    with pytest.raises(ValueError, match="device must be a CUDA device, got cpu"):
        nccl_rendezvous.cuda_device(torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "index"), [(None, 1), (0, 0), (torch.device("cuda"), 1), (torch.device("cuda:0"), 0)]
)
def test_devices(monkeypatch, device, index):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert nccl_rendezvous.cuda_device(device) == torch.device("cuda", index)
    with pytest.raises(ValueError, match="device must be one of the 2 devices, got 2"):
        nccl_rendezvous.cuda_device(2)
