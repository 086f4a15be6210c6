"""Launches without Triton's own launch: the same kernel, grid, stream and arguments, and hooks that are respected.

A stand-in driver notes what reaches it, so no GPU is needed; two tests at the end use one where it is there.
"""

import dataclasses
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from parallel_ops.triton_kernels import _launch  # noqa: E402
from parallel_ops.triton_kernels._launch import launch  # noqa: E402
from support.transports import launch_driver  # noqa: E402

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="needs compiled kernels")


def _scale(x_ptr, y_ptr, n, a, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    if y_ptr is not None:
        x += tl.load(y_ptr + i, mask=i < n)
    tl.store(x_ptr + i, x * a * (2 if TWICE else 1), mask=i < n)


@pytest.fixture
def kernel():
    return triton.jit(_scale)


@pytest.fixture
def driver():
    with launch_driver.active() as stand_in:
        yield stand_in


MEMORY = torch.zeros(4096)
X, HALF, APART = MEMORY[:64], MEMORY[:64].half(), MEMORY[1:65]
CALLS = {
    "plain": ((X, X, 64, 0.5), {}),
    "dtype": ((HALF, HALF, 64, 0.5), {}),
    "not 16-byte aligned": ((APART, X, 64, 0.5), {}),
    "the other one not aligned": ((X, APART, 64, 0.5), {}),
    "absent": ((X, None, 64, 0.5), {}),
    "not divisible by 16": ((X, X, 63, 0.5), {}),
    "one": ((X, X, 1, 0.5), {}),
    "64 bits": ((X, X, 2**40, 0.5), {}),
    "integer for float": ((X, X, 64, 3), {}),
    "block": ((X, X, 64, 0.5), {"BLOCK": 128}),
    "branch": ((X, X, 64, 0.5), {"TWICE": True}),
    "warps": ((X, X, 64, 0.5), {"num_warps": 8}),
}


@pytest.mark.parametrize("grid", [(3,), (3, 2), (3, 2, 5)])
def test_grid_and_stream(driver, kernel, grid):
    for stream in (5, 6):
        driver.stream = stream
        launch(kernel, grid, X, X, 64, 0.5, BLOCK=64, TWICE=False)
        noted = driver.noted()
        assert (noted.grid, noted.stream) == ((*grid, 1, 1)[:3], stream)
    assert not noted.by_triton


def test_each_kind_launches_what_triton_launches(driver, kernel):
    """In turns, so that each finds its own kernel among those of the others; other values of one kind too."""
    first = {"BLOCK": 64, "TWICE": False, "num_warps": 4, "enable_fp_fusion": True}
    for round_ in range(3):
        for name, ((x, y, n, a), changed) in CALLS.items():
            args = (x, y, n if n == 1 or round_ < 2 else n + 64, a)
            kernel[(2,)](*args, **first | changed)
            expected = driver.noted()
            launch(kernel, (2,), *args, **first | changed)
            got = driver.noted()
            assert dataclasses.replace(got, by_triton=True) == expected, name
            assert got.by_triton == (round_ == 0), name
    functions = {found[1][0] for found in _launch._known[id(kernel)].values()}
    assert len(functions) == len(CALLS)


def test_devices_have_kernels_of_their_own(driver, kernel):
    functions = []
    for device in (70, 71, 70, 71):
        driver.device = device
        launch(kernel, (1,), X, X, 64, 0.5, BLOCK=64, TWICE=False)
        functions.append(driver.noted().function)
    assert functions[:2] == functions[2:]
    assert functions[0] != functions[1]


def warm(driver, kernel):
    for _ in range(2):
        launch(kernel, (1,), X, X, 64, 0.5, BLOCK=64, TWICE=False)
        fast = not driver.noted().by_triton
    assert fast


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chain", [True, False])
def test_launch_hooks_see_every_launch(driver, kernel, monkeypatch, which, chain):
    warm(driver, kernel)
    seen = []
    if chain:
        monkeypatch.setattr(getattr(triton.knobs.runtime, which), "calls", [seen.append])
    else:
        monkeypatch.setattr(triton.knobs.runtime, which, seen.append)
    launch(kernel, (1,), X, X, 64, 0.5, BLOCK=64, TWICE=False)
    assert len(seen) == 1
    if which == "launch_enter_hook":
        assert seen[0].get()["stream"] == driver.stream
    assert driver.noted().by_triton
    monkeypatch.undo()
    warm(driver, kernel)


def test_what_else_triton_does_itself(driver, kernel, monkeypatch):
    """Pre-run hooks, a replaced ``run``, other settings of the compiler, sanitizers, and a version nobody compared."""
    warm(driver, kernel)
    seen = []
    call = lambda: launch(kernel, (1,), X, X, 64, 0.5, BLOCK=64, TWICE=False)  # noqa: E731
    kernel.add_pre_run_hook(lambda *args, **meta: seen.append(args))
    call()
    assert len(seen) == 1
    assert driver.noted().by_triton
    kernel.pre_run_hooks.clear()
    with monkeypatch.context() as patch:
        patch.setattr(_launch.JITFunction, "run", lambda self, *args, **meta: seen.append(args))
        call()
    assert len(seen) == 2
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "debug", True)
        call()
        assert driver.noted().by_triton
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.compilation, "instrumentation_mode", "of no backend")
        for _ in range(2):
            call()
            assert driver.noted().by_triton
    with monkeypatch.context() as patch:
        patch.setattr(_launch, "_specialisation", None)
        call()
        assert driver.noted().by_triton
    call()
    assert not driver.noted().by_triton


