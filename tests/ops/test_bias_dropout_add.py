import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import bias_dropout_add
from parallel_ops.ops import bias_dropout_add_reference
from support.numerics import suite
from support.numerics.suite import DEVICES, DTYPES, randn, refused, refuses

pytestmark = pytest.mark.parametrize("device", DEVICES)
raw_op = torch.ops.parallel_ops.bias_dropout_add.default
raw_backward = torch.ops.parallel_ops.bias_dropout_add_backward.default


def inputs(*shape, dtype=torch.float32, device="cpu", seed=0, scale=1.0):
    sizes = (shape, shape[-1:], shape)
    return [randn(*s, dtype=dtype, device=device, seed=seed + i, scale=scale) for i, s in enumerate(sizes)]


def both(p, **options):
    """The op and its reference as functions of x, bias and residual."""
    return [functools.partial(f, dropout_p=p, **options) for f in (bias_dropout_add, bias_dropout_add_reference)]


@given(
    shape=suite.shapes(),
    dtype=st.sampled_from(DTYPES),
    p=st.sampled_from([0.0, 0.1, 0.5, 0.99, 1.0]),
    with_bias=st.booleans(),
    with_residual=st.booleans(),
    seed=st.integers(-(2**63), 2**64 - 1),
    index_offset=st.one_of(st.integers(0, 9), st.integers(0, 2**62)),
)
def test_numerics_of_any_shape(device, shape, dtype, p, with_bias, with_residual, seed, index_offset):
    x, bias, residual = inputs(*shape, dtype=dtype, device=device)
    grad = randn(*shape, dtype=dtype, device=device, seed=3).detach()
    op, reference = both(p, dropout_seed=seed, index_offset=index_offset)
    args = [x, bias if with_bias else None, residual if with_residual else None]
    suite.check_numerics(op, reference, args, grad, slack_ulps=2)


@pytest.mark.parametrize("index_offset", [1, 2, 3, 4, 2**34 - 2, 2**34 + 1])
def test_a_shard_draws_what_the_whole_would(device, index_offset):
    """Split at any element, also where no four elements share a draw, and where counters pass 32 bits."""
    whole = inputs(12, 3, 35, device=device)
    y, *grads = suite.forward_backward(both(0.4, dropout_seed=2**40 + 1, index_offset=index_offset)[0], whole)
    for start, end in ((0, 5), (5, 6), (6, 12)):
        shard = [t if t.dim() == 1 else t.detach()[start:end].requires_grad_() for t in whole]
        op, _ = both(0.4, dropout_seed=2**40 + 1, index_offset=index_offset + start * 3 * 35)
        ours = suite.forward_backward(op, shard)
        assert torch.equal(ours[0], y[start:end]) and torch.equal(ours[1], grads[0][start:end])
    x, bias, residual = (t.expand(whole[0].shape).flatten()[7:] for t in whole)
    part = bias_dropout_add(x + bias, None, residual, 0.4, dropout_seed=2**40 + 1, index_offset=index_offset + 7)
    torch.testing.assert_close(part, y.flatten()[7:])


@pytest.mark.parametrize("index_offset", [0, 3, 2**34 - 2])
@pytest.mark.parametrize("shape", [(12, 3, 35), (12, 2, 2, 8), (12, 1100)])
def test_rows_from_anywhere_draw_what_the_whole_would(device, shape, index_offset):
    """Every third row, and the rows of two runs, as context-parallel ranks have them."""
    whole = inputs(*shape, device=device)
    y, *grads = suite.forward_backward(both(0.4, dropout_seed=2**40 + 1, index_offset=index_offset)[0], whole)
    for rows in ([1, 4, 7, 10], [0, 1, 10, 11], [5]):
        positions = torch.tensor(rows, device=device)
        shard = [t if t.dim() == 1 else t.detach()[positions].requires_grad_() for t in whole]
        for op in both(0.4, dropout_seed=2**40 + 1, index_offset=index_offset, row_positions=positions):
            out, dx, *_ = suite.forward_backward(op, shard)
            torch.testing.assert_close((out, dx), (y[positions], grads[0][positions]))
    alone = bias_dropout_add(whole[0].detach()[positions], None, None, 0.4, dropout_seed=1, row_positions=positions)
    assert torch.equal(alone, bias_dropout_add(whole[0].detach(), None, None, 0.4, dropout_seed=1)[positions])


