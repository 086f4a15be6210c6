"""Public functions in eager mode go past torch's dispatcher: the same results, and only where nobody could tell."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import parallel_ops
from parallel_ops import bias_gelu, flash_attention, rotary_embedding
from parallel_ops._internal.dispatch import autograd as _autograd
from parallel_ops._internal.dispatch import registration as _registration
from support.numerics.calls import BIAS, CALLS, X
from support.numerics.suite import RecordedOps, forward_backward, outputs_of

GELU = torch.ops.parallel_ops.bias_gelu.default
GELU_BACKWARD = torch.ops.parallel_ops.bias_gelu_backward.default


@pytest.mark.parametrize("name", CALLS)
def test_same_bits_as_through_the_dispatcher(name, monkeypatch):
    op, args = CALLS[name]
    args = [a.detach().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    direct = forward_backward(op, args)
    with torch.no_grad():
        alone = op(*args)
    monkeypatch.setattr(_autograd, "_profiler", _autograd._always)
    for a, b in zip(direct, forward_backward(op, args), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        for a, b in zip(_tuple(alone), _tuple(op(*args)), strict=True):
            assert torch.equal(a, b)


def _tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


BROKEN = {
    "shorter": lambda t: t[:-1],
    "narrower": lambda t: t[..., :-1],
    "one dimension more": lambda t: t.unsqueeze(0),
    "one number": lambda t: t.flatten()[0],
    "integers": lambda t: t.int(),
    "float64": lambda t: t.double(),
    "float16": lambda t: t.half(),
    "on another device": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "no tensor": lambda t: t.tolist(),
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments_are_refused_alike(name, gradients, monkeypatch):
    """Past the dispatcher a CPU kernel's checks come before those that name the argument: they must not miss any."""
    op, args = CALLS[name]
    args = [a.detach().requires_grad_(gradients and a.is_floating_point()) for a in args]
    broken = {
        (index, how): [*args[:index], change(a), *args[index + 1 :]]
        for index, a in enumerate(args)
        for how, change in BROKEN.items()
    }
    direct = {case: outcome(op, given) for case, given in broken.items()}
    monkeypatch.setattr(_autograd, "_profiler", _autograd._always)
    assert direct == {case: outcome(op, given) for case, given in broken.items()}
    kinds = {kind for (_, how), (kind, _) in direct.items() if how != "sparse"}  # torch refuses sparse targets itself
    assert kinds <= {None, TypeError, ValueError}


def outcome(op, args):
    try:
        op(*args)
    except Exception as error:
        return type(error), str(error)
    return None, ""


def test_plain_calls_do_not_reach_the_dispatcher(monkeypatch):
    """Else the rest of this file would compare the dispatcher with itself."""
    calls = []
    monkeypatch.setattr(torch._ops.OpOverload, "__call__", lambda *args: calls.append(args))
    y = bias_gelu(X, BIAS)
    torch.autograd.grad(y, (X, BIAS), X.detach())
    with torch.no_grad():
        bias_gelu(X, BIAS)
    assert [op for op, *_ in calls if op.namespace == "parallel_ops"] == []


def test_dispatch_modes_see_the_ops():
    with RecordedOps() as seen:
        y = bias_gelu(X, BIAS)
        torch.autograd.grad(y, (X, BIAS), X.detach())
    assert [op for op, _ in seen.calls] == [GELU, GELU_BACKWARD]


def test_function_modes_see_the_op():
    class Watching(TorchFunctionMode):
        seen = ()

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += (func,)
            return func(*args, **(kwargs or {}))

    with Watching() as watching:
        bias_gelu(X, BIAS)
    assert GELU in watching.seen


def test_traces_hold_the_op():
    traced = torch.jit.trace(bias_gelu, (X.detach(),))
    assert "parallel_ops::bias_gelu" in str(traced.graph)


def test_a_mode_around_the_backward_alone():
    y = bias_gelu(X, BIAS)
    with RecordedOps() as seen:
        torch.autograd.grad(y, (X, BIAS), X.detach())
    assert [op for op, _ in seen.calls] == [GELU_BACKWARD]


def test_fake_tensors():
    with FakeTensorMode():
        x = torch.empty(6, 8, requires_grad=True)
        y = bias_gelu(x, torch.empty(8))
        (dx,) = torch.autograd.grad(y, x, torch.empty(6, 8))
    assert dx.shape == (6, 8)
    assert type(dx).__name__ == "FakeTensor"


@pytest.mark.parametrize(
    "call",
    [
        lambda q: flash_attention(q, q, q, cu_seqlens=torch.tensor([0, 2, 6])),
        lambda q: flash_attention(q, q, q, key_ranges=torch.zeros(2, 6, dtype=torch.int32)),
        lambda q: rotary_embedding(q, *torch.zeros(2, 6, 4), positions=torch.arange(6)),
        lambda q: rotary_embedding(q[:, 0], *torch.zeros(2, 6, 4), cu_seqlens=torch.tensor([0, 2, 6])),
    ],
    ids=["documents", "ranges", "positions", "packed"],
)
def test_fake_tensors_have_no_values_to_check(call):
    """As in estimates of memory: documents and positions decide no shape."""
    with FakeTensorMode():
        assert type(call(torch.empty(6, 1, 2, 8))).__name__ == "FakeTensor"