@pytest.mark.parametrize(("chosen", "fused"), [(None, True), ("0", False), ("1", True)])
def test_arithmetic_is_fused_unless_the_user_says_otherwise(chosen, fused, driver, kernel, monkeypatch):
    """Triton 3.9 warns where nobody chooses, once in a process."""
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", chosen)
    if hasattr(triton._utils, "warn_once"):
        triton._utils.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            launch(kernel, (1,), X, X, 64, 0.5, BLOCK=64, TWICE=False)
    ((*_, compiled),) = _launch._known[id(kernel)].values()
    assert compiled.metadata.enable_fp_fusion is fused


def test_errors_of_a_launch_are_as_raised(driver, kernel):
    warm(driver, kernel)
    for failure in (MemoryError("none left"), KeyboardInterrupt(), RuntimeError("launch failed")):
        driver.failure = failure
        with pytest.raises(type(failure)) as caught:
            launch(kernel, (1,), X, X, 64, 0.5, BLOCK=64, TWICE=False)
        assert caught.value is failure


def on_a_side_stream(call, x):
    with torch.cuda.stream(torch.cuda.Stream()):
        result = call(x)
    torch.cuda.synchronize()
    return result


def in_a_graph(call, x):
    """A leaf of its own, since autograd makes a backward wait for the stream on which a leaf was used first."""
    graph = torch.cuda.CUDAGraph()
    x = x.detach().clone().requires_grad_()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = call(x)
    graph.replay()
    torch.cuda.synchronize()
    return result


def in_a_new_thread(call, x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, x).result()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", [on_a_side_stream, in_a_graph, in_a_new_thread])
@pytest.mark.parametrize("device", range(max(1, torch.cuda.device_count())))
def test_known_launches_on_a_gpu(way, device, monkeypatch):
    """On another device than the current one too; the backward runs on a thread of autograd."""
    from parallel_ops import bias_gelu

    x = torch.randn(64, 512, device=f"cuda:{device}", dtype=torch.bfloat16, requires_grad=True)
    bias, grad = torch.randn_like(x[0]).detach(), torch.randn_like(x)

    def call(x):
        y = bias_gelu(x, bias)
        return [y, *torch.autograd.grad(y, x, grad)]

    expected = call(x)
    torch.cuda.synchronize()
    monkeypatch.setattr(_launch, "_launch_first", lambda *_: pytest.fail("launched by Triton"))
    for got, want in zip(way(call, x), expected, strict=True):
        assert torch.equal(got, want)
