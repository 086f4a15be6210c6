"""Launchers that repeat their launches: with other tensors, the launches that they would work out anew."""

import pytest
import torch

triton = pytest.importorskip("triton")

from parallel_ops.triton_kernels import _launch, bias_dropout_add, rotary_embedding, sum_partials  # noqa: E402
from parallel_ops.triton_kernels.activations import activations  # noqa: E402
from parallel_ops.triton_kernels.attention import flash_attention, merge  # noqa: E402
from parallel_ops.triton_kernels.experts import permute  # noqa: E402
from parallel_ops.triton_kernels.norms import backward, forward  # noqa: E402
from support.transports import launch_driver  # noqa: E402

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="needs compiled kernels")

B = torch.bfloat16


def t(*shape, dtype=B):
    return torch.zeros(shape, dtype=dtype)


def norms():
    stat = t(6, dtype=torch.float32)
    yield (
        forward.forward,
        (t(6, 64), t(64), None, None, t(6, 64), t(0), None, stat),
        {"eps": 1e-6, "zero_centered": False},
    )
    tensors = t(6, 64), None, t(6, 64), t(64), stat, stat.clone(), t(6, 64), None, t(64), t(64)
    yield backward.backward, tensors, {"zero_centered": True}


def activation():
    x, bias = t(6, 64), t(64)
    yield activations.forward, (x, None, bias, None, t(6, 64)), {"activation": "gelu"}
    yield activations.backward, (t(6, 64), x, None, bias, None, t(6, 64), None, t(64), t(0)), {"activation": "gelu"}


def attention():
    q, k, v, out, grad, dq = (t(40, 1, 4, 64) for _ in range(6))
    dk, dv = t(40, 1, 4, 64), t(40, 1, 4, 64)
    statistics, rows = t(2, 1, 4, 40, dtype=torch.float32), t(3, 1, 4, 40, dtype=torch.float32)
    options = {"left": None, "right": 0, "scale": 0.125, "softcap": 0.0, "precision": "tf32"}
    options["draws"] = flash_attention._NO_DRAWS
    yield flash_attention._forward, (q, k, v, out, statistics, None, None), {"merge": False, **options}
    tensors = grad, q, k, v, rows, dq, dk, dv, None, None, None, out, statistics
    yield flash_attention._backward, tensors, {"accumulate_dq": False, **options}
    block, lse = t(40, 1, 4, 64), t(1, 4, 40, dtype=torch.float32)
    yield merge.merge, (block, lse, t(40, 1, 4, 64, dtype=torch.float32), statistics), {}


def other():
    x = t(6, 64)
    drawn = {"p": 0.1, "index_offset": 0}
    seed = t(1, dtype=torch.int64)
    yield bias_dropout_add._forward, (x, t(64), t(6, 64), t(6, 64), seed, None), drawn
    yield bias_dropout_add._backward, (x, t(6, 64), t(64), seed, None), drawn
    cos, sin = t(6, 32, dtype=torch.float32), t(6, 32, dtype=torch.float32)
    turned = {"interleaved": False, "inverse": False, "inplace": False}
    yield rotary_embedding._rotate, (t(6, 1, 2, 64), None, cos, sin, None, None, t(6, 1, 2, 64), None), turned
    yield sum_partials.sum_partials, (t(4, 6, 64), None, None, x), {}
    places, rows = t(6, 2, dtype=torch.int32), t(12, dtype=torch.int32)
    yield permute.scatter, (x, None, rows, places, None, t(12, 64), None), {}
    yield permute.gather, (t(12, 64), places, None, x), {}


CASES = [*norms(), *activation(), *attention(), *other()]


@pytest.fixture
def driver():
    with launch_driver.active() as stand_in:
        yield stand_in


def copies(tensors):
    return tuple(None if x is None else x.clone() for x in tensors)


def launches(driver, call, tensors, options):
    """(kernel, grid, arguments), with tensors that were given by their number and others by a star."""
    driver.launches.clear()
    call(*tensors, **options)
    named = {x.data_ptr(): f"tensor {i}" for i, x in enumerate(tensors) if x is not None and x.numel()}
    found = [(n.function, n.grid, [_name(a, named) for a in n.arguments], n.stream) for n in driver.launches]
    assert found
    return found, [n.by_triton for n in driver.launches]


