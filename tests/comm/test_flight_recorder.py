"""The calls that a rank waits in, of torch's recorders: NCCL's are in one of their own, by a stand-in for it."""

import itertools
import json
import socketserver
import threading
from types import SimpleNamespace

import pytest
import torch

from parallel_ops.comm import flight_recorder

_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def call(name, *, state="completed", number=1, p2p=False, sizes=((4, 8),)):
    return {
        "profiling_name": name, "state": state, "retired": state == "completed", "process_group": ["3", "tp"],
        "pg_id": 3, "collective_seq_id": number, "p2p_seq_id": number, "is_p2p": p2p, "time_created_ns": next(_numbers),
        "input_sizes": sizes, "input_dtypes": ["BFloat16"], "output_sizes": (), "output_dtypes": (),
    }  # fmt: skip


def recorder(*, nccl, gloo=(), nccl2=None, answers=True):
    """What a build of torch with NCCL has, with the implementation of 2.15 if ``nccl2`` is given; pickles are names."""
    rings = {"gloo": gloo} | ({} if nccl2 is None else {"nccl2": nccl2})

    def server(path):
        class Answer(socketserver.StreamRequestHandler):
            def handle(self):
                assert self.rfile.readline().startswith(b"POST /handler/dump_nccl_trace_json ")
                if not answers:
                    threading.Event().wait()
                text = json.dumps({"entries": nccl}).encode()
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))

        started = socketserver.ThreadingUnixStreamServer(path, Answer)
        threading.Thread(target=started.serve_forever, daemon=True).start()
        return started

    return SimpleNamespace(
        _WorkerServer=server, _dump_nccl_trace=lambda: b"nccl",
        _dump_fr_trace_json=lambda backend="gloo": json.dumps({"entries": rings[backend]} if rings[backend] else {}),
        _dump_fr_trace=lambda backend="gloo": backend.encode(),
        **({} if nccl2 is None else {"ProcessGroupNCCL2": object}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("nccl", "gloo", "said", "file"),
    [
        (
            [call("nccl:all_gather"), call("nccl:all_reduce", state="started", number=2)], [call("gloo:send")],
            "all_reduce number 2 of group tp, 32 x BFloat16", b"nccl",
        ),
        # Calls of a batch never change their own state.
        (
            [call("nccl:recv 0<-1", state="scheduled", p2p=True), call("nccl:coalesced", p2p=True, sizes=()),
             call("nccl:recv 0<-1", state="scheduled", number=2, p2p=True),
             call("nccl:coalesced", state="scheduled", number=2, p2p=True, sizes=())], [],
            "recv 0<-1 number 2 of group tp, 32 x BFloat16", b"nccl",
        ),
        (
            [call("nccl:all_gather")], [call("gloo:all_reduce", state="scheduled", number=7)],
            "all_reduce number 7 of group tp, 32 x BFloat16", b"gloo",
        ),
        ([call("nccl:all_gather")], [], None, b"nccl"),
    ],
    ids=["nccl", "batch", "gloo", "none"],
)  # fmt: skip
def test_the_call_that_does_not_end_is_named(nccl, gloo, said, file, tmp_path, monkeypatch):
    monkeypatch.setattr(flight_recorder, "_recorder", recorder(nccl=nccl, gloo=gloo))
    path = tmp_path / "new" / "rank_2"
    waits = "" if said is None else f"; rank 2 waits in {said}"
    assert flight_recorder.report(path.parent, 2) == f"{waits}; torch's flight recorder: {path}"
    assert path.read_bytes() == file


def test_the_calls_of_the_nccl_of_torch_2_15(tmp_path, monkeypatch):
    """They are beside those of gloo, and only a call that has ended is retired; the ring of before is empty."""
    calls = [call("nccl2:all_gather"), call("nccl2:all_reduce", state="scheduled", number=2)]
    monkeypatch.setattr(flight_recorder, "_recorder", recorder(nccl=[], gloo=[call("gloo:send")], nccl2=calls))
    said = "; rank 1 waits in all_reduce number 2 of group tp, 32 x BFloat16"
    assert flight_recorder.report(tmp_path, 1) == f"{said}; torch's flight recorder: {tmp_path / 'rank_1'}"
    assert (tmp_path / "rank_1").read_bytes() == b"nccl2"


def test_this_torch_has_the_rings_that_are_read():
    assert all(isinstance(dump(), bytes) for _, dump in flight_recorder._rings())


def test_a_record_that_does_not_come_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(flight_recorder, "_recorder", recorder(nccl=[call("nccl:all_gather")], answers=False))
    monkeypatch.setattr(flight_recorder, "_SECONDS", 0.1)
    assert flight_recorder.report(tmp_path, 0) == ""
    assert not list(tmp_path.iterdir())
