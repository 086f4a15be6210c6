"""The transport over the stand-in for NCCL, whose ranks are threads: order of streams, errors, stuck peers, the end."""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from support.transports import nccl as support

pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

from parallel_ops import _nccl
from parallel_ops.comm.errors import PeerError
from parallel_ops.comm.transport.base import Receive, Send

fake = support.fake


def ends(fake, size=2, **options):
    """The ends of all ranks. What they start is put down; nothing is moved, so that one rank alone can be looked at."""
    found = support.on_ranks(fake, size, lambda end: end, **options)
    for end in found:
        end.kept = found  # none ends before the test
    fake.discard(True)
    fake.logging(True)
    return found


def names(fake):
    return [line.split()[0] for line in fake.calls()]


def test_a_batch_is_one_group_between_an_event_of_the_callers_stream_and_one_for_it(fake):
    end = ends(fake, stream=0x57)[1]
    x, y = torch.arange(6.0), torch.empty(3, dtype=torch.int64)
    handles = end.post("exchange", [Send(x, 0), Receive(y, 0)])
    side = fake.calls()[1].partition("=")[2]
    assert side not in ("0", "57")
    assert fake.calls() == [
        "EventRecord stream=57",
        f"StreamWaitEvent stream={side}",
        "GroupStart",
        f"Send {x.data_ptr():x} count=24 type=1 peer=0 stream={side}",
        f"Recv {y.data_ptr():x} count=24 type=1 peer=0 stream={side}",
        "GroupEnd",
        f"EventRecord stream={side}",
    ]
    for handle in handles:
        handle.wait()
    assert fake.calls()[7:] == ["StreamWaitEvent stream=57"] * 2
    assert end.post("nothing", []) == [] and len(fake.calls()) == 9


def test_every_exchange_is_one_call_of_the_binding(fake):
    end = ends(fake, size=8)[0]

    class Counted:
        def __init__(self, native):
            self.native, self.calls = native, []

        def __getattr__(self, name):
            self.calls.append(name)
            return getattr(self.native, name)

    end._native = counted = Counted(end._native)
    peers, whole = range(1, 8), torch.zeros(8, 4)
    end.post("op", [Send(whole[0], peer) for peer in peers] + [Receive(whole[peer], peer) for peer in peers])
    end.all_gather("op", whole, whole[0])
    end.all_to_all("op", whole, whole.clone())
    end.all_to_all("op", whole, whole.clone(), ([1] * 8, [1] * 8))
    end.reduce_scatter("op", whole[0], whole)
    end.all_reduce("op", whole)
    assert counted.calls == ["launch"] * 6


def test_a_handle_that_is_dropped_keeps_its_tensors_until_they_have_left(fake):
    end, peer = ends(fake)
    fake.discard(False)
    end.post("op", [Receive(torch.empty(4), 1)])
    (second,) = end.post("op", [Receive(torch.empty(4), 1)])
    assert len(end.abandoned) == 1  # it has not arrived yet
    for handle in [*(peer.post("op", [Send(torch.ones(4), 0)])[0] for _ in range(2)), second]:
        handle.wait()
    peer.post("op", [Send(torch.ones(4), 0)])[0].wait()
    end.post("op", [Receive(torch.empty(4), 1)])[0].wait()
    assert end.abandoned == []


def test_what_was_sent_arrives_though_its_sender_ends(fake):
    """The event of a send is done when the data is in a buffer of NCCL's, which an abort drops."""
    alive, name = fake.alive(), support.unique_id(fake)
    ready, received = threading.Event(), []

    def receiver():
        end = support.transport(fake, name, 2, 1)
        ready.wait()
        time.sleep(0.3)
        got = torch.zeros(4)
        (handle,) = end.post("last", [Receive(got, 0)])
        handle.wait()
        received.append(got)

    thread = threading.Thread(target=receiver)
    thread.start()
    end = support.transport(fake, name, 2, 0)
    fake.logging(True)
    (handle,) = end.post("last", [Send(torch.arange(4.0), 1)])
    ready.set()
    handle.wait()
    del end, handle
    gc.collect()
    thread.join(20)
    assert len(received) == 1 and torch.equal(received[0], torch.arange(4.0))
    gc.collect()
    assert fake.alive() == alive
    assert "CommAbort" not in names(fake) and names(fake).count("CommFinalize") == names(fake).count("CommDestroy") == 2


