"""vocab_parallel_linear_cross_entropy, alone and over gloo groups of 2, 3 and 4 ranks."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_ops import linear_cross_entropy, vocab_parallel_linear_cross_entropy
from parallel_ops.tensor_parallel.loss.linear_cross_entropy import linear_cross_entropy_reference
from support.numerics import suite, vocab_parallel
from support.numerics.suite import DEVICES, DTYPES, refused
from support.numerics.vocab_parallel import inputs, sharded_linear_cross_entropy
from support.ranks.distributed import Raised, ranks

devices = pytest.mark.parametrize("device", DEVICES)
raw_op = torch.ops.parallel_ops.vocab_parallel_linear_cross_entropy.default
OPTIONS = [{}, {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0}, {"reduction": "none"}, {"reduction": "sum"}]
# Matmuls over thousands of columns add them in an order that the BLAS chooses by the size of the chunk, and each
# rank's matmul is rounded to the dtype before the ranks' matmuls are added.
PRODUCT = 12
options_of_any_kind = st.fixed_dictionaries(
    {
        "label_smoothing": st.sampled_from([0.0, 0.1]),
        "z_loss": st.sampled_from([0.0, 1e-2]),
        "softcap": st.sampled_from([None, 4.0]),
        "reduction": st.sampled_from(["none", "mean", "sum"]),
    }
)


def positional(op, **options):
    """``op`` with the bias as its fourth argument, so that the checks differentiate it."""
    return lambda hidden, weight, target, bias=None: op(hidden, weight, target, bias=bias, **options)


@devices
@given(
    shape=st.sampled_from([(1,), (7,), (3, 4), (2, 1, 3)]),
    vocab=st.sampled_from([1, 13, 300, 4100]),
    dtype=st.sampled_from(DTYPES),
    options=options_of_any_kind,
    chunk_rows=st.sampled_from([0.5, 1, 3, 100]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_numerics_of_every_option(device, shape, vocab, dtype, options, chunk_rows, bias, seed):
    args = inputs(shape, 16, vocab, dtype=dtype, device=device, seed=seed, bias=bias)
    size = max(1, int(chunk_rows * vocab * dtype.itemsize))
    ours = positional(vocab_parallel_linear_cross_entropy, chunk_bytes=size, **options)
    suite.check_numerics(ours, positional(linear_cross_entropy_reference, **options), args, slack_ulps=PRODUCT)


def class_weights(vocab, device="cpu"):
    return torch.rand(vocab, generator=torch.Generator().manual_seed(5)).to(device) + 0.1


@devices
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunk_rows", [2, 100])
def test_class_weights(device, options, chunk_rows):
    args = inputs((3, 4), 16, 300, dtype=torch.bfloat16, device=device)
    weights = class_weights(300, device)
    ours = positional(
        vocab_parallel_linear_cross_entropy, class_weight=weights, chunk_bytes=chunk_rows * 600, **options
    )
    reference = positional(linear_cross_entropy_reference, class_weight=weights, **options)
    suite.check_numerics(ours, reference, args, slack_ulps=PRODUCT)


@devices
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_statistics_of_rows(device, reduction):
    h, w, target, _ = inputs((9,), 16, 40, device=device)
    target[:4] = (h @ w.t()).argmax(-1)[:4]
    for size in (320, None):
        loss, statistics = vocab_parallel_linear_cross_entropy(
            h, w, target, reduction=reduction, return_statistics=True, chunk_bytes=size
        )
        torch.testing.assert_close(statistics.logsumexp, (h @ w.t()).logsumexp(-1).detach())
        assert torch.equal(statistics.correct, (h @ w.t()).argmax(-1) == target) and statistics.correct.any()
        plain = vocab_parallel_linear_cross_entropy(h, w, target, reduction=reduction, chunk_bytes=size)
        torch.testing.assert_close(loss, plain, rtol=0, atol=0)
        for a, b in zip(*(torch.autograd.grad(y.sum(), (h, w)) for y in (loss, plain)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"label_smoothing": 0.1}], ids=str)
def test_class_weights_and_statistics_over_a_group(options):
    """Of both losses; the whole on one rank is what the shards make together."""
    h, w, target, _ = inputs((7,), 8, 90, bias=False)
    h, w, weights = h.detach(), w.detach(), class_weights(90)
    whole = suite.forward_backward(
        positional(vocab_parallel_linear_cross_entropy, class_weight=weights, **options),
        [h.requires_grad_(), w.requires_grad_(), target],
    )
    _, statistics = vocab_parallel_linear_cross_entropy(h, w, target, class_weight=weights, return_statistics=True)
    of_ranks = ranks(2).run(vocab_parallel.weighted, h.detach(), w.detach(), target, weights, options)
    for by_rank in zip(*of_ranks, strict=True):
        losses, dh, dw, logsumexp, correct = zip(*by_rank, strict=True)
        for one in (0, 1):
            torch.testing.assert_close(losses[one], whole[0])
            torch.testing.assert_close(dh[one], whole[1])
            torch.testing.assert_close(logsumexp[one], statistics.logsumexp)
            assert torch.equal(correct[one], statistics.correct)
        torch.testing.assert_close(torch.cat(dw), whole[2])


@pytest.mark.parametrize("shards", [2, 3, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@settings(max_examples=10)
@given(
    shape=st.sampled_from([(12,), (12, 2)]),
    vocab=st.sampled_from([5, 64, 1030]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    options=options_of_any_kind,
    chunk_bytes=st.sampled_from([1, 5000, None]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_numerics_over_a_group(shards, sequence_parallel, shape, vocab, dtype, options, chunk_bytes, bias, seed):
    args = inputs(shape, 8, vocab, dtype=dtype, seed=seed, bias=bias)
    ours = sharded_linear_cross_entropy(shards, sequence_parallel=sequence_parallel, chunk_bytes=chunk_bytes, **options)
    suite.check_numerics(ours, positional(linear_cross_entropy_reference, **options), args, slack_ulps=PRODUCT)


@devices
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_matches_finite_differences(device, options):
    args = inputs((3, 2), 4, 5, dtype=torch.float64, device=device)
    ours = positional(vocab_parallel_linear_cross_entropy, chunk_bytes=80, **options)
    suite.check_gradient(lambda h, w, b: ours(h, w, args[2], b), [args[0], args[1], args[3]])


@devices
@pytest.mark.parametrize("per_row", [False, True])
def test_custom_op_contract(device, per_row):
    h, w, target, bias = inputs((3, 2), 4, 5, device=device)
    options = [0.1, 0.01, 3.0, -100, False, 0 if per_row else 1, None, 1, 100]
    suite.check_op(raw_op, [h, w, bias, target, None, *options, [True, True, True]])
    weight = torch.rand(5, device=device)
    suite.check_op(raw_op, [h.detach(), w, None, target, weight, *options, [False, True, False]])
    reduction = "none" if per_row else "mean"
    ours = positional(vocab_parallel_linear_cross_entropy, reduction=reduction)
    suite.check_second_derivative_raises(ours, [h, w, target])


@devices
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_on_one_device_by_its_own_name(device, options):
    args = inputs((20,), 8, 30, device=device)
    ours, expected = (
        suite.forward_backward(positional(op, chunk_bytes=600, **options), args)
        for op in (linear_cross_entropy, vocab_parallel_linear_cross_entropy)
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    hidden, weight, target, _ = args
    with pytest.raises(ValueError, match=r"^linear_cross_entropy: weight must have shape \[V, 8\]"):
        linear_cross_entropy(hidden, weight.t(), target, **options)
    with pytest.raises(ValueError, match=r"^linear_cross_entropy: z_loss must be a finite number"):
        linear_cross_entropy(hidden, weight, target, z_loss=-1.0)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"^linear_cross_entropy: target 30 in row 0 is outside the vocabulary"):
            linear_cross_entropy(hidden, weight, torch.full_like(target, 30), **options)


@devices
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_same_bits_on_every_run(device, options):
    args = inputs((64,), 32, 500, device=device)
    ours = positional(vocab_parallel_linear_cross_entropy, chunk_bytes=20000, **options)
    first, second = (suite.forward_backward(ours, args) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@devices
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_compiles_to_one_graph_for_all_sizes(device, options):
    ours = positional(vocab_parallel_linear_cross_entropy, **options)
    cases = [inputs((n, 3), h, v, device=device, ignored=0.5) for n, h, v in ((4, 8, 9), (6, 10, 7))]
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for args in cases:
        for a, b in zip(suite.forward_backward(ours, args), suite.forward_backward(compiled, args), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_compiles_to_one_graph_over_a_group(options):
    h, w, target, _ = (None if t is None else t.detach() for t in inputs((6,), 4, 9))
    for pairs in ranks(2).run(vocab_parallel.compiled_linear, h, w, target, options):
        for eager, compiled in zip(*pairs, strict=True):
            torch.testing.assert_close(eager, compiled, rtol=1e-6, atol=1e-6)


@devices
def test_activation_checkpointing(device):
    h, w, target, _ = inputs((6,), 8, 11, device=device)
    suite.check_checkpointing(positional(vocab_parallel_linear_cross_entropy), [h, w, target])


@devices
def test_autocast_runs_in_the_autocast_dtype(device):
    h, w, target, bias = inputs((6,), 8, 11, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = vocab_parallel_linear_cross_entropy(h.bfloat16(), w, target, bias=bias)
    expected = vocab_parallel_linear_cross_entropy(h.bfloat16(), w.bfloat16(), target, bias=bias.bfloat16())
    assert loss.dtype is torch.float32 and torch.equal(loss, expected)
    loss.backward()
    assert w.grad.dtype is torch.float32 and bias.grad.dtype is torch.float32


@devices
def test_the_logits_never_exist(device):
    """No tensor of the op is as large as a quarter of the logits."""
    h, w, target, _ = inputs((512,), 16, 2048, device=device)
    largest = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    with Sizes():
        vocab_parallel_linear_cross_entropy(h, w, target, chunk_bytes=64 * 2048 * 4).backward()
    assert max(largest) <= 512 * 2048 // 4


@devices
def test_weight_gradient_does_not_lose_late_chunks(device):
    """4,096 rows a chunk each: summed in bf16, the gradient would stop growing at 256 times a row's."""
    h = torch.ones(4096, 1, dtype=torch.bfloat16, device=device)
    w = torch.zeros(2, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    target = torch.zeros(4096, dtype=torch.long, device=device)
    vocab_parallel_linear_cross_entropy(h, w, target, reduction="sum", chunk_bytes=1).backward()
    assert w.grad.flatten().tolist() == [-2048.0, 2048.0]


@devices
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_edges(device, reduction):
    op = positional(vocab_parallel_linear_cross_entropy, reduction=reduction, label_smoothing=0.1)
    for shape in ((0,), (3,)):
        h, w, target, bias = inputs(shape, 4, 6, device=device, ignored=2.0)  # all ignored
        for value in suite.forward_backward(op, [h, w, target, bias]):
            assert (value == 0).all()
    h, w, target, bias = inputs((5,), 4, 6, device=device)
    padded = F.pad(w.detach(), (0, 0, 0, 3)).requires_grad_()
    absent = F.pad(bias.detach(), (0, 3), value=-torch.inf).requires_grad_()
    plain, masked = (
        suite.forward_backward(op, [h, w, target, bias]),
        suite.forward_backward(op, [h, padded, target, absent]),
    )
    torch.testing.assert_close(plain[0], masked[0])
    torch.testing.assert_close(plain[2], masked[2][:6])
    assert (masked[2][6:] == 0).all()
    with torch.no_grad():
        torch.testing.assert_close(op(h, w, target, bias), plain[0])


@devices
def test_frozen_parts_get_no_gradient(device):
    h, w, target, bias = inputs((5,), 4, 6, device=device)
    for reduction in ("none", "sum"):
        expected = suite.forward_backward(
            positional(vocab_parallel_linear_cross_entropy, reduction=reduction), [h, w, target, bias]
        )
        for index, frozen in enumerate(
            ([h, w.detach(), target, bias.detach()], [h.detach(), w, target, bias.detach()])
        ):
            got = suite.forward_backward(positional(vocab_parallel_linear_cross_entropy, reduction=reduction), frozen)
            torch.testing.assert_close(got[1], expected[1 + index])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_disagreement_raises_on_every_rank(sequence_parallel):
    outcomes = ranks(2).outcomes(vocab_parallel.mismatched_hidden, sequence_parallel)
    assert all(isinstance(o, Raised) and o.type == "ValueError" for o in outcomes), outcomes


@devices
def test_bad_arguments_are_named(device):
    h, w, target, bias = (t.detach() for t in inputs((4,), 8, 6, device=device, ignored=0))
    op = functools.partial(vocab_parallel_linear_cross_entropy)
    refused(ValueError, r"weight must have shape \[V, 8\].*got \[6, 7\]", op, h, w[:, :7], target)
    refused(TypeError, r"weight is torch.bfloat16, but hidden is torch.float32", op, h, w.bfloat16(), target)
    refused(ValueError, r"bias must have shape \[6\].*got \[5\]", op, h, w, target, bias=bias[:5])
    refused(ValueError, r"target must have shape \[4\].*got \[3\]", op, h, w, target[:3])
    with pytest.raises(ValueError, match=r"class_weight must have shape \[6\], one element for each row.*got \[8\]"):
        op(h, w, target, class_weight=h[0])
    refused(ValueError, r"weight is on meta", op, h, w.to("meta"), target)
    refused(ValueError, r"chunk_bytes must be at least 1, got 0", op, h, w, target, chunk_bytes=0)
    refused(ValueError, r"reduction must be", op, h, w, target, reduction="max")
    if device == "cpu":
        with pytest.raises(ValueError, match=r"target 6 in row 1 is outside the vocabulary \[0, 6\)"):
            op(h, w, torch.tensor([0, 6, 1, 2]))