def test_keep_rate_and_independence(device):
    """Fixed seeds, so a fixed outcome; the bounds are five standard deviations."""
    n, p = 1 << 20, 0.3
    x, zero = torch.ones(n, device=device), torch.zeros(n, device=device)
    masks = [bias_dropout_add(x, None, zero, p, dropout_seed=seed) > 0 for seed in (0, 1, 2**32)]
    centred = torch.stack([m.double() - (1 - p) for m in masks])
    bound = 5 * (p * (1 - p)) / n**0.5
    assert centred.mean(dim=1).abs().max() < 5 * (p * (1 - p) / n) ** 0.5
    for lag in (1, 2, 3, 4, 5, 64, 1024):
        assert (centred[:, lag:] * centred[:, :-lag]).mean(dim=1).abs().max() < 1.01 * bound, f"lag {lag}"
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (centred[i] * centred[j]).mean().abs() < bound, "seeds are correlated"
    for word in range(4):
        assert centred[:, word::4].mean(dim=1).abs().max() < 5 * (p * (1 - p) / (n / 4)) ** 0.5


def test_a_drawn_seed_follows_the_generator(device):
    x, bias, residual = inputs(8, 64, device=device)
    draw = functools.partial(bias_dropout_add, x, bias, residual, 0.5)
    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(draw(), first) and not torch.equal(second, first)
    state = torch.get_rng_state()
    bias_dropout_add(x, bias, residual, 0.5, training=False)
    bias_dropout_add(x, bias, residual, 0.0)
    bias_dropout_add(x, bias, residual, 0.5, dropout_seed=1)
    assert torch.equal(torch.get_rng_state(), state), "a call that draws no seed moved the generator"


def test_integer_and_tensor_seeds_agree(device):
    args = inputs(8, 64, device=device)
    call = functools.partial(bias_dropout_add, *args, 0.5)
    for seed in (0, -1, 2**63, 2**64 - 1, -(2**63)):
        wrapped = (seed + 2**63) % 2**64 - 2**63
        for tensor in (torch.tensor([wrapped], device=device), torch.tensor(wrapped, device=device)):
            assert torch.equal(call(dropout_seed=tensor), call(dropout_seed=seed))
    assert torch.equal(call(dropout_seed=-1), call(dropout_seed=2**64 - 1))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_dtypes_of_their_own(device, p):
    """A residual stream in fp32 between layers in bf16, as Megatron has it from 0.17 on, and every other mixture."""
    grad = randn(30, 1030, dtype=torch.float32, device=device, seed=3).detach()
    wide, narrow = torch.float32, torch.bfloat16
    for dtypes in ((narrow, narrow, wide), (narrow, wide, wide), (wide, wide, narrow), (narrow, wide, narrow)):
        args = [t.detach().to(d).requires_grad_() for t, d in zip(inputs(30, 1030, device=device), dtypes, strict=True)]
        suite.check_numerics(*both(p, dropout_seed=1, index_offset=2), args, grad, slack_ulps=2)


@pytest.mark.parametrize("options", [{"dropout_p": 0.0}, {"dropout_p": 1e-12}, {"dropout_p": 0.5, "training": False}])
def test_without_dropout(device, options):
    x, bias, residual = inputs(6, 8, device=device)
    assert torch.equal(bias_dropout_add(x, bias, residual, **options), residual + (x + bias))
    grad = torch.randn(6, 8, device=device)
    y = bias_dropout_add(x, bias, residual, **options)
    dx, dresidual = torch.autograd.grad(y, [x, residual], grad)
    assert dx.data_ptr() == dresidual.data_ptr() == grad.data_ptr(), "a gradient was copied"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_in_place(device, dtype, compiled):
    x, bias, residual = (t.detach() for t in inputs(6, 3, 1030, dtype=dtype, device=device))

    def both_ways(x, bias, residual, p):
        y = bias_dropout_add(x, bias, residual, p, dropout_seed=1, index_offset=1)
        return y, bias_dropout_add(x, bias, residual, p, dropout_seed=1, index_offset=1, inplace=True)

    torch._dynamo.reset()
    run = torch.compile(both_ways, backend="aot_eager", fullgraph=True) if compiled else both_ways
    for p in (0.3,) if compiled else (0.0, 0.3):
        for args in ((bias, residual), (None, residual), (None, None), (bias, residual.mT.contiguous().mT)):
            written = x.clone()
            y, same = run(written, *args, p)
            assert same.data_ptr() == written.data_ptr() and torch.equal(same, y)


