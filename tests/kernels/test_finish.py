"""Backwards that sum over rows: one launch, whose last programs add what the first ones made."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from benchmarks.gpu_model.cases import benchmark  # noqa: E402
from benchmarks.gpu_model.facts import launched  # noqa: E402
from parallel_ops import bias_dropout_add, bias_gelu, bias_swiglu, layer_norm, rms_norm, route  # noqa: E402
from parallel_ops.triton_kernels import _finish, memory  # noqa: E402
from parallel_ops.triton_kernels import bias_dropout_add as dropout_kernels  # noqa: E402
from parallel_ops.triton_kernels.activations import activations  # noqa: E402
from parallel_ops.triton_kernels.experts import route as route_kernels  # noqa: E402
from parallel_ops.triton_kernels.norms import backward as norm_backward  # noqa: E402
from ptx.execution import executed, ops_launch_kernels  # noqa: E402
from support.numerics.suite import randn  # noqa: E402

ONE_LAUNCH = ["bias_gelu", "bias_swiglu", "silu_mul", "bias_dropout_add", "layer_norm", "rms_norm", "rotary_embedding"]


@pytest.mark.aot
@pytest.mark.parametrize("cols", [1024, 4104, 16384])
@pytest.mark.parametrize("op", ONE_LAUNCH)
def test_a_backward_is_one_launch(op, cols):
    if op == "layer_norm":  # wider rows with a bias leave no registers for the sums
        cols = min(cols, norm_backward.MAX_BACKWARD_BIAS)
    shape = (2048, 4, 8, 64) if op == "rotary_embedding" else (2048, 4, cols)
    backward = launched(benchmark(op), shape, torch.bfloat16, 90, 132)["backward"]
    assert len(backward) == 1, [name for name, *_ in backward]


# x and the bias, and weights of the rows where the op has them.
OPS = {
    "bias_gelu": lambda x, bias, weights: bias_gelu(x, bias),
    "bias_swiglu": lambda x, bias, weights: bias_swiglu(x, bias, weights=weights),
    "weights alone": lambda x, bias, weights: bias_swiglu(x, weights=weights),
    "bias_dropout_add": lambda x, bias, weights: bias_dropout_add(
        x, bias, torch.zeros_like(x), dropout_p=0.3, dropout_seed=torch.tensor([5], device=x.device)
    ),
    "rms_norm": lambda x, bias, weights: rms_norm(x, bias),
    "layer_norm": lambda x, bias, weights: layer_norm(x, bias, bias * 2),
}


@pytest.mark.executed
@pytest.mark.parametrize(
    ("op", "shape"),
    [*((op, (40, 264)) for op in OPS), ("layer_norm", (5, 12296)), ("rms_norm", (4, 33000))],
    ids=str,
)
def test_the_same_bits_in_any_order_of_programs_and_no_race(op, shape, monkeypatch):
    """The executor raises where a program reads what another wrote without an order between them.

    Few programs share the rows, for the test's time; all of a launch run at once, in orders of which most have waiting
    programs first.
    """
    counters = [torch.zeros(2, dtype=torch.int32)]
    for module in (activations, dropout_kernels, norm_backward):
        monkeypatch.setattr(module, "counter", lambda device: counters[0])
    monkeypatch.setattr(norm_backward, "multiprocessors", lambda device: 3)
    found = []
    with ops_launch_kernels():
        for shuffle in (None, 0, 1):
            x, bias = randn(*shape, dtype=torch.bfloat16, seed=1), randn(shape[1], dtype=torch.bfloat16, seed=2)
            weights = randn(shape[0], dtype=torch.float32, seed=3)
            with executed(90):
                y = OPS[op](x, bias, weights)
                grad = randn(*y.shape, dtype=torch.bfloat16, seed=4).detach()
            with executed(90, shuffle=shuffle) as reports:
                y.backward(grad)
            assert not counters[0].any(), "the next launch would not wait"
            assert sum("workers" in dict(r.specialised.signature) for r in reports) == 1
            found.append([t.grad for t in (x, bias, weights) if t.grad is not None])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.executed
def test_the_router_sums_in_any_order_of_programs(monkeypatch):
    """Its forward is one launch too."""
    counter, found = torch.zeros(2, dtype=torch.int32), []
    monkeypatch.setattr(route_kernels, "counter", lambda device: counter)
    for shuffle in (None, 0, 1):
        with ops_launch_kernels(), executed(90, shuffle=shuffle) as reports:
            found.append(route(randn(300, 24, dtype=torch.bfloat16, seed=1).detach(), 3))
        assert len(reports) == 1 and reports[0].programs > 3
        assert not counter.any(), "the next launch would not wait"
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.fixture
def cuda(monkeypatch):
    """``_finish`` as on a GPU, with counters on the CPU; the current stream and whether it captures can be set."""
    state = SimpleNamespace(stream=7, capturing=False, cleared=0, made=[])

    def zeros(n, **_):
        state.cleared += 1
        state.made.append((threading.get_ident(), getattr(entered, "stream", None)))
        return torch.zeros(n, dtype=torch.int32)

    @contextlib.contextmanager
    def enter(stream):
        entered.stream = stream
        yield

    entered = threading.local()
    cuda = SimpleNamespace(current_stream=lambda _: state.stream, device=contextlib.nullcontext, stream=enter)
    monkeypatch.setattr(memory, "torch", SimpleNamespace(cuda=cuda))

    stand_in = SimpleNamespace(
        zeros=zeros, int32=torch.int32, _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: state.stream),
        cuda=SimpleNamespace(is_current_stream_capturing=lambda: state.capturing),
    )  # fmt: skip
    monkeypatch.setattr(_finish, "torch", stand_in)
    monkeypatch.setattr(_finish, "_by_stream", {})
    monkeypatch.setattr(_finish, "_reserves", {})
    return state


def device(index=0):
    return SimpleNamespace(type="cuda", index=index)


def test_launches_of_a_stream_share_a_counter(cuda):
    first = _finish.counter(device())
    assert _finish.counter(device()).data_ptr() == first.data_ptr()
    cuda.stream = 8
    second = _finish.counter(device()).data_ptr()
    assert second != first.data_ptr()
    assert _finish.counter(device(1)).data_ptr() not in (first.data_ptr(), second)


def test_counters_are_in_no_pool_of_the_thread_that_launches(cuda):
    """As a pool of Inductor's CUDA graphs, which may hold nothing that outlives a run."""
    _finish.counter(device())
    assert len(cuda.made) == 2
    assert all(thread != threading.get_ident() and stream == 7 for thread, stream in cuda.made)


