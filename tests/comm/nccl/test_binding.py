"""The compiled binding against a libnccl that answers as it is told: arguments, errors, timeouts, abort."""

import signal
import threading
import time

import pytest

from support import nccl as support

_nccl = pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

from support.nccl_binding import CALLS, METHODS, call, communicator, library  # noqa: E402

fake = support.fake


def test_what_is_not_nccl_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"no-such-library\.so"):
        _nccl.Library.open(str(tmp_path / "no-such-library.so"))
    source = tmp_path / "other.cpp"
    source.write_text("int other() { return 0; }")
    support.compile_cpp(source, "-shared", "-fPIC", "-o", tmp_path / "other.so")
    with pytest.raises(RuntimeError, match="not an NCCL library"):
        _nccl.Library.open(str(tmp_path / "other.so"))


def test_unique_id(fake):
    first, second = library(fake).unique_id(), library(fake).unique_id()
    assert len(first) == len(second) == 128 and first != second
    fake.failing("GetUniqueId", 2)
    with pytest.raises(_nccl.NcclError, match=r'reported "an error .*what NCCL said last') as caught:
        library(fake).unique_id()
    assert caught.value.code == 2


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_a_rank_outside_the_communicator_is_refused(fake, size, rank):
    with pytest.raises(ValueError, match=f"one of the {size} ranks, got {rank}"):
        communicator(fake, size=size, rank=rank)
    assert fake.log() == []


def test_an_id_of_the_wrong_length_is_refused(fake):
    with pytest.raises(ValueError, match="unique_id must have 128 bytes, got 5"):
        _nccl.Communicator(library(fake), b"short", 2, 0, _nccl.Config(), 1.0)


def test_settings_reach_nccl_and_the_others_stay_undefined(fake):
    comm = communicator(fake, max_ctas=8, cta_policy=2, net_name="Socket", comm_name="tp")
    undefined = -(2**31)
    expected = f"size=4 rank=1 id=7 blocking=0 min={undefined} max=8 policy=2 net=Socket name=tp"
    assert fake.log() == ["CommInitRankConfig " + expected]
    assert (comm.size, comm.rank, comm.device(), comm.alive()) == (4, 1, 3, True)


def test_an_unknown_setting_or_one_of_another_type_is_refused():
    with pytest.raises(ValueError, match="no setting of this type is called blocking"):
        _nccl.Config().set("blocking", 1)
    with pytest.raises(ValueError, match="no setting of this type is called max_ctas"):
        _nccl.Config().set("max_ctas", "8")


def test_a_launch_is_one_group_on_the_given_stream(fake):
    comm = communicator(fake)
    comm.launch("all of them", [call(**arguments) for arguments, _ in CALLS.values()], 0x57, 5.0)
    expected = [f"{function} {text} stream=57" for function, (_, text) in CALLS.items()]
    assert fake.log()[1:] == ["GroupStart", *expected, "GroupEnd"]


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="no operation is called sned"):
        call("sned")


def test_a_launch_of_nothing_starts_nothing(fake):
    communicator(fake).launch("nothing", [], 0, 5.0)
    assert not any("Group" in line for line in fake.log())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "send", "input": 0xA0, "peer": 4}, "the peer of send must be one of the ranks, got 4"),
        ({"kind": "recv", "output": 0xB0, "peer": -1}, "the peer of recv must be one of the ranks, got -1"),
        ({"kind": "recv", "peer": 0}, "a buffer of recv is null"),
        ({"kind": "all_reduce", "output": 0xB0}, "a buffer of all_reduce is null"),
    ],
)
def test_a_wrong_call_is_refused_before_the_group_starts(fake, arguments, message):
    comm = communicator(fake)
    with pytest.raises(ValueError, match=f"my op: rank 1 of 4: {message}"):
        comm.launch("my op", [call(**CALLS["Recv"][0]), call(**arguments)], 0, 5.0)
    assert len(fake.log()) == 1 and comm.alive()


