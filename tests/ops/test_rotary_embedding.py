import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import rotary_embedding, rotary_embedding_qk
from parallel_ops._internal.tensor_format import from_sbhd, to_sbhd
from parallel_ops.ops import rotary_embedding_reference
from support.numerics import suite
from support.numerics.suite import DEVICES, DTYPES, angles, randn, refuses

pytestmark = pytest.mark.parametrize("device", DEVICES)
interleavings = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
raw_op = torch.ops.parallel_ops.rotary_embedding.default
sizes = st.integers(1, 5)


def positional(f, **kwargs):
    """``f`` with the positions as its fourth positional argument, which the suite passes through."""
    return lambda x, cos, sin, positions=None: f(x, cos, sin, positions=positions, **kwargs)


def check(args, grad, interleaved, slack_ulps=1):
    op, reference = (positional(f, interleaved=interleaved) for f in (rotary_embedding, rotary_embedding_reference))
    suite.check_numerics(op, reference, args, grad, slack_ulps=slack_ulps)


@given(
    shape=st.one_of(st.tuples(sizes, sizes, sizes), st.tuples(sizes, sizes)),
    half=st.sampled_from([1, 3, 16, 40, 64]),
    rest=st.sampled_from([0, 1, 16, 48]),
    dtype=st.sampled_from(DTYPES),
    interleaved=st.booleans(),
    positions=st.sampled_from(["none", "one a row", "one a token"]),
    narrow_angles=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_numerics_of_any_shape(device, shape, half, rest, dtype, interleaved, positions, narrow_angles, seed):
    shape = (*shape, 2 * half + rest)
    x = randn(*shape, dtype=dtype, device=device, seed=seed)
    grad = randn(*shape, dtype=dtype, device=device, seed=seed + 1).detach()
    p = None
    if positions != "none":
        rows = shape[:1] if positions == "one a row" else shape[:-2]
        p = torch.randint(0, 100, rows, generator=torch.Generator().manual_seed(seed)).to(device)
    cos, sin = angles(100, half, dtype=dtype if narrow_angles else torch.float32, device=device)
    check([x, cos, sin, p], grad, interleaved)


@interleavings
def test_custom_op_contract_of_q_and_k_and_in_place(device, interleaved):
    x, cos_sin = randn(3, 2, 2, 10, dtype=torch.float32, device=device), angles(5, 4, device=device)
    suite.check_op(
        raw_op, [x.transpose(0, 1).detach(), x[:, :, :1].transpose(0, 1), *cos_sin, None, None, interleaved, True]
    )
    cu_seqlens = torch.tensor([0, 2, 3], device=device)
    suite.check_op(raw_op, [x[:, 0], x[:, 1], *cos_sin, None, cu_seqlens, interleaved, False])
    inplace = torch.ops.parallel_ops.rotary_embedding_.default
    suite.check_op(inplace, [x.detach().clone(), None, *cos_sin, None, None, interleaved])


@interleavings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_of_angles_and_positions(device, dtype, interleaved):
    x, cos_sin = randn(4, 3, 2, 40, dtype=dtype, device=device), angles(4, 16, device=device)
    op = positional(rotary_embedding, interleaved=interleaved)
    expected = op(x, *cos_sin)
    for cos, sin in zip(*(suite.layouts(t).values() for t in cos_sin), strict=True):
        assert torch.equal(op(x, cos, sin), expected)
    positions = torch.arange(4, device=device)
    for spread in (positions.repeat_interleave(2)[::2], positions[:, None].expand(4, 3)):
        assert torch.equal(op(x, *cos_sin, spread), expected)


@interleavings
@pytest.mark.parametrize("tensor_format", ["sbhd", "bhsd", "bshd"])
def test_q_and_k_in_one_call(device, tensor_format, interleaved):
    """Also in place; k has fewer heads, and the gradient of either may be missing."""
    q, k = (randn(5, 3, h, 20, dtype=torch.float32, device=device, seed=h) for h in (4, 2))
    cos_sin = angles(5, 8, device=device)
    rotate = functools.partial(rotary_embedding, interleaved=interleaved)
    expected = [suite.forward_backward(rotate, [x, *cos_sin]) for x in (q, k)]
    leaves = [x.detach().clone().requires_grad_() for x in (q, k)]
    given = [from_sbhd(x, tensor_format).contiguous() for x in leaves]
    both = functools.partial(
        rotary_embedding_qk, cos=cos_sin[0], sin=cos_sin[1], interleaved=interleaved, tensor_format=tensor_format
    )
    views = [x * 1 for x in given]
    for y in (both(*given), both(*views, inplace=True)):
        back = [to_sbhd(t, tensor_format) for t in y]
        grads = torch.autograd.grad(back, leaves, [torch.ones_like(t) for t in back])
        for got, gradient, (true, true_gradient) in zip(back, grads, expected, strict=True):
            assert torch.equal(got, true) and torch.equal(gradient, true_gradient)
    assert all(y.is_contiguous() for y in both(*given)) or tensor_format == "bshd"
    assert [a.data_ptr() for a in y] == [v.data_ptr() for v in views], "in place made a copy"
    (of_k,) = torch.autograd.grad(both(*given)[1].sum(), leaves[1])
    torch.testing.assert_close(of_k, expected[1][1], rtol=0, atol=0)


@interleavings
def test_tables_of_others(device, interleaved):
    """Angles twice in a row, as Megatron and Transformers have them; and a row for each token."""
    x, (cos, sin) = randn(4, 3, 2, 20, dtype=torch.bfloat16, device=device), angles(9, 8, device=device)
    expected = rotary_embedding(x, cos, sin, interleaved=interleaved)
    twice = [t.repeat_interleave(2, -1) if interleaved else torch.cat([t, t], -1) for t in (cos, sin)]
    assert torch.equal(rotary_embedding(x, *twice, interleaved=interleaved, doubled=True), expected)
    positions = torch.randint(0, 9, (4, 3), generator=torch.Generator().manual_seed(0)).to(device)
    expected = rotary_embedding(x, cos, sin, interleaved=interleaved, positions=positions)
    by_token = [t[positions] for t in (cos, sin)]
    assert torch.equal(rotary_embedding(x, *by_token, interleaved=interleaved), expected)
    first = [t.transpose(0, 1).contiguous() for t in by_token]
    heads_first = rotary_embedding(x.permute(1, 2, 0, 3), *first, interleaved=interleaved, tensor_format="bhsd")
    assert torch.equal(heads_first.permute(2, 0, 1, 3), expected)


@interleavings
def test_angles_themselves(device, interleaved):
    """As Megatron-LM has them: ``[s, 1, 1, R]``, each angle twice."""
    x = randn(4, 3, 2, 20, dtype=torch.bfloat16, device=device)
    freqs = torch.rand(4, 8, device=device) * 100
    expected = rotary_embedding(x, freqs.cos(), freqs.sin(), interleaved=interleaved)
    twice = freqs.repeat_interleave(2, -1) if interleaved else torch.cat([freqs, freqs], -1)
    megatron = rotary_embedding(x, twice[:, None, None], doubled=True, interleaved=interleaved)
    assert torch.equal(megatron, expected)
    assert torch.equal(rotary_embedding(x, freqs, interleaved=interleaved), expected)
    check([x, freqs.double(), None], None, interleaved)
    with pytest.raises(ValueError, match=r"cos must be \[positions, R / 2\]"):
        rotary_embedding(x, twice[:, None, None].expand(4, 1, 2, 16), doubled=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences(device, dtype):
    x, cos_sin = randn(9, 2, 16, dtype=torch.float32, device=device), angles(5, 8, device=device)
    cu_seqlens = torch.tensor([0, 3, 3, 8, 9], dtype=dtype, device=device)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0], device=device)
    ours = suite.forward_backward(functools.partial(rotary_embedding, cu_seqlens=cu_seqlens), [x, *cos_sin])
    expected = suite.forward_backward(functools.partial(rotary_embedding, positions=positions), [x, *cos_sin])
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    if device == "cpu":
        with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to 9, got \[0, 3, 8\]"):
            rotary_embedding(x, *cos_sin, cu_seqlens=cu_seqlens[[0, 1, 3]])
        with pytest.raises(ValueError, match=r"cos has 4 rows, but a sequence has 5 tokens"):
            rotary_embedding(x, *(t[:4] for t in cos_sin), cu_seqlens=cu_seqlens)


