"""What every op of one device promises: one table of forms, one test for each promise."""

import pytest
import torch

from parallel_ops._internal.dispatch.autograd import Op
from support.numerics import suite
from support.numerics.forms import EVERY, FORMS
from support.numerics.suite import DEVICES, DTYPES, randn

pytestmark = pytest.mark.parametrize("device", DEVICES)
every_form = pytest.mark.parametrize("name", EVERY)


def gradients(op, args):
    """One for each output, as random as the inputs."""
    outputs = enumerate(suite.outputs_of(op(*args)))
    return [randn(*y.shape, dtype=y.dtype, device=y.device, seed=9 + i).detach() for i, y in outputs]


@pytest.mark.parametrize("name", [name for name in EVERY if "sinks" not in name])  # their gradients cancel: softmaxes/
@pytest.mark.parametrize("dtype", DTYPES)
def test_numerics_of_a_large_tensor(device, dtype, name):
    op, reference, inputs, *_ = EVERY[name]
    args = inputs((16, 128, 384), dtype=dtype, device=device, scale=2)
    suite.check_numerics(op, reference, args, gradients(op, args))


@every_form
def test_custom_op_contract(device, name, monkeypatch):
    """Of all ops that a form calls, also of transposed arguments without gradients."""
    op, _, inputs, layouts, _ = EVERY[name]
    args, calls = inputs((3, 2, 6), dtype=torch.float32, device=device), []
    with monkeypatch.context() as patch:
        patch.setattr(Op, "_implementation", lambda self, given: calls.append((self, given)) or self.dispatched)
        op(*args)
        for i in layouts:
            args[i] = args[i].detach().transpose(0, -1).contiguous().transpose(0, -1)
        op(*args)
    assert calls
    for called, given in calls:
        suite.check_op(called.dispatched, given)


@pytest.mark.parametrize("name", [name for name, form in EVERY.items() if form.leaves_dtypes])
def test_autocast_leaves_dtypes_alone(device, name):
    op, _, inputs, *_ = EVERY[name]
    for dtype in (*DTYPES, torch.float64):
        args = inputs((4, 6, 8), dtype=dtype, device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            y = op(*args)
        assert y.dtype is dtype and torch.equal(y, op(*args))


@every_form
def test_gradient_matches_finite_differences(device, name):
    op, _, inputs, *_ = EVERY[name]
    suite.check_gradient(op, inputs((3, 2, 6), dtype=torch.float64, device=device))


@every_form
def test_second_derivatives_raise(device, name):
    op, _, inputs, *_ = EVERY[name]
    suite.check_second_derivative_raises(op, inputs((3, 2, 6), dtype=torch.float32, device=device))


@every_form
def test_same_bits_on_every_run_and_thread_count(device, name):
    op, _, inputs, *_ = EVERY[name]
    args = inputs((7, 100, 1100), dtype=torch.float32, device=device)
    suite.check_deterministic(op, args, gradients(op, args))


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(device, dtype, name):
    op, _, inputs, layouts, _ = EVERY[name]
    for index in layouts:
        suite.check_layouts(op, inputs((4, 3, 1030), dtype=dtype, device=device), index)


@pytest.mark.parametrize("name", FORMS)
def test_compiles_to_one_graph_for_all_sizes(device, name):
    op, _, inputs, *_ = FORMS[name]
    suite.check_compiles(op, [inputs(s, dtype=torch.float32, device=device) for s in ((4, 3, 8), (6, 3, 10))])


@pytest.mark.parametrize("name", FORMS)
def test_compiles_under_autocast(device, name):
    op, _, inputs, *_ = FORMS[name]
    suite.check_compiles_under_autocast(op, inputs((4, 3, 8), dtype=torch.float32, device=device))


@pytest.mark.parametrize("name", ["bias_gelu", "layer_norm with a residual"])
def test_inductor_compiles(device, name):
    """An op with one output, which stands for the others, and one with several."""
    op, _, inputs, *_ = FORMS[name]
    cases = [inputs(s, dtype=torch.float32, device=device) for s in ((4, 3, 8), (6, 3, 10))]
    suite.check_compiles(op, cases, backend="inductor")


@every_form
def test_activation_checkpointing(device, name):
    op, _, inputs, *_ = EVERY[name]
    suite.check_checkpointing(op, inputs((6, 8), dtype=torch.float32, device=device))