def test_captured_launches_have_counters_of_their_own_that_nothing_clears(cuda, monkeypatch):
    monkeypatch.setattr(_finish, "_RESERVED", 3)
    _finish.counter(device())
    cleared, cuda.capturing = cuda.cleared, True
    found = [_finish.counter(device()) for _ in range(3)]
    assert cuda.cleared == cleared
    assert len({t.data_ptr() for t in found}) == 3
    assert all(t.data_ptr() % 16 == 0 and t.numel() == 2 for t in found)
    _finish.counter(device())
    assert cuda.cleared == cleared + 1, "beyond the reserve a launch clears its own"


def test_captured_before_any_other_launch(cuda):
    cuda.capturing = True
    assert not _finish.counter(device()).any()


def tensors(device="cuda"):
    """The input of ``OPS``, a bias and weights of rows."""
    x, bias = (randn(*s, dtype=torch.bfloat16, seed=i).detach() for i, s in enumerate([(512, 4096), (4096,)]))
    return [x.to(device), bias.to(device), torch.rand(512, device=device)]


def gradients(function, given):
    leaves = [t.clone().requires_grad_() for t in given]
    y = function(*leaves)
    return torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("op", OPS)
def test_backwards_in_a_graph_beside_others_on_a_gpu(op):
    given = tensors()
    expected = gradients(OPS[op], given)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = [gradients(OPS[op], given) for _ in range(2)]
    for _ in range(20):
        with torch.cuda.stream(side):
            graph.replay()
        eager = gradients(OPS[op], given)
    torch.cuda.synchronize()
    for found in (*captured, eager):
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("op", OPS)
def test_backwards_in_inductors_graphs_on_a_gpu(op):
    """It checks after a first run that its pool holds results alone."""
    given = tensors()
    expected, compiled = gradients(OPS[op], given), torch.compile(OPS[op], mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = gradients(compiled, given)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
