"""Tools of torch that look into ops: batched gradients, forward mode, the counter of floating-point operations."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from parallel_ops import (
    all_gather_linear,
    column_parallel_linear,
    cross_entropy,
    flash_attention,
    grouped_linear,
    linear_reduce_scatter,
    rotary_embedding_qk,
    scaled_causal_softmax,
    vocab_parallel_linear_cross_entropy,
)
from parallel_ops._internal.dispatch.registration import cuda_kernels
from support.numerics.calls import CALLS, TARGET, X
from support.numerics.suite import angles, outputs_of, randn

ENDS = torch.tensor([2, 5], dtype=torch.int32)
WEIGHT, EXPERTS = randn(4, 8, dtype=torch.float32), randn(2, 4, 8, dtype=torch.float32)
linear_loss = functools.partial(vocab_parallel_linear_cross_entropy, target=TARGET % 4)
MORE = CALLS | {
    "scaled_causal_softmax": (scaled_causal_softmax, (X,)),
    "attention with sinks": (
        lambda q, k, sink: flash_attention(q, k, k, sink=sink, dropout_p=0.5, dropout_seed=1),
        (randn(6, 1, 2, 8, dtype=torch.float32), randn(6, 1, 1, 8, dtype=torch.float32), X[0, :2] * 2),
    ),
    "cross_entropy": (lambda x: cross_entropy(x, TARGET, label_smoothing=0.1, reduction="none"), (X,)),
    "vocab_parallel_linear_cross_entropy": (linear_loss, (X, WEIGHT)),
    "loss of each row": (lambda x, w: linear_loss(x, w, reduction="none"), (X, WEIGHT)),
    "grouped_linear": (lambda x, w: grouped_linear(x, w, ENDS), (X, EXPERTS)),
    "column_parallel_linear": (lambda x, w: column_parallel_linear(x, w, group=None), (X, WEIGHT)),
    "all_gather_linear": (lambda x, *w: all_gather_linear(x, w, group=None), (X, WEIGHT, WEIGHT * 2)),
    "linear_reduce_scatter": (lambda x, w: linear_reduce_scatter(x, w, group=None), (X, WEIGHT)),
    "written over": (
        lambda q, k: rotary_embedding_qk(q * 2, k * 2, *angles(6, 4), inplace=True),
        (randn(6, 2, 8, dtype=torch.float32), randn(6, 2, 8, dtype=torch.float32)),
    ),
}


def of_floats(name):
    """The call as a function of its floating-point inputs, and these inputs without a graph."""
    call, args = MORE[name]
    floats = [a.detach().clone() for a in args if a.is_floating_point()]

    def run(*given):
        given = list(given)
        outputs = outputs_of(call(*(given.pop(0) if a.is_floating_point() else a for a in args)))
        return [y for y in outputs if y is not None and y.is_floating_point()]

    return run, floats


@pytest.mark.parametrize("name", MORE)
def test_batched_gradients(name):
    """The Jacobian by one batched backward is the one by a backward for each element."""
    run, inputs = of_floats(name)
    first = lambda *given: run(*given)[0]  # noqa: E731
    for got, expected in zip(
        jacobian(first, tuple(inputs), vectorize=True), jacobian(first, tuple(inputs)), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["rms_norm", "flash_attention", "column_parallel_linear"])
def test_batches_of_gradients(name):
    """One sample, several, and torch.func.vmap."""
    run, inputs = of_floats(name)
    inputs = [t.requires_grad_() for t in inputs]
    (y, *_) = run(*inputs)
    for count in (1, 3):
        grads = torch.stack([torch.full_like(y, i + 1.0) for i in range(count)])
        got = torch.autograd.grad(y, inputs, grads, is_grads_batched=True, retain_graph=True)
        for x, batch in zip(inputs, got, strict=True):
            assert batch.shape == (count, *x.shape)
        for i, grad in enumerate(grads):
            for batch, expected in zip(got, torch.autograd.grad(y, inputs, grad, retain_graph=True), strict=True):
                assert torch.equal(batch[i], expected)
    mapped = torch.vmap(lambda g: torch.autograd.grad(y, inputs, g, retain_graph=True))(grads)
    for batch, expected in zip(mapped, got, strict=True):
        assert torch.equal(batch, expected)
    twice = torch.vmap(torch.vmap(lambda g: torch.autograd.grad(y, inputs, g, retain_graph=True)))(grads[None])
    for batch, expected in zip(twice, got, strict=True):
        assert torch.equal(batch[0], expected)


RAISE = {"vocab_parallel_cross_entropy", "cross_entropy", "vocab_parallel_linear_cross_entropy", "loss of each row"}
RAISE |= {"column_parallel_linear", "all_gather_linear", "linear_reduce_scatter", "written over"}
NO_FORWARD_MODE = "forward-mode|forward mode|jvp"  # the last two by torch, of autograd functions
RAISE |= {"route", "permute", "unpermute"}


@pytest.mark.parametrize("also_backward", [False, True])
@pytest.mark.parametrize("name", MORE)
def test_forward_mode(name, also_backward):
    """The tangent is that of the formula, by differences in float64, or asking for it raises: it is never dropped."""
    run, inputs = of_floats(name)
    inputs = [t.double() for t in inputs]
    tangents = [torch.randn(t.shape, generator=torch.Generator().manual_seed(i)).double() for i, t in enumerate(inputs)]
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(x.requires_grad_(also_backward), t) for x, t in zip(inputs, tangents, strict=True)
        ]
        if name in RAISE:
            with pytest.raises(RuntimeError, match=NO_FORWARD_MODE):
                run(*duals)
            return
        got = [forward_ad.unpack_dual(y).tangent for y in run(*duals)]
    step, inputs = 1e-5, [x.detach() for x in inputs]
    after, before = (run(*(x + sign * step * t for x, t in zip(inputs, tangents, strict=True))) for sign in (1, -1))
    for tangent, a, b in zip(got, after, before, strict=True):
        torch.testing.assert_close(tangent.detach(), (a - b) / (2 * step), rtol=1e-6, atol=1e-7)
    for tangent, expected in zip(torch.func.jvp(run, tuple(inputs), tuple(tangents))[1], got, strict=True):
        torch.testing.assert_close(tangent, expected.detach())


@pytest.mark.parametrize("name", sorted(RAISE))
def test_forward_mode_of_functions_raises(name):
    run, inputs = of_floats(name)
    with pytest.raises(RuntimeError, match=NO_FORWARD_MODE):
        torch.func.jvp(run, tuple(inputs), tuple(inputs))


def test_forward_mode_of_what_has_no_tangent():
    """A level alone, and an op called by its name."""
    x = X.detach()
    op = torch.ops.parallel_ops.bias_gelu
    with forward_ad.dual_level():
        assert torch.equal(op(x, None, True), CALLS["bias_gelu without a bias"][0](x))
        with pytest.raises(RuntimeError, match="bias_gelu: forward-mode"):
            op(forward_ad.make_dual(x, x), None, True)


def flops(call):
    with FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


PRODUCTS = {
    "grouped_linear": lambda x, w: torch.bmm(x.view(2, 3, 8), w.mT),
    "column_parallel_linear": F.linear,
    "all_gather_linear": lambda x, *w: torch.cat([F.linear(x, each) for each in w], -1),
    "linear_reduce_scatter": F.linear,
    "vocab_parallel_linear_cross_entropy": lambda x, w: F.cross_entropy(F.linear(x, w), TARGET % 4),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_of_products(name):
    """As many as torch counts of its own matmuls, of forward and backward together and of frozen weights."""
    for frozen in (False, True):
        counts = []
        for function in (MORE[name][0], PRODUCTS[name]):
            x, *weights = (t.detach().clone().requires_grad_(not (frozen and i)) for i, t in enumerate(MORE[name][1]))
            total, outputs = flops(lambda: outputs_of(function(x, *weights)))  # noqa: B023
            counts.append(total + flops(lambda: sum(y.sum() for y in outputs).backward())[0])  # noqa: B023
        assert counts[0] == counts[1] > 0


def test_flops_of_a_loss_of_each_row():
    """It computes the logits a second time in the backward."""
    x, w = (t.detach().clone().requires_grad_() for t in (X, WEIGHT))
    one, loss = flops(lambda: linear_loss(x, w, reduction="none"))
    assert one == 2 * 6 * 8 * 4
    assert flops(lambda: loss.sum().backward())[0] == 3 * one


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flops_of_attention(kv_heads):
    """As torch counts SDPA of as many heads of keys: all pairs of the batch, or of each document."""
    q, k, v = (randn(6, 2, h, d, dtype=torch.float32) for h, d in ((4, 8), (kv_heads, 8), (kv_heads, 5)))
    shapes = [(2, 4, 6, t.shape[3]) for t in (q, k, v)]
    forward, out = flops(lambda: flash_attention(q, k, v))
    assert forward == flop_counter.sdpa_flop_count(*shapes)
    backward, _ = flops(lambda: out.sum().backward())
    assert backward == flop_counter.sdpa_backward_flop_count((2, 4, 6, 5), *shapes)
    documents = torch.tensor([0, 2, 2, 6])
    assert flops(lambda: flash_attention(q, k, v, cu_seqlens=documents))[0] == forward * (4 + 16) // 36
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert flops(lambda: flash_attention(q, k, v, cu_seqlens=documents))[0] == forward


def test_every_op_that_multiplies_matrices_is_counted():
    """The names of all ops, so that a new one is put on one side."""
    registry = {str(op) for op in flop_counter.flop_registry}
    counted = {name for name in cuda_kernels if f"parallel_ops.{name}" in registry}
    assert counted >= {
        "flash_attention", "vocab_parallel_linear_cross_entropy", "grouped_linear",
        "all_gather_linear", "column_parallel_linear", "linear_reduce_scatter",
    }  # fmt: skip
    assert {f"{name}_backward" for name in counted if not name.endswith("_backward")} <= counted
    others = {name for name in cuda_kernels if any(part in name for part in ("linear", "attention"))} - counted
    assert others <= {"block_attention_", "block_attention_backward_", "attention_gradient_rows_"}  # inside the others
