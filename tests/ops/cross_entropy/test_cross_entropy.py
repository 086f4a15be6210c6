"""cross_entropy, which is also vocab_parallel_cross_entropy without a group, and its local kernels."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import vocab_parallel_cross_entropy
from support.numerics import suite
from support.numerics.suite import DEVICES, DTYPES, randn, refused
from support.numerics.vocab_parallel import pair, targets

pytestmark = pytest.mark.parametrize("device", DEVICES)
ops = torch.ops.parallel_ops
OPTIONS = [{}, {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0}, {"reduction": "none"}, {"reduction": "sum"}]


@given(
    shape=suite.shapes(max_cols=9000),
    dtype=st.sampled_from(DTYPES),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    softcap=st.sampled_from([None, 4.0]),
    reduction=st.sampled_from(["none", "mean", "sum"]),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 1000),
)
def test_numerics_of_any_shape(device, shape, dtype, label_smoothing, z_loss, softcap, reduction, scale, seed):
    logits = randn(*shape, dtype=dtype, device=device, seed=seed, scale=scale)
    target = targets(shape[:-1], shape[-1], device, seed)
    grad = torch.randn(shape[:-1], generator=torch.Generator().manual_seed(seed + 2)).to(device)
    op, reference = pair(label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, reduction=reduction)
    suite.check_numerics(op, reference, [logits, target], grad if reduction == "none" else None, slack_ulps=4)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numerics_of_long_rows(device, dtype, options):
    logits, target = randn(20, 33000, dtype=dtype, device=device, scale=3), targets((20,), 33000, device)
    op, reference = pair(**options)
    suite.check_numerics(op, reference, [logits, target], slack_ulps=2)
    suite.check_numerics(op, reference, [logits[:3].detach().requires_grad_(), target[:3]], slack_ulps=2)


@pytest.mark.parametrize("scale", [1e-3, 3e3])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_very_small_and_very_large_logits(device, scale, softcap):
    logits, target = randn(40, 700, dtype=torch.float32, device=device, scale=scale), targets((40,), 700, device)
    op, reference = pair(softcap=softcap, reduction="none")
    suite.check_numerics(op, reference, [logits, target], slack_ulps=2)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_matches_finite_differences(device, options):
    logits, target = randn(3, 2, 5, dtype=torch.float64, device=device), targets((3, 2), 5, device)
    suite.check_gradient(lambda x: vocab_parallel_cross_entropy(x, target, **options), [logits])


def test_custom_op_contract(device):
    x, target = randn(3, 2, 5, dtype=torch.float32, device=device), targets((3, 2), 5, device)
    for eps, softcap, weight in ((0.0, 0.0, None), (0.1, 3.0, torch.rand(5, device=device))):
        options = [eps, 0.1, softcap, -100, False]
        for logits in (x, x.detach().transpose(0, 1).contiguous().transpose(0, 1)):
            for reduction in range(3):
                suite.check_op(ops.cross_entropy.default, [logits, target, weight, *options, reduction, False])
        raw, options = x.detach(), [*options, 0]
        statistics = [raw, target.flatten(), weight, 0, 5, *options]
        suite.check_op(ops.cross_entropy_statistics.default, statistics)
        partial, column = ops.cross_entropy_statistics(*statistics)
        suite.check_op(ops.cross_entropy_combine.default, [partial[None], column, *options])
        _, saved = ops.cross_entropy_combine(partial[None], column, *options)
        backward = [torch.rand(3, 2, device=device), raw, weight, column, saved, None, *options, torch.empty_like(raw)]
        suite.check_op(ops.cross_entropy_backward.default, backward)
    suite.check_second_derivative_raises(vocab_parallel_cross_entropy, [x, target])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_same_bits_on_every_run_and_thread_count(device, options):
    for rows, cols in ((3, 40000), (90, 1100), (40000, 3)):
        logits, target = randn(rows, cols, dtype=torch.float32, device=device), targets((rows,), cols, device)
        suite.check_deterministic(functools.partial(vocab_parallel_cross_entropy, **options), [logits, target])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(device, dtype):
    logits, target = randn(4, 3, 1030, dtype=dtype, device=device), targets((4, 3), 1030, device)
    op = functools.partial(vocab_parallel_cross_entropy, reduction="none")
    expected = suite.forward_backward(op, [logits, target])
    for layout in suite.layouts(logits).values():
        for inplace in (False, True):
            got = suite.forward_backward(functools.partial(op, inplace_backward=inplace), [layout.clone(), target])
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    grad = torch.randn(4, 3, device=device)
    expected = suite.forward_backward(op, [logits, target], grad)
    for layout in suite.layouts(grad).values():
        got = suite.forward_backward(op, [logits, target.mT.contiguous().mT], layout.detach())
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize(
    ("options", "backend"),
    [*((options, "aot_eager") for options in OPTIONS), ({"reduction": "none"}, "inductor")],
    ids=str,
)
def test_compiles_to_one_graph_for_all_sizes(device, options, backend):
    """Some targets are ignored: a peer's loss is silently wrong there.

    Inductor's case is that of ops that write over an input, as ``bias_gelu``'s is of all others. The input comes from a
    matmul: for other arithmetic Inductor compiles C++, 20 s on fresh caches.
    """

    def op(x, t, one):
        return vocab_parallel_cross_entropy(x @ one, t, inplace_backward=True, **options)

    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend=backend)
    for n, v in ((4, 8), (6, 10)):
        args = [randn(n, 3, v, dtype=torch.float32, device=device), targets((n, 3), v, device, ignored=0.5)]
        args.append(torch.eye(v, device=device))
        for a, b in zip(suite.forward_backward(op, args), suite.forward_backward(compiled, args), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_activation_checkpointing(device):
    args = [randn(6, 8, dtype=torch.float32, device=device), targets((6,), 8, device)]
    suite.check_checkpointing(vocab_parallel_cross_entropy, args)


def test_autocast_gives_the_same(device):
    logits, target = randn(6, 8, dtype=torch.bfloat16, device=device), targets((6,), 8, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = vocab_parallel_cross_entropy(logits, target)
    assert loss.dtype is torch.float32 and torch.equal(loss, vocab_parallel_cross_entropy(logits, target))
    suite.check_compiles_under_autocast(
        functools.partial(vocab_parallel_cross_entropy, reduction="none"), [logits, target]
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_over_the_logits(device, options):
    x, target = randn(6, 1030, dtype=torch.float32, device=device), targets((6,), 1030, device)
    logits = x * 1
    loss = vocab_parallel_cross_entropy(logits, target, inplace_backward=True, **options)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient.data_ptr() == logits.data_ptr(), "a copy was made"
    expected = suite.forward_backward(functools.partial(vocab_parallel_cross_entropy, **options), [x, target])[1]
    assert torch.equal(gradient, expected)


def test_gradient_over_the_logits_is_declared(device):
    x, target = randn(6, 8, dtype=torch.float32, device=device), targets((6,), 8, device)
    again = vocab_parallel_cross_entropy(x * 1, target, inplace_backward=True)
    again.backward(retain_graph=True)
    refused(RuntimeError, "modified by an inplace operation", again.backward)
    logits = x.exp()  # exp saves its output
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        vocab_parallel_cross_entropy(logits, target, inplace_backward=True).backward()
    logits = x * 1
    twice = [vocab_parallel_cross_entropy(logits, target, inplace_backward=True) for _ in range(2)]
    refused(RuntimeError, "modified by an inplace operation", sum(twice).backward)


def test_nothing_but_the_logits_is_saved(device):
    x, target = randn(64, 1000, dtype=torch.bfloat16, device=device), targets((64,), 1000, device)
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        vocab_parallel_cross_entropy(x, target, reduction="none")
    assert sum(t.nbytes for t in saved if t.data_ptr() != x.data_ptr()) <= 64 * 20 + 4
    assert any(t.data_ptr() == x.data_ptr() for t in saved)


def weights(vocab, device="cpu"):
    return (0.2 + torch.rand(vocab, generator=torch.Generator().manual_seed(3))).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_class_weights(device, dtype, label_smoothing):
    """Those of F.cross_entropy, with smoothing and a mean that divides by the weights of the targets."""
    logits, target = randn(40, 1500, dtype=dtype, device=device, scale=3), targets((40,), 1500, device)
    for options in ({}, {"reduction": "sum", "z_loss": 0.1}, {"reduction": "none", "softcap": 4.0}):
        op, reference = pair(class_weight=weights(1500, device), label_smoothing=label_smoothing, **options)
        suite.check_numerics(op, reference, [logits, target], slack_ulps=4)


def test_class_weights_of_fp64_logits(device):
    """Options are not rounded to fp32 on the way."""
    logits, target = randn(3, 2, 5, dtype=torch.float64, device=device), targets((3, 2), 5, device)
    options = {"class_weight": weights(5, device).double(), "label_smoothing": 0.1, "z_loss": 0.3, "softcap": 2.1}
    suite.check_gradient(lambda x: vocab_parallel_cross_entropy(x, target, **options), [logits])
    op, reference = pair(**options)
    suite.check_numerics(op, reference, [logits, target], slack_ulps=4)


def test_statistics_of_rows(device):
    logits, target = randn(3, 40, 90, dtype=torch.float32, device=device), targets((3, 40), 90, device)
    with torch.no_grad():
        logits[0, torch.arange(40), target[0].clamp(min=0)] += 9.0
    loss, statistics = vocab_parallel_cross_entropy(logits, target, softcap=20.0, return_statistics=True)
    z = 20 * torch.tanh(logits.detach() / 20)
    torch.testing.assert_close(statistics.logsumexp, z.logsumexp(-1))
    assert torch.equal(statistics.correct, z.argmax(-1) == target) and statistics.correct.any()
    assert torch.equal(loss, vocab_parallel_cross_entropy(logits, target, softcap=20.0))
    assert not statistics.logsumexp.requires_grad