def test_in_place_is_declared(device):
    x, cos_sin = randn(3, 2, 2, 8, dtype=torch.float32, device=device), angles(3, 4, device=device)
    refuses(rotary_embedding, ValueError, "x is a leaf that requires a gradient", x, *cos_sin, inplace=True)
    with pytest.raises(ValueError, match=r"x is expanded, so it cannot be written in place"):
        rotary_embedding(x.detach()[:1].expand(3, 2, 2, 8), *cos_sin, inplace=True)
    saved = x.exp()  # exp saves its output
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rotary_embedding(saved, *cos_sin, inplace=True).sum().backward()


@interleavings
def test_special_values_stay_in_their_pair_and_pass_through(device, interleaved):
    x = torch.ones(1, 1, 1, 10, device=device)
    x[..., 1], x[..., 8], x[..., 9] = torch.nan, torch.inf, -0.0
    y = rotary_embedding(x, *angles(1, 4, device=device), interleaved=interleaved)[0, 0, 0]
    assert y.isnan().nonzero().flatten().tolist() == ([0, 1] if interleaved else [1, 5])
    assert y[8] == torch.inf and torch.signbit(y[9])


@pytest.mark.parametrize("shape", [(0, 2, 2, 8), (3, 0, 2, 8), (0, 2, 8), (3, 2, 0, 8), (3, 2, 1, 0), (1, 1, 1, 2)])
def test_extreme_shapes(device, shape):
    x = randn(*shape, dtype=torch.float32, device=device)
    check([x, *angles(3, shape[-1] // 2, device=device)], torch.ones(shape, device=device), False)


def test_nothing_is_rotated_without_angles(device):
    x = randn(3, 2, 2, 8, dtype=torch.float32, device=device)
    assert torch.equal(rotary_embedding(x, *angles(3, 0, device=device)), x)


def test_bad_arguments_are_named(device):
    x, (cos, sin) = torch.randn(3, 2, 2, 8, device=device), angles(5, 4, device=device)
    call = functools.partial(rotary_embedding, x, cos, sin)
    wrong = functools.partial(refuses, rotary_embedding)
    wrong(TypeError, "x must be a tensor, got list", [1.0], cos, sin)
    with pytest.raises(
        ValueError, match=r"x must be \[s, b, h, d\] \(tensor_format='sbhd'\) or packed \[t, h, d\], got \[2, 8\]"
    ):
        rotary_embedding(x[0, 0], cos, sin)
    with pytest.raises(TypeError, match=r"cos must be float32 or the dtype of x, torch.float32, got torch.float16"):
        rotary_embedding(x, cos.half(), sin.half())
    wrong(ValueError, r"cos must be \[positions, R / 2\] with R at most 6.*got \[5, 4\]", x[..., :6], cos, sin)
    wrong(ValueError, r"sin must be like cos, \[5, 4\].*got \[4, 4\]", x, cos, sin[:4])
    wrong(ValueError, "sin is on meta", x, cos, sin.to("meta"))
    wrong(ValueError, "cos requires a gradient", x, cos.clone().requires_grad_(), sin)
    refuses(call, ValueError, "tensor_format must be one of sbhd, bshd, bhsd, got 'hbsd'", tensor_format="hbsd")
    with pytest.raises(ValueError, match=r"x must be \[b, s, h, d\] \(tensor_format='bshd'\), got \[2, 2, 8\]"):
        rotary_embedding(x[0], cos, sin, tensor_format="bshd")
    with pytest.raises(ValueError, match=r"x has 7 positions in \[s, b, h, d\].*the shape fits tensor_format='bshd'"):
        rotary_embedding(torch.randn(7, 3, 2, 8, device=device), cos, sin)
    refuses(rotary_embedding_qk, ValueError, "k must be like q but for its heads", x, x[:2], cos, sin)
    refuses(rotary_embedding_qk, TypeError, "k is torch.bfloat16, but q is torch.float32", x, x.bfloat16(), cos, sin)
    with pytest.raises(ValueError, match=r"cu_seqlens must be \[sequences \+ 1\], for packed"):
        call(cu_seqlens=torch.tensor([0, 3], device=device))
    with pytest.raises(ValueError, match=r"positions, cu_seqlens and angles for each token exclude each other"):
        call(positions=torch.zeros(3, dtype=torch.int64), cu_seqlens=torch.tensor([0, 3]))
    wrong(ValueError, "cos has 2 rows, but x has 3 positions", x, cos[:2], sin[:2])
    with pytest.raises(TypeError, match=r"positions must be an int64 tensor, got torch.int32"):
        call(positions=torch.zeros(3, dtype=torch.int32, device=device))
    refuses(call, TypeError, "positions must be an int64 tensor, got list", positions=[0, 1, 2])
    with pytest.raises(ValueError, match=r"positions must have shape \[3\] or \[3, 2\], got \[2\]"):
        call(positions=torch.zeros(2, dtype=torch.int64, device=device))


def test_positions_out_of_range(device):
    x, cos_sin = torch.randn(3, 2, 2, 8, device=device), angles(5, 4, device=device)
    for bad in (-1, 5):
        positions = torch.tensor([0, bad, 1], device=device)
        if device == "cpu":
            with pytest.raises(ValueError, match=r"positions run from -?\d to \d, but cos has 5 rows"):
                rotary_embedding(x, *cos_sin, positions=positions)
            with pytest.raises(RuntimeError, match=rf"positions holds {bad}, but cos has 5 rows"):
                raw_op(x, None, *cos_sin, positions, None, False, False)
        else:
            y = rotary_embedding(x, *cos_sin, positions=positions)
            assert y[1].isnan().all() and y[::2].isfinite().all()


def test_direct_calls_of_the_op_cannot_read_out_of_bounds(device):
    x, (cos, sin) = torch.randn(3, 2, 2, 8), angles(5, 4)
    with pytest.raises(RuntimeError, match="cos must have at most half as many columns"):
        raw_op(x[..., :6], None, cos, sin, None, None, False, False)
    wrong = functools.partial(refuses, raw_op)
    wrong(RuntimeError, "x holds 2, but cos has 2 rows", x, None, cos[:2], sin[:2], None, None, False, False)
    with pytest.raises(RuntimeError, match=r"positions must be \[s\]"):
        raw_op(x, None, cos, sin, torch.zeros(2, dtype=torch.int64), None, False, False)