def test_what_cannot_be_written_in_place(device):
    x, bias, residual = inputs(4, 8, device=device)
    call = functools.partial(bias_dropout_add, dropout_p=0.0, inplace=True)
    wrong = functools.partial(refuses, call)
    wrong(ValueError, "inplace is for evaluation, but x, bias or residual requires a gradient", x, bias, residual)
    with torch.no_grad():
        call(x, bias, residual)
        wrong(ValueError, "inplace needs a contiguous x of torch.float32", x.bfloat16(), bias, residual)
        wrong(ValueError, "inplace needs a contiguous x", x[:, ::2], bias[::2], residual[:, ::2])


def test_dropping_everything_gives_the_residual_whatever_x_holds(device):
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0]], device=device).requires_grad_()
    bias, residual = torch.ones(4, device=device).requires_grad_(), torch.randn(1, 4, device=device)
    y = bias_dropout_add(x, bias, residual, 1.0)
    assert torch.equal(y, residual)
    dx, dbias = torch.autograd.grad(y, [x, bias], torch.full_like(y, torch.inf))
    assert not dx.any() and not dbias.any()


def test_dropped_elements_contribute_nothing_and_kept_ones_flow(device):
    x = torch.full((64,), torch.nan, device=device)
    y = bias_dropout_add(x, None, torch.zeros(64, device=device), 0.5, dropout_seed=1)
    ones = bias_dropout_add(torch.ones_like(x), None, torch.zeros(64, device=device), 0.5, dropout_seed=1)
    assert torch.equal(y.isnan(), ones == 2.0) and torch.equal(y == 0.0, ones == 0.0)


def test_saves_only_the_seed(device):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        bias_dropout_add(*inputs(64, 64, device=device), 0.1)
    assert [(t.dtype, t.numel()) for t in saved] == [(torch.int64, 1)]


def test_custom_op_contract_of_16_bits_and_in_place(device):
    x, bias, residual = inputs(3, 2, 5, device=device)
    seed, positions = torch.tensor([3], device=device), torch.tensor([4, 0, 2], device=device)
    suite.check_op(raw_op, [x.bfloat16().detach().requires_grad_(), bias, residual, torch.float32, 0.3, seed, 7, None])
    inplace = torch.ops.parallel_ops.bias_dropout_add_.default
    suite.check_op(inplace, [x.detach().clone(), bias.detach(), residual.detach(), 0.3, seed, 7, positions])


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_asked_for(device, wanted):
    for p in (0.0, 0.3):
        args = [t.detach().requires_grad_(w) for t, w in zip(inputs(6, 8, device=device), wanted, strict=True)]
        suite.check_numerics(*both(p, dropout_seed=1), args, slack_ulps=2)


def test_compiles_with_a_drawn_seed(device):
    x, bias, residual = inputs(64, 64, device=device)
    compiled = torch.compile(both(0.5)[0], fullgraph=True)
    y = compiled(x, bias, residual)
    y.sum().backward()
    kept = y != residual
    assert 0.4 < kept.float().mean() < 0.6
    assert torch.equal(x.grad != 0, kept), "backward drew another mask"
    assert not torch.equal(compiled(x, bias, residual), y)


def test_activation_checkpointing_with_a_drawn_seed(device):
    suite.check_checkpointing(both(0.5)[0], inputs(6, 8, device=device))


def test_autocast_keeps_the_width_of_the_residual(device):
    x, bias, residual = inputs(6, 8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = bias_dropout_add(x.bfloat16(), bias, residual, 0.5, dropout_seed=1)
        narrow = bias_dropout_add(*(t.bfloat16() for t in (x, bias, residual)), 0.5, dropout_seed=1)
    assert y.dtype is torch.float32 and narrow.dtype is torch.bfloat16
    assert torch.equal(y, bias_dropout_add(x.bfloat16().float(), bias, residual, 0.5, dropout_seed=1))
    y.sum().backward()
    assert bias.grad.dtype is torch.float32


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4), (1, 1), (1, 70000), (70000, 1)])
def test_extreme_shapes(device, shape):
    for p in (0.0, 0.3):
        args = inputs(*shape, device=device)
        suite.check_numerics(*both(p, dropout_seed=1), args, torch.ones(shape, device=device), slack_ulps=2)