def test_an_error_of_a_call_closes_the_group_and_aborts(fake):
    comm = communicator(fake)
    fake.failing("AllReduce", 5)
    with pytest.raises(_nccl.NcclError, match=r'^my op: rank 1 of 4: NCCL 2\.28\.3 reported "an error') as caught:
        comm.launch("my op", [call(**CALLS[name][0]) for name in ("Send", "AllReduce", "Recv")], 0, 5.0)
    assert caught.value.code == 5
    assert [line.split()[0] for line in fake.log()[1:]] == ["GroupStart", "Send", "AllReduce", "GroupEnd", "CommAbort"]
    with pytest.raises(_nccl.NcclError, match=r"later: rank 1 of 4: the communicator is no more; .*my op: rank 1"):
        comm.launch("later", [call(**CALLS["Send"][0])], 0, 5.0)


def test_an_error_in_the_background_is_raised_and_aborts(fake):
    comm = communicator(fake)
    comm.check("before")
    fake.background(error=6)
    with pytest.raises(_nccl.NcclError, match=r'step: rank 1 of 4: .*"remote process exited \(ncclResult_t 6\)"'):
        comm.check("step")
    assert fake.log()[-1] == "CommAbort rank=1" and not comm.alive()


def test_launches_wait_for_the_background(fake):
    comm = communicator(fake)
    fake.background(polls=20)
    comm.launch("slow", [call(**CALLS["Send"][0])], 0, 5.0)
    assert comm.alive()


def check_timeout(fake, method, function):
    start = time.monotonic()
    with pytest.raises(_nccl.NcclError, match=rf"^{method}: rank 1 of 4: no answer .* within 0\.1") as caught:
        function()
    assert caught.value.code == 8 and 0.1 <= time.monotonic() - start < 2
    assert fake.log()[-1] == "CommAbort rank=1"


@pytest.mark.parametrize("method", METHODS)
def test_ranks_that_never_answer_are_a_timeout_not_a_hang(fake, method):
    comm = communicator(fake)
    fake.background(polls=-1)
    check_timeout(fake, method, lambda: METHODS[method](comm, 0.1))
    assert not comm.alive()


def test_ranks_that_never_join_are_a_timeout_not_a_hang(fake):
    fake.background(polls=-1)
    check_timeout(fake, "connect", lambda: communicator(fake, timeout=0.1))


def test_launches_of_two_threads_go_one_after_the_other(fake):
    """NCCL takes no call while it works on another in the background."""
    comm = communicator(fake)
    fake.background(polls=-1)
    send = [call(**CALLS["Send"][0])]
    threads = [threading.Thread(target=comm.launch, args=(f"launch {i}", send, 0, 30.0)) for i in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    comm.check("meanwhile")
    assert fake.log().count("GroupStart") == 1
    fake.background()
    for thread in threads:
        thread.join()
    assert [line.split()[0] for line in fake.log()[1:]] == ["GroupStart", "Send", "GroupEnd"] * 2


def test_another_thread_can_abort_a_call_that_waits(fake):
    comm = communicator(fake)
    fake.background(polls=-1)
    threading.Timer(0.1, comm.abort, ["the watchdog said so"]).start()
    with pytest.raises(_nccl.NcclError, match="the communicator is no more; the watchdog said so"):
        comm.launch("waiting", [call(**CALLS["Send"][0])], 0, 30.0)


def test_calls_do_not_wait_for_an_abort_that_takes_long(fake):
    comm = communicator(fake)
    fake.hold_abort(True)
    thread = threading.Thread(target=comm.abort, args=["the watchdog said so"])
    thread.start()
    try:
        while comm.alive():
            time.sleep(0.01)
        with pytest.raises(_nccl.NcclError, match="the communicator is no more; the watchdog said so"):
            comm.check("next")
        assert thread.is_alive()
    finally:
        fake.hold_abort(False)
        thread.join()


def test_an_interrupt_ends_a_call_that_waits(fake):
    comm = communicator(fake)
    fake.background(polls=-1)
    main = threading.get_ident()
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has put it aside
    try:
        threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            comm.launch("waiting", [call(**CALLS["Send"][0])], 0, 30.0)
    finally:
        signal.signal(signal.SIGINT, former)
    assert not comm.alive()


def test_a_communicator_is_finalized_once_and_aborted_when_dropped(fake):
    comm = communicator(fake)
    comm.finalize(5.0)
    assert fake.log()[1:] == ["CommFinalize", "CommDestroy"]
    comm.abort("late")
    with pytest.raises(_nccl.NcclError, match="it was finalized"):
        comm.check("late")
    del comm
    assert len(fake.log()) == 3
    comm = communicator(fake)
    del comm
    assert fake.log()[-1] == "CommAbort rank=1"
