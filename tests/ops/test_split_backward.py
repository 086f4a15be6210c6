"""Ops whose backward runs in two halves, the memory of their parameters freed in between, as under FSDP2."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_ops import (
    bias_dropout_add,
    bias_gelu,
    bias_swiglu,
    flash_attention,
    grouped_linear,
    layer_norm,
    rms_norm,
    scaled_causal_softmax,
    vocab_parallel_linear_cross_entropy,
)
from parallel_ops.tensor_parallel import all_gather_linear, column_parallel_linear, linear_reduce_scatter
from support.numerics.suite import randn

S, H = 70, 24
TARGET = torch.arange(S) % H
ENDS = torch.tensor([20, 20, 60])


def heads(x):
    return x.view(S, 1, 2, H // 2)


# op, shapes of its parameters
OPS = {
    "rms_norm": (rms_norm, [(H,)]),
    "rms_norm, zero-centred": (lambda x, w: rms_norm(x, w, zero_centered=True), [(H,)]),
    "rms_norm with a residual": (lambda x, w: sum(rms_norm(x, w, residual=x * 2)), [(H,)]),
    "layer_norm": (layer_norm, [(H,), (H,)]),
    "layer_norm without a weight": (lambda x, b: layer_norm(x, None, b), [(H,)]),
    "layer_norm without a bias": (layer_norm, [(H,)]),
    "bias_gelu": (bias_gelu, [(H,)]),
    "bias_gelu, exact": (lambda x, b: bias_gelu(x, b, approximate="none"), [(H,)]),
    "bias_swiglu": (bias_swiglu, [(H,)]),
    "bias_dropout_add": (lambda x, b: bias_dropout_add(x, b, x * 2, 0.5, dropout_seed=3), [(H,)]),
    "flash_attention": (lambda x, sink: flash_attention(*[heads(x)] * 3, sink=sink), [(2,)]),
    "scaled_causal_softmax": (lambda x, sink: scaled_causal_softmax(x[:H], sink=sink), [(1,)]),
    "all_gather_linear": (lambda x, w, b: all_gather_linear(x, w, b, group=None), [(8, H), (8,)]),
    "column_parallel_linear": (lambda x, w, b: column_parallel_linear(x, w, b, group=None), [(8, H), (8,)]),
    "linear_reduce_scatter": (lambda x, w, b: linear_reduce_scatter(x, w, b, group=None), [(8, H), (8,)]),
    "grouped_linear": (lambda x, w, b: grouped_linear(x, w, ENDS, bias=b), [(3, 8, H), (3, 8)]),
    "vocab_parallel_linear_cross_entropy": (
        lambda x, w: vocab_parallel_linear_cross_entropy(x, w, TARGET, group=None), [(H, H)],
    ),
}  # fmt: skip


class Unchanged(TorchDispatchMode):
    """Sends every op through the dispatcher."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def tensors(shapes, dtype):
    x = randn(S, H, dtype=dtype)
    return x, [
        torch.nn.Parameter(randn(*shape, dtype=torch.float32, seed=i + 1).detach()) for i, shape in enumerate(shapes)
    ]


def run(op, x, parameters, dispatched):
    # The stage's input is not the op's, so that the op's node leads to another one, as in a layer.
    if not dispatched:
        return op(x * 1, *parameters) * 1
    with Unchanged():
        return op(x * 1, *parameters) * 1


@pytest.mark.parametrize("dispatched", [False, True], ids=["eager", "dispatched"])
@pytest.mark.parametrize("name", OPS)
def test_weight_half_after_the_parameters_were_freed(name, dispatched):
    op, shapes = OPS[name]
    x, parameters = tensors(shapes, torch.float32)
    y = run(op, x, parameters, dispatched)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    whole = torch.autograd.grad(y, [x, *parameters], grad)

    y = run(op, x, parameters, dispatched)
    inputs = torch.autograd.grad(y, [x], grad, retain_graph=True)
    for parameter in parameters:
        parameter.untyped_storage().resize_(0)
    for half, expected in zip([*inputs, *torch.autograd.grad(y, parameters, grad)], whole, strict=True):
        torch.testing.assert_close(half, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_halves_of_norms_in_mixed_dtypes(norm):
    """16-bit activations beside float32 parameters and a float32 residual stream."""
    x, residual = randn(S, H, dtype=torch.bfloat16), randn(S, H, dtype=torch.float32, seed=1)
    parameters = [torch.nn.Parameter(torch.randn(H)) for _ in range(1 if norm is rms_norm else 2)]
    grads = [torch.randn(S, H).bfloat16(), torch.randn(S, H)]

    def outputs():
        return norm(x * 1, *parameters, residual=residual * 1)

    whole = torch.autograd.grad(outputs(), [x, residual, *parameters], grads)
    y = outputs()
    inputs = torch.autograd.grad(y, [x, residual], grads, retain_graph=True)
    for parameter in parameters:
        parameter.untyped_storage().resize_(0)
    for half, expected in zip([*inputs, *torch.autograd.grad(y, parameters, grads)], whole, strict=True):
        torch.testing.assert_close(half, expected, rtol=1e-6, atol=1e-6)


def test_each_half_computes_its_gradients_alone():
    module = sys.modules[layer_norm.__module__]
    calls, backward = [], module._backward
    x, parameters = tensors([(H,), (H,)], torch.float32)
    y = layer_norm(x * 1, *parameters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_backward", lambda *args: calls.append(backward(*args)) or calls[-1])
        torch.autograd.grad(y, [x], torch.ones_like(y), retain_graph=True)
        torch.autograd.grad(y, parameters, torch.ones_like(y))
    computed = [[g.numel() for g in gradients] for gradients in calls]
    assert computed == [[S * H, 0, 0, 0], [0, 0, H, H]]


@pytest.mark.parametrize(
    ("op", "name", "shape"), [(bias_gelu, "bias_gelu: .*bias", (H,)), (bias_swiglu, "bias_swiglu: .*bias", (H,))]
)
def test_a_weight_half_without_an_input_half_names_what_was_freed(op, name, shape):
    x, (parameter,) = tensors([shape], torch.float32)
    y = op(x, parameter)
    parameter.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=name):
        torch.autograd.grad(y, [parameter], torch.ones_like(y))


def test_losses_of_each_row_read_the_weight_in_their_weight_half():
    """It is as large as the weight, so it is not copied."""
    x, (weight,) = tensors([(H, H)], torch.float32)
    loss = vocab_parallel_linear_cross_entropy(x * 1, weight, TARGET, group=None, reduction="none")
    whole = torch.autograd.grad(loss.sum(), [x, weight], retain_graph=True)
    halves = [torch.autograd.grad(loss.sum(), [t], retain_graph=True)[0] for t in (x, weight)]
    torch.testing.assert_close(halves, list(whole))
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="vocab_parallel_linear_cross_entropy: the memory of weight was freed"):
        torch.autograd.grad(loss.sum(), [weight])