def test_bad_arguments_are_named(device):
    x, bias, r = torch.randn(4, 8, device=device), torch.randn(8, device=device), torch.randn(4, 8, device=device)
    call, given = bias_dropout_add, functools.partial(bias_dropout_add, x, bias, r, 0.1)
    wrong = functools.partial(refuses, call)
    wrong(TypeError, "x must be a tensor, got list", [1.0], bias, r, 0.1)
    wrong(TypeError, "residual must be a tensor, got float", x, bias, 1.0, 0.1)
    wrong(ValueError, r"residual must have the shape of x, \[4, 8\], got \[1, 8\]", x, bias, r[:1], 0.1)
    wrong(ValueError, "residual is on meta", x, bias, r.to("meta"), 0.1)
    wrong(ValueError, r"bias must have shape \[8\].*got \[7\]", x, bias[:7], r, 0.1)
    for p in (-0.1, 1.1, float("nan")):
        wrong(ValueError, "dropout_p must be from 0 to 1, got", x, bias, r, p)
    for p in ("0.1", None, True):
        wrong(TypeError, "dropout_p must be a number", x, bias, r, p)
    for seed, error, message in (
        *((outside, ValueError, "must fit 64 bits") for outside in (2**64, -(2**63) - 1)),
        (1.0, TypeError, "must be None, an int or an int64 tensor, got float"),
        (torch.tensor([1], dtype=torch.int32, device=device), TypeError, "must be an int64 tensor, got torch.int32"),
        (torch.tensor([1, 2], device=device), ValueError, r"must have one element, got shape \[2\]"),
        (torch.empty(1, dtype=torch.int64, device="meta"), ValueError, "is on meta"),
    ):
        refuses(given, error, f"seed {message}", dropout_seed=seed)
    refuses(given, ValueError, "index_offset must be at least 0, got -1", index_offset=-1)
    refuses(given, TypeError, "index_offset must be an int, got float", index_offset=1.0)
    refuses(given, TypeError, "row_positions must be an int64 tensor or None, got list", row_positions=[0])
    with pytest.raises(ValueError, match=r"row_positions must have one element for each x\[t\] of x .*, got \[1\]"):
        given(row_positions=torch.zeros(1, dtype=torch.int64, device=device))


def test_direct_calls_of_the_op_cannot_read_out_of_bounds(device):
    x, seed = torch.randn(4, 8), torch.tensor([1])
    wrong, end = functools.partial(refused, RuntimeError), (0.1, seed, 0, None)
    wrong("bias_dropout_add: bias must have one element", raw_op, x, torch.randn(7), x, x.dtype, *end)
    wrong("bias_dropout_add: residual must have the shape", raw_op, x, None, x[:2], x.dtype, *end)
    wrong("bias_dropout_add: seed must be one int64 element", raw_op, x, None, x, x.dtype, 0.1, seed[:0], 0, None)
    positions = (*end[:3], torch.arange(3))
    wrong("bias_dropout_add: row_positions must be contiguous int64", raw_op, x, None, x, x.dtype, *positions)
    wrong("bias_dropout_add_: x must be contiguous", torch.ops.parallel_ops.bias_dropout_add_, x.t(), None, None, *end)
    nothing = "bias_dropout_add_backward: p = 0 drops nothing, so seed must be None"
    wrong(nothing, raw_backward, x, x.dtype, None, 0.0, seed, 0, None)


@pytest.mark.parametrize("size", [1, 5])
def test_the_stride_of_a_dimension_of_size_1_counts_for_nothing(device, size):
    """As of a transposed ``[1, 5, 64]``: contiguous, with the stride of one row at its end."""
    x, grad = (randn(1, size, 64, dtype=torch.float32, device=device, seed=seed).detach() for seed in (0, 1))
    results = []
    for f in (bias_dropout_add, bias_dropout_add_reference):
        wide = x.as_strided((64, size, 1), (size, 1, 64 * size)).requires_grad_()
        y = f(wide, None, None, 0.3, dropout_seed=3)
        (dx,) = torch.autograd.grad(y, wide, grad.as_strided((64, size, 1), (size, 1, 64 * size)))
        results.append((y, dx))
    torch.testing.assert_close(*results)
