"""The transport over the stand-in for NCCL, whose ranks are threads: order of streams, leases, errors, stuck peers."""

import gc
import subprocess
import sys
import time

import pytest
import torch

from support import nccl as support

pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

from parallel_ops import _nccl
from parallel_ops.comm.errors import PeerError
from parallel_ops.comm.transport.base import Receive, Send

fake = support.fake


def ends(fake, size=2, **options):
    """The ends of all ranks. What they start is put down; nothing is moved, so that one rank alone can be looked at."""
    found = support.on_ranks(fake, size, lambda end: end, **options)
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


def test_windows_take_puts_once_the_receiver_may_be_written(fake):
    first = ends(fake)[0]
    fake.discard(False)

    def exchange(end):
        with end.workspace("op") as memory:
            x = memory.empty((4, 8), torch.zeros(()))
            own, other = x[2 * end.rank : 2 * end.rank + 2], x[2 - 2 * end.rank : 4 - 2 * end.rank]
            own.fill_(end.rank + 1)
            handles = end.post("op", [Receive(other, 1 - end.rank), Send(own, 1 - end.rank, own)])
            for handle in handles:
                handle.wait()
            return x.clone()

    for x in support.on_ranks(fake, 2, exchange):
        assert torch.equal(x, torch.tensor([1.0, 1, 2, 2]).view(4, 1).expand(4, 8))
    steps = [line for line in fake.calls() if "ignal" in line and "peer=1" in line]
    assert [step.split()[0] for step in steps] == ["Signal", "WaitSignal", "PutSignal", "WaitSignal"]
    assert "window=0 offset=0" in steps[2] and first.puts


def test_a_transport_without_signals_sends(fake):
    fake.puts(False)
    assert not ends(fake)[0].puts
    fake.discard(False)

    def exchange(end):
        with end.workspace("op") as memory:
            x = memory.empty((2,), torch.zeros(()))
            x[end.rank] = end.rank + 1
            mine = x[end.rank : end.rank + 1]
            for handle in end.post(
                "op", [Send(mine, 1 - end.rank, mine), Receive(x[1 - end.rank :][:1], 1 - end.rank)]
            ):
                handle.wait()
            return x.tolist()

    assert support.on_ranks(fake, 2, exchange) == [[1.0, 2.0]] * 2
    assert "PutSignal" not in names(fake)


def test_leases_follow_the_program_and_end_with_their_block(fake):
    def leases(end):
        like = torch.zeros((), dtype=torch.bfloat16)
        with end.workspace("outer") as memory:
            a = memory.empty((3, 5), like)
            with end.workspace("inner") as inner:
                b = inner.empty((7,), like)
            assert b.view(torch.uint8).eq(255).all()  # what still reads it is seen
            c = memory.empty((7,), like)
            assert c.data_ptr() == b.data_ptr() != a.data_ptr()
            assert memory.empty((0, 4), like).numel() == 0
            whole = memory.empty((1 << 30,), like)  # more than the pool may have
            assert end.pool.find(whole.data_ptr()) is None
        with pytest.raises(RuntimeError, match="invalid shape dimension"), end.workspace("failing") as memory:
            memory.empty((9,), like).view(-9)
        assert end.pool.take(64 << 20, may_grow=False) is not None  # all of the segment
        return end.pool.find(a.data_ptr())

    assert support.on_ranks(fake, 2, leases) == [(0, 0)] * 2


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


def test_it_goes_with_its_memory_when_it_is_dropped(fake):
    alive, allocated = fake.alive(), fake.allocated()

    def leased(end):
        with end.workspace("op") as memory:
            memory.empty((4,), torch.zeros(()))
        return end

    found = support.on_ranks(fake, 2, leased)
    assert fake.alive() == alive + 2 and fake.allocated() > allocated
    del found
    gc.collect()
    assert (fake.alive(), fake.allocated()) == (alive, allocated)


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
    with pytest.raises(PeerError, match="end: rank 1"):
        end.barrier("end")


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


def test_a_barrier_waits_for_all(fake):
    def late(end):
        time.sleep(0.1 * end.rank)
        reached = time.monotonic()
        end.barrier("end")
        return reached, time.monotonic()

    reached, left = zip(*support.on_ranks(fake, 3, late), strict=True)
    assert max(reached) <= min(left)


# A stream that waits for a peer's copy engine outlives the abort. In a process without torch, as it ends.
STUCK = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_nccl", sys.argv[1])
nccl = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nccl)
library = nccl.Library.open(sys.argv[2])
comm = nccl.Communicator(library, library.unique_id(), 1, 0, -1, 0x10, 16, 0.1, 5.0, 0.1)
event = comm.put("ring_attention", [], [], [(1, 0)], 0)
comm.join("ring_attention", event, 0)
print("went on")
"""


def test_a_process_whose_gpu_cannot_be_freed_ends(fake):
    command = [sys.executable, "-c", STUCK, _nccl.__file__, fake.path]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert (run.returncode, run.stdout) == (1, "")
    assert "ring_attention: rank 0 of 1 was not done on the GPU within 0.1 s" in run.stderr
    assert "the GPU cannot be freed, so this process ends" in run.stderr


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_a_rank_outside_the_communicator_is_refused(fake, size, rank):
    with pytest.raises(ValueError, match=f"one of the {size} ranks, got {rank}"):
        support.native(fake, bytes(128), size, rank)


def test_settings_that_a_version_has_reach_nccl(fake):
    fake.logging(True)
    for version, policy in ((22907, 2), (22703, -(2**31))):
        fake.version(version)
        support.native(fake, support.unique_id(fake), 1, 0)
        connected = [line for line in fake.calls() if line.startswith("CommInit")]
        assert connected[-1] == f"CommInitRankConfig size=1 rank=0 blocking=1 max=16 policy={policy}"


def test_what_a_library_has_not_is_not_called(fake, tmp_path):
    assert _nccl.Library.open(fake.path).version == "2.29.7"
    with pytest.raises(RuntimeError, match=r"no-such-library\.so"):
        _nccl.Library.open(str(tmp_path / "no-such-library.so"))
    source = tmp_path / "bare.cpp"
    source.write_text(
        'extern "C" int ncclGetVersion(int* v) { *v = 23203; return 0; }\n'
        'extern "C" const char* ncclGetErrorString(int) { return ""; }\n'
    )
    support.compile_cpp(source, "-shared", "-fPIC", "-o", tmp_path / "bare.so")
    with pytest.raises(_nccl.NotSupported, match=r"ncclGetUniqueId is not in NCCL 2\.32\.3, from .*bare\.so"):
        _nccl.Library.open(str(tmp_path / "bare.so")).unique_id()
    fake.version(21303)
    with pytest.raises(_nccl.NotSupported, match=r"ncclCommInitRankConfig needs NCCL 2\.14\.0 or later; this is 2\.13"):
        support.native(fake, bytes(128), 1, 0)
