"""What is done beside CUDA graphs that are being captured; without a GPU, CUDA is stood in for."""

import contextlib
import threading
import time
import types

import pytest
import torch

from parallel_ops.comm import _capture


@pytest.fixture
def cuda(monkeypatch):
    """Calls of CUDA, written down; ``captured`` is the stream that is being captured."""
    calls = types.SimpleNamespace(log=[], current="current", captured=None)

    @contextlib.contextmanager
    def stream(chosen):
        former, calls.current = calls.current, chosen or calls.current
        yield
        calls.current = former

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: calls.current == calls.captured)
    monkeypatch.setattr(torch.cuda, "set_device", calls.log.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: calls.log[-1].index)
    ops = types.SimpleNamespace(thread_exchange_stream_capture_mode=lambda *args: calls.log.append(args))
    monkeypatch.setattr(_capture.torch, "ops", types.SimpleNamespace(parallel_ops=ops))
    return calls


@pytest.mark.parametrize(
    ("captured", "stream", "refused"),
    [("current", None, True), ("side", "side", True), ("side", None, False), ("current", "side", False)],
)
def test_the_stream_of_the_launch_decides(cuda, captured, stream, refused):
    cuda.captured = captured
    context = pytest.raises(RuntimeError, match="step: not in a graph") if refused else contextlib.nullcontext()
    with context:
        _capture.refuse_capture("step", "cuda", "not in a graph", stream)
    assert cuda.current == "current"


def test_a_watch_thread_ignores_what_others_capture_on_its_device(cuda):
    _capture.begin_watch_thread(torch.device("cuda", 1))
    assert cuda.log == [torch.device("cuda", 1), (1, 1)]


def test_nothing_is_asked_of_cuda_on_a_cpu(cuda):
    cuda.captured = "current"
    _capture.refuse_capture("step", "cpu", "not in a graph")
    _capture.begin_watch_thread(torch.device("cpu"))
    assert cuda.log == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_is_captured_while_a_thread_watches_an_event():
    done, looks, stop = torch.cuda.Event(), [], threading.Event()
    done.record()
    device = torch.device("cuda", torch.cuda.current_device())

    def watch():
        _capture.begin_watch_thread(device)
        while not stop.is_set():
            looks.append(done.query())
            time.sleep(0.001)

    def look_again():
        end, seen = time.monotonic() + 10, len(looks)
        while len(looks) < seen + 3:
            assert time.monotonic() < end
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        look_again()
        x, graph = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
            look_again()
        graph.replay()
        assert y.item() == 1 and all(looks)
    finally:
        stop.set()
        thread.join()