def test_meta_tensors():
    x = torch.empty(6, 8, device="meta", requires_grad=True)
    (dx,) = torch.autograd.grad(bias_gelu(x), x, torch.empty(6, 8, device="meta"))
    assert (dx.device.type, dx.shape) == ("meta", (6, 8))


def test_profiles_name_the_ops():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = bias_gelu(X, BIAS)
        torch.autograd.grad(y, (X, BIAS), X.detach())
    names = {event.key for event in profile.key_averages()}
    assert {"parallel_ops::bias_gelu", "parallel_ops::bias_gelu_backward"} <= names


def test_views_that_only_seem_to_be_memory():
    """The imaginary part of a conjugate is a float tensor that is negated where it is read; so may gradients be."""
    negative = torch.complex(X.detach(), X.detach()).conj().imag
    assert negative.is_neg()
    for x, grad in ((negative, X), (X, negative), (negative, negative), (X, torch._efficientzerotensor((6, 8)))):
        got = forward_backward(bias_gelu, [x.detach().requires_grad_(), BIAS], grad.detach())
        expected = forward_backward(bias_gelu, [x.detach().resolve_neg().requires_grad_(), BIAS], grad.detach() + 0)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


def test_subclasses_see_the_op():
    class Named(torch.Tensor):
        seen = ()

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            Named.seen += (func,)
            return super().__torch_function__(func, types, args, kwargs)

    y = bias_gelu(X.detach().as_subclass(Named), BIAS)
    assert type(y) is Named
    assert GELU in Named.seen


def test_function_transforms_reach_the_dispatcher():
    """Torch maps any op over a dimension, by a loop with a warning, and differentiates none without a rule for it."""
    mapped = torch.func.vmap(lambda x: bias_gelu(x, BIAS.detach()))(X.detach())
    assert torch.equal(mapped, bias_gelu(X, BIAS))
    with pytest.raises(
        RuntimeError, match=r"bias_gelu: torch.func's grad, .* do not go through this op; call \.backward"
    ):
        torch.func.grad(lambda x: bias_gelu(x).sum())(X)


def test_floats_are_floats_for_triton(monkeypatch):
    """The dispatcher turns ints into floats where the schema says so; Triton would compile another kernel for them."""
    seen = []
    kernel = _registration._kernel(
        torch.ops.parallel_ops.scaled_masked_softmax.default, lambda scores, mask, sink, scale: seen.append(scale)
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)

    class OnCuda:
        is_cuda, device = True, torch.device("cpu")

    kernel(OnCuda(), None, None, 1)
    assert seen == [1.0]
    assert type(seen[0]) is float


def steps(call):
    """How many functions of the package's Python ``call`` runs, and how many it calls from there."""
    package, count = str(Path(parallel_ops.__file__).parent), 0

    def note(frame, event, _):
        nonlocal count
        count += event in ("call", "c_call") and frame.f_code.co_filename.startswith(package)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("name", "limit"), [("bias_gelu", 60), ("rms_norm", 70)])
def test_steps_of_the_host(name, limit):
    """Forward and backward. Times are noise where others compute too; these are what they are made of (48 and 56)."""
    op, args = CALLS[name]
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.is_leaf and a.requires_grad]
    call = lambda: torch.autograd.grad(outputs_of(op(*args))[0], leaves, X.detach(), allow_unused=True)  # noqa: E731
    call()
    assert steps(call) <= limit


def test_memory_that_is_not_there():
    x = torch.zeros(1, 64).expand(2**42, 64)  # more than there are addresses
    with pytest.raises(RuntimeError, match=f"cannot allocate an output of {2**48} elements on the CPU"):
        bias_gelu(x)


@pytest.mark.parametrize("module", ["activations", "norms.forward", "attention.flash_attention", "sum_partials"])
def test_a_torch_for_amd_gpus_is_refused_before_the_first_kernel(monkeypatch, module):
    monkeypatch.setattr(torch.version, "hip", "7.1.2")
    for name in [name for name in sys.modules if name.startswith("parallel_ops.triton_kernels")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        RuntimeError, match=r"for NVIDIA GPUs, and this torch is built for ROCm 7\.1\.2; keep the tensors"
    ):
        importlib.import_module(f"parallel_ops.triton_kernels.{module}")
    if module == "activations":
        with pytest.raises(RuntimeError, match="ROCm"):
            _registration.cuda_kernels["bias_gelu"](X, BIAS, False)


def test_an_op_without_a_schema_says_what_is_missing():
    with pytest.raises(RuntimeError, match=r"squared has no compiled schema: add it to csrc/registration\.cpp"):
        _registration.register("squared")
