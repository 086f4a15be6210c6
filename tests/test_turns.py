"""Two computations that take turns: who runs when, what they raise, and what threads of autograd make of it."""

import threading

import pytest
import torch

from parallel_ops._internal.distributed.turns import pass_on, together


def computation(log, name, waits, result=None, error_after=None):
    def run():
        for n in range(waits):
            log.append(f"{name}{n}")
            if n == error_after:
                raise ValueError(name)
            pass_on()
        log.append(f"{name} ends")
        return result

    return run


def test_each_goes_on_while_the_other_waits():
    log = []
    assert together(computation(log, "a", 2, 1), computation(log, "b", 3, 2)) == (1, 2)
    assert log == ["a0", "b0", "a1", "b1", "a ends", "b2", "b ends"]


def test_one_that_never_waits():
    log = []
    together(computation(log, "a", 0), computation(log, "b", 2))
    assert log == ["a ends", "b0", "b1", "b ends"]


def test_alone_there_is_nobody_to_pass_on_to():
    pass_on()


@pytest.mark.parametrize("second", [False, True])
def test_an_error_ends_both(second):
    log, errors = [], {"error_after": 1}
    first = computation(log, "a", 3, **({} if second else errors))
    other = computation(log, "b", 3, **(errors if second else {}))
    threads = threading.active_count()
    with pytest.raises(ValueError, match="b" if second else "a"):
        together(first, other)
    assert log == (["a0", "b0", "a1", "b1"] if second else ["a0", "b0", "a1"])
    assert threading.active_count() == threads
    assert together(lambda: 1, lambda: 2) == (1, 2)  # nothing is left of the first pair


def test_pairs_are_not_nested():
    with pytest.raises(RuntimeError, match="cannot be nested"):
        together(lambda: together(lambda: 1, lambda: 2), lambda: 3)


class Waits(torch.autograd.Function):
    """Waits in both passes, as an exchange does."""

    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name = log, name
        log.append(f"{name} forward")
        pass_on()
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(f"{ctx.name} backward")
        pass_on()
        return grad * 2, None, None


def test_a_forward_beside_a_backward():
    log = []
    x = torch.ones(3, requires_grad=True)
    y = Waits.apply(Waits.apply(x, log, "b0"), log, "b1").sum()
    log.clear()
    z = torch.ones(3, requires_grad=True)
    out, _ = together(lambda: Waits.apply(Waits.apply(z, log, "f0"), log, "f1"), y.backward)
    assert log == ["f0 forward", "b1 backward", "f1 forward", "b0 backward"]
    assert torch.equal(x.grad, torch.full((3,), 4.0))
    out.sum().backward()
    assert torch.equal(z.grad, torch.full((3,), 4.0))