def _name(argument, named):
    large = isinstance(argument, int) and argument > 2**40
    return named.get(argument, "*" if large else argument)


def plans_of(launcher):
    names = launcher.__code__.co_freevars
    return dict(zip(names, launcher.__closure__, strict=True))["plans"].cell_contents


@pytest.mark.parametrize(("launcher", "tensors", "options"), CASES, ids=[c[0].__name__ for c in CASES])
def test_repeated_launches_are_those_that_would_be_worked_out(driver, launcher, tensors, options):
    plans_of(launcher).clear()
    launches(driver, launcher, tensors, options)  # compiles
    launches(driver, launcher, tensors, options)  # notes
    assert [plan for plan in plans_of(launcher).values() if plan is not None]
    for stream in (7, 9):
        driver.stream = stream
        others = copies(tensors)
        expected, _ = launches(driver, launcher.__wrapped__, others, options)
        got, by_triton = launches(driver, launcher, others, options)
        assert got == expected
        assert not any(by_triton)


def calls_of(launcher):
    """How often a launcher's own body has run, of a copy that remembers anew."""
    count = []

    def counted(*tensors, **options):
        count.append(None)
        launcher.__wrapped__(*tensors, **options)

    return _launch.remembered(counted), count


def test_what_makes_a_launcher_run_again(driver, monkeypatch):
    add, count = calls_of(sum_partials.sum_partials)
    memory = t(4 * 6 * 64 + 1)

    def ran(partials, y):
        before = len(count)
        add(partials, None, None, y)
        return len(count) > before

    assert ran(t(4, 6, 64), t(6, 64))
    ran(t(4, 6, 64), t(6, 64))  # again, if the first one compiled
    assert not ran(t(4, 6, 64), t(6, 64))
    assert ran(t(4, 7, 64), t(7, 64))
    assert ran(t(4, 6, 64, dtype=torch.float32), t(6, 64, dtype=torch.float32))
    assert ran(memory[1:].view(4, 6, 64), t(6, 64))  # not aligned
    driver.device = 71
    assert ran(t(4, 6, 64), t(6, 64))
    driver.device = 70
    assert not ran(t(4, 6, 64), t(6, 64))
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
        assert ran(t(4, 6, 64), t(6, 64))
    hook = lambda *args, **meta: None  # noqa: E731
    sum_partials._sum_kernel.add_pre_run_hook(hook)
    assert ran(t(4, 6, 64), t(6, 64))
    sum_partials._sum_kernel.pre_run_hooks.clear()
    assert not ran(t(4, 6, 64), t(6, 64))


def test_copies_are_not_repeated(driver):
    """Else a launcher that launches with a copy of what it was given would do so with the first call's for ever."""
    add, count = calls_of(sum_partials.sum_partials)
    for _ in range(4):
        add(t(6, 64, 4).permute(2, 0, 1), None, None, t(6, 64))
    assert len(count) == 4


def test_one_tensor_in_two_places(driver):
    """Then it cannot be seen which of both a kernel takes."""
    add, count = calls_of(sum_partials.sum_partials)
    for _ in range(3):
        y = t(6, 64)
        add(t(4, 6, 64), None, y, y)
    assert len(count) == 3
    for _ in range(2):
        add(t(4, 6, 64), None, t(6, 64), t(6, 64))
    partials, residual, y = t(4, 6, 64), t(6, 64), t(6, 64)
    found, _ = launches(driver, add, (partials, None, residual, y), {})
    assert len(count) == 4
    assert found[0][2][:3] == ["tensor 0", "tensor 2", "tensor 3"]


def test_it_forgets(driver, monkeypatch):
    monkeypatch.setattr(_launch, "_MOST_SIGNATURES", 2)
    add, count = calls_of(sum_partials.sum_partials)
    for rows in (6, 7, 8):
        for _ in range(2):
            add(t(4, rows, 64), None, None, t(rows, 64))
    add(t(4, 8, 64), None, None, t(8, 64))
    before = len(count)
    add(t(4, 6, 64), None, None, t(6, 64))
    assert len(count) == before + 1
