"""Log-probabilities, entropies and KL divergences from hidden states: alone and over gloo groups of 2 and 4 ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import (
    linear_kl_divergence,
    linear_log_probs,
    vocab_parallel_linear_kl_divergence,
    vocab_parallel_linear_log_probs,
)
from parallel_ops.tensor_parallel.loss.kl_divergence import linear_kl_divergence_reference
from parallel_ops.tensor_parallel.loss.log_probs import linear_log_probs_reference
from support.numerics import log_probs as on_rank
from support.numerics import suite
from support.numerics.suite import DEVICES, DTYPES, randn
from support.numerics.vocab_parallel import inputs, sizes_of
from support.ranks.distributed import Raised, ranks

devices = pytest.mark.parametrize("device", DEVICES)
# As in test_linear_cross_entropy.py: the BLAS adds in an order that it chooses by the size of the chunk.
PRODUCT = 12


def both(op, **options):
    """Log-probability and entropy as one tensor, the bias as fourth argument, so that the checks differentiate them."""
    return lambda hidden, weight, tokens, bias=None: torch.stack(op(hidden, weight, tokens, bias=bias, **options))


@devices
@given(
    shape=st.sampled_from([(1,), (7,), (3, 4), (2, 1, 3)]),
    vocab=st.sampled_from([1, 13, 300, 4100]),
    dtype=st.sampled_from(DTYPES),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    chunk_rows=st.sampled_from([0.5, 1, 3, 100]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_numerics_of_any_shape(device, shape, vocab, dtype, temperature, chunk_rows, bias, seed):
    args = inputs(shape, 16, vocab, dtype=dtype, device=device, seed=seed, bias=bias)
    options = {"temperature": temperature, "chunk_bytes": max(1, int(chunk_rows * vocab * dtype.itemsize))}
    grad = randn(2, *shape, dtype=torch.float32, seed=seed + 3).detach().to(device)
    reference = both(linear_log_probs_reference, temperature=temperature)
    suite.check_numerics(both(linear_log_probs, **options), reference, args, grad, slack_ulps=PRODUCT)


@devices
@pytest.mark.parametrize("which", [0, 1])
def test_gradients_of_each_result_are_finite_differences(device, which):
    h, w, tokens, bias = inputs((2, 3), 4, 5, dtype=torch.float64, device=device)

    def result(h, w, bias):
        return linear_log_probs(h, w, tokens, bias=bias, temperature=0.7, chunk_bytes=100)[which]

    suite.check_gradient(result, [h, w, bias])


@devices
def test_without_entropy_the_log_probs_have_the_same_bits(device):
    args = inputs((20,), 8, 30, device=device)
    one = suite.forward_backward(lambda *a: linear_log_probs(*a[:3], bias=a[3], entropy=False).log_probs, args)
    two = suite.forward_backward(lambda *a: linear_log_probs(*a[:3], bias=a[3]).log_probs, args)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert linear_log_probs(*args[:3], entropy=False).entropy is None


@devices
def test_no_rows(device):
    h, w, tokens, bias = inputs((0, 2), 8, 30, device=device)
    teacher = torch.randn(0, 2, 30, device=device)
    for op in (both(linear_log_probs), lambda h, w, _, bias: linear_kl_divergence(h, w, teacher, bias=bias)):
        y, *grads = suite.forward_backward(op, [h, w, tokens, bias])
        assert y.shape[-2:] == (0, 2)
        assert not any(grad.any() for grad in grads)


@devices
def test_ignored_tokens_and_absent_columns(device):
    h, w, tokens, bias = inputs((12,), 8, 30, device=device)
    bias = torch.where(torch.arange(30, device=device) >= 25, -torch.inf, bias.detach()).requires_grad_()
    tokens = tokens.clamp(max=24)
    tokens[:3] = -100
    ours, expected = (
        suite.forward_backward(both(op), [h, w, tokens, bias])
        for op in (linear_log_probs, lambda h, w, t, bias: linear_log_probs(h, w[:25], t, bias=bias[:25]))
    )
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert a.isfinite().all()
    assert (ours[0][:, :3] == 0).all() and (ours[1][:3] == 0).all()


@devices
def test_memory_is_that_of_a_chunk(device):
    """Nothing of the size of the logits is saved."""
    h, w, tokens, _ = inputs((64,), 8, 500, device=device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        linear_log_probs(h, w, tokens, chunk_bytes=4000)
        linear_kl_divergence(h, w, torch.randn(64, 3, device=device), teacher_weight=torch.randn(500, 3, device=device))
    assert sum(t.nbytes for t in saved) < 4 * h.nbytes + 3 * w.nbytes


@devices
def test_bits_and_graphs(device):
    args = inputs((64,), 32, 500, device=device)
    ours = both(linear_log_probs, chunk_bytes=20000)
    suite.check_checkpointing(ours, args)
    first, second = (suite.forward_backward(ours, args) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, hidden, vocab in ((4, 8, 9), (6, 10, 7)):
        args = inputs((n, 3), hidden, vocab, device=device)
        for a, b in zip(suite.forward_backward(ours, args), suite.forward_backward(compiled, args), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@devices
def test_autocast_and_second_derivatives(device):
    h, w, tokens, _ = inputs((6,), 8, 9, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        result = linear_log_probs(h, w, tokens)
    half = linear_log_probs(h.bfloat16(), w.bfloat16(), tokens)
    assert torch.equal(result.log_probs, half.log_probs) and result.log_probs.dtype is torch.float32
    suite.check_second_derivative_raises(lambda h, w: linear_log_probs(h, w, tokens).log_probs, [h, w])


def test_bad_arguments_are_named():
    h, w, t = torch.randn(4, 8), torch.randn(9, 8), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^linear_log_probs: token 9 in row 0 is outside the vocabulary \[0, 9\)"):
        linear_log_probs(h, w, torch.full((4,), 9))
    with pytest.raises(ValueError, match=r"^linear_log_probs: tokens must have shape \[4\]"):
        linear_log_probs(h, w, t[:3])
    with pytest.raises(ValueError, match=r"temperature must be a finite number above 0, got 0.0"):
        vocab_parallel_linear_log_probs(h, w, t, temperature=0.0)
    with pytest.raises(ValueError, match=r"teacher must have shape \[..., 9\]"):
        linear_kl_divergence(h, w, torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"teacher must have the rows of hidden, \[4\], got \[3, 9\]"):
        linear_kl_divergence(h, w, torch.randn(3, 9))
    with pytest.raises(ValueError, match=r"teacher_weight must have shape \[9, 5\].*got \[8, 5\]"):
        linear_kl_divergence(h, w, torch.randn(4, 5), teacher_weight=torch.randn(8, 5))
    with pytest.raises(ValueError, match=r"^linear_kl_divergence: teacher requires a gradient"):
        linear_kl_divergence(h, w, torch.randn(4, 9, requires_grad=True))


@devices
@given(
    vocab=st.sampled_from([1, 13, 300, 4100]),
    rows=st.sampled_from([1, 5, 10]),
    dtype=st.sampled_from(DTYPES),
    of_logits=st.booleans(),
    temperature=st.sampled_from([1.0, 2.0]),
    chunk_rows=st.sampled_from([1, 2, 3, 100]),
    seed=st.integers(0, 1000),
)
def test_numerics_of_distillation(device, vocab, rows, dtype, of_logits, temperature, chunk_rows, seed):
    h, w, _, bias = inputs((rows,), 16, vocab, dtype=dtype, device=device, seed=seed)
    teacher = randn(rows, vocab if of_logits else 7, dtype=dtype, device=device, seed=seed + 5, scale=2).detach()
    weight = None if of_logits else randn(vocab, 7, dtype=dtype, device=device, seed=seed + 6).detach()
    grad = randn(rows, dtype=torch.float32, seed=seed + 3).detach().to(device)

    def run(op, **options):
        def call(h, w, bias):
            # The oracle runs in fp64.
            of_teacher, of_weight = (t if t is None else t.to(h.dtype) for t in (teacher, weight))
            return op(h, w, of_teacher, teacher_weight=of_weight, bias=bias, temperature=temperature, **options)

        return call

    ours = run(linear_kl_divergence, chunk_bytes=chunk_rows * vocab * dtype.itemsize)
    # Both terms of a log q - log p are rounded before they are subtracted.
    suite.check_numerics(ours, run(linear_kl_divergence_reference), [h, w, bias], grad, slack_ulps=4 * PRODUCT)


@devices
def test_gradient_of_distillation_is_finite_differences(device):
    h, w, _, bias = inputs((2, 3), 4, 5, dtype=torch.float64, device=device)
    teacher, weight = torch.randn(2, 3, 6, device=device).double(), torch.randn(5, 6, device=device).double()

    def loss(h, w, bias):
        return linear_kl_divergence(
            h, w, teacher, teacher_weight=weight, bias=bias, temperature=1.5, chunk_bytes=100
        )  # fmt: skip

    suite.check_gradient(loss, [h, w, bias])


@pytest.mark.parametrize(("size", "options"), [(2, {}), (2, {"sequence_parallel": True}), (4, {"temperature": 0.6})])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sharded_log_probs_are_those_of_one_process(size, options, dtype):
    h, w, tokens, bias = inputs((8, 2), 6, 23, dtype=dtype)
    for grads in (
        torch.randn(2, 8, 2).double(),
        [torch.randn(8, 2).double(), None],
        [None, torch.randn(8, 2).double()],
    ):
        sizes, given = sizes_of(23, size), [None if g is None else g.to(torch.float64) for g in grads]
        results = ranks(size).run(on_rank.log_probs, h, w, bias, tokens, given, sizes, {"chunk_bytes": 90, **options})
        lp, entropy, dh, dw, db = zip(*results, strict=True)
        assert all(torch.equal(lp[0], each) for each in lp) and all(torch.equal(entropy[0], each) for each in entropy)
        leaves = [t.detach().double().requires_grad_() for t in (h, w, bias)]
        temperature = options.get("temperature", 1.0)
        expected = linear_log_probs_reference(leaves[0], leaves[1], tokens, bias=leaves[2], temperature=temperature)
        sum((value * g).sum() for value, g in zip(expected, given, strict=True) if g is not None).backward()
        whole = torch.cat(dh) if "sequence_parallel" in options else dh[0]
        got = [lp[0], entropy[0], whole, torch.cat(dw), torch.cat(db)]
        close = {"rtol": 1e-9, "atol": 1e-9} if dtype is torch.float64 else {"rtol": 4e-2, "atol": 8e-2}
        for a, b in zip(got, [*(e.detach() for e in expected), *(t.grad for t in leaves)], strict=True):
            torch.testing.assert_close(a.double(), b, **close)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("of_logits", [False, True])
def test_sharded_distillation_is_that_of_one_process(size, of_logits):
    h, w, _, _ = inputs((9,), 6, 23, dtype=torch.float64)
    teacher = torch.randn(9, 23 if of_logits else 5).double()
    weight = None if of_logits else torch.randn(23, 5).double()
    grad, options = torch.randn(9).double(), {"temperature": 1.3, "chunk_bytes": 200}
    results = ranks(size).run(on_rank.kl_divergence, h, w, teacher, weight, grad, sizes_of(23, size), options)
    loss, dh, dw = zip(*results, strict=True)
    assert all(torch.equal(loss[0], each) for each in loss)
    leaves = [t.detach().clone().requires_grad_() for t in (h, w)]
    expected = linear_kl_divergence_reference(*leaves, teacher, teacher_weight=weight, temperature=1.3)
    expected.backward(grad)
    for a, b in zip([loss[0], dh[0], torch.cat(dw)], [expected.detach(), *(t.grad for t in leaves)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_ranks_that_disagree_all_raise():
    for op in ("log_probs", "kl_divergence"):
        for outcome in ranks(2).outcomes(on_rank.differing, op):
            assert isinstance(outcome, Raised) and f"vocab_parallel_linear_{op}: the ranks" in outcome.message
    for outcome in ranks(2).outcomes(on_rank.wrong_token, 1):
        assert isinstance(outcome, Raised) and "target 10 in row 2 (on rank 1) is outside" in outcome.message


def test_custom_op_contract():
    h, w, tokens, bias = inputs((3, 2), 4, 5)
    ops = torch.ops.parallel_ops
    suite.check_op(
        ops.vocab_parallel_linear_log_probs.default, [h, w, bias, tokens, 0.7, True, -100, None, 1, 60, [True] * 3]
    )
    teacher, weight = torch.randn(3, 2, 5), None
    suite.check_op(
        ops.vocab_parallel_linear_kl_divergence.default, [h, w, bias, teacher, weight, 1.5, None, 1, 60, [True] * 3]
    )
    assert vocab_parallel_linear_kl_divergence(h, w, teacher).shape == (3, 2)