def test_one_whose_peer_takes_nothing_is_aborted_in_the_end(fake):
    name = support.unique_id(fake)
    peers = [None, None]

    def join(rank):
        peers[rank] = _nccl.Communicator(_nccl.Library.open(fake.path), name, 2, rank, -1, 16, 20.0, 0.3)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fake.logging(True)
    x = torch.zeros(4)
    peers[0].launch("op", (0, x.data_ptr(), 0, x.nbytes, 1, 1), 0)
    start = time.monotonic()
    peers[0] = None
    assert time.monotonic() - start < 10
    assert "CommAbort" in names(fake) and "CommDestroy" not in names(fake)


def test_a_forked_child_leaves_the_communicator_to_its_parent(fake):
    end = support.transport(fake, support.unique_id(fake), 1, 0)
    fake.logging(True)
    child = os.fork()
    if child == 0:
        try:
            end._native.launch("op", (), 0)
        except _nccl.NcclError as error:
            said = "another process's" in str(error)
        del end
        gc.collect()
        os._exit(0 if said and "CommFinalize" not in names(fake) and "CommAbort" not in names(fake) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert end._native.alive and names(fake) == []


def test_everything_is_made_and_recorded_on_its_own_device(fake):
    """Whatever is current: no device, as in a thread that has made no call, or another one."""
    fake.strict(True)
    try:
        for current in (-1, 3):
            before = fake.context(current)
            made = support.native(fake, support.unique_id(fake), 1, 0, device=1)
            event = made.launch("op", (), 0x57)
            made.join("op", event, 0x57)
            assert fake.current() == before
            del made, event
    finally:
        fake.strict(False)
        fake.context(-1)


def test_bad_chunks_are_refused_before_any_starts(fake):
    end = ends(fake)[0]
    with pytest.raises(ValueError, match=r"op: chunks\[1\] is on meta, but nccl sends from cpu"):
        end.post("op", [Send(torch.zeros(2), 1), Receive(torch.zeros(2, device="meta"), 1)])
    assert fake.calls() == []


@pytest.mark.parametrize("function", ["Send", "GroupEnd"])
def test_an_error_of_a_call_names_op_and_rank_and_ends_the_communicator(fake, function):
    end = ends(fake)[1]
    fake.fail(function, 5)
    message = r'step: rank 1 could not start its transfers: step: rank 1 of 2: NCCL 2\.29\.7 reported "invalid usage'
    with pytest.raises(PeerError, match=message):
        end.post("step", [Send(torch.zeros(2), 0)])
    assert names(fake)[-3:] == ["Send", "GroupEnd", "CommAbort"]
    with pytest.raises(PeerError, match=r"later: rank 1 .*the communicator is no more; .*step: rank 1 of 2"):
        end.post("later", [Send(torch.zeros(2), 0)])


def test_an_error_in_the_background_is_raised_by_the_wait(fake):
    end = ends(fake)[0]
    (handle,) = end.post("step", [Send(torch.zeros(2), 1)])
    getattr(fake, "async")(6)
    with pytest.raises(PeerError, match=r"step: rank 0 failed waiting for its transfers: .*remote process exited"):
        handle.wait()


def test_a_peer_that_never_sends_ends_the_wait_in_time(fake):
    def stuck(end):
        if end.rank == 1:
            time.sleep(0.5)
            return None
        (handle,) = end.post("step", [Receive(torch.empty(4), 1)])
        with pytest.raises(PeerError, match=r"step: rank 0 .* was not done on the GPU within 0\.2 s: a peer is gone"):
            handle.wait()
        return "raised"

    start = time.monotonic()
    assert support.on_ranks(fake, 2, stuck, timeout=0.2) == ["raised", None]
    assert time.monotonic() - start < 3


def test_a_rank_that_never_joins_ends_the_connection_in_time(fake):
    start = time.monotonic()
    with pytest.raises(_nccl.NcclError, match=r"connect: rank 0 of 2 had no answer .* within 0\.2 s"):
        support.native(fake, support.unique_id(fake), 2, 0, timeout=0.2)
    assert time.monotonic() - start < 3


# What an abort does not end, in a process without torch, as it ends.
STUCK = """
import ctypes, importlib.util, sys
spec = importlib.util.spec_from_file_location("_nccl", sys.argv[1])
nccl = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nccl)
library = nccl.Library.open(sys.argv[2])
fake = ctypes.CDLL(sys.argv[2])
if sys.argv[3] == "CommInitRankConfig":
    fake.fake_stuck(sys.argv[3].encode())
comm = nccl.Communicator(library, library.unique_id(), 1, 0, -1, 16, 0.2, 0.2)
fake.fake_stuck(sys.argv[3].encode())
event = comm.launch("ring_attention", (1, 0, 0, 4, 1, 0), 0)
comm.join("ring_attention", event, 0)
print("went on")
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("CommInitRankConfig", "connect: rank 0 of 1 had no answer from the other ranks within 0.2 s"),
        ("Recv", "ring_attention: rank 0 of 1 had no answer from the other ranks within 0.2 s"),
        ("GroupEnd", "ring_attention: rank 0 of 1 had no answer from the other ranks within 0.2 s"),
    ],
)
def test_a_call_that_no_abort_ends_ends_with_the_process(fake, function, message):
    command = [sys.executable, "-c", STUCK, _nccl.__file__, fake.path, function]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stdout) == (1, "")
    assert message in run.stderr and "a call of NCCL does not return, so this process ends" in run.stderr


def test_an_abort_that_does_not_return_ends_the_process(fake):
    command = [sys.executable, "-c", STUCK, _nccl.__file__, fake.path, "CommAbort"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stdout) == (1, "")
    assert "was not done on the GPU within 0.2 s" in run.stderr
    assert "the GPU cannot be freed, so this process ends" in run.stderr


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_a_rank_outside_the_communicator_is_refused(fake, size, rank):
    with pytest.raises(ValueError, match=f"one of the {size} ranks, got {rank}"):
        support.native(fake, bytes(128), size, rank)


def test_settings_reach_nccl(fake):
    fake.logging(True)
    support.native(fake, support.unique_id(fake), 1, 0)
    assert "CommInitRankConfig size=1 rank=0 blocking=1 max=16" in fake.calls()


def test_what_a_library_has_not_is_not_called(fake, tmp_path):
    assert _nccl.Library.open(fake.path).version == "2.29.7"
    with pytest.raises(RuntimeError, match=r"no-such-library\.so"):
        _nccl.Library.open(str(tmp_path / "no-such-library.so"))
    source = tmp_path / "bare.cpp"
    source.write_text('extern "C" int ncclGetVersion(int* v) { *v = 23203; return 0; }\n')
    support.compile_cpp(source, "-shared", "-fPIC", "-o", tmp_path / "bare.so")
    with pytest.raises(_nccl.NotSupported, match=r"ncclGetErrorString, .* is not in NCCL 2\.32\.3, from .*bare\.so"):
        _nccl.Library.open(str(tmp_path / "bare.so"))
    for code, old in ((21705, "2.17.5"), (2708, "2.7.8")):
        fake.version(code)
        with pytest.raises(_nccl.NotSupported, match=rf"NCCL 2\.18 or later is needed; this is {old}, from .*libfake"):
            _nccl.Library.open(fake.path)
