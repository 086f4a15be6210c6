import functools
import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import flash_attention
from parallel_ops.ops import flash_attention_reference
from parallel_ops.ops.attention.options import AttentionOptions
from parallel_ops.ops.attention.ranges import document_ranges
from support.numerics import suite
from support.numerics.suite import DEVICES, DTYPES, randn, refuses

pytestmark = pytest.mark.parametrize("device", DEVICES)
raw_op = torch.ops.parallel_ops.flash_attention.default


def inputs(sq, sk, b=1, heads=2, kv_heads=1, d=8, dtype=torch.float32, device="cpu", seed=0, spread=1.0, d_v=None):
    """q, k, v and a sink."""
    sizes = ((sq, b, heads, d), (sk, b, kv_heads, d), (sk, b, kv_heads, d_v or d), (heads,))
    return [randn(*s, dtype=dtype, device=device, seed=seed + i, scale=spread) for i, s in enumerate(sizes)]


def both(backend="auto", **options):
    """The op and its reference as functions of q, k, v and perhaps a sink."""

    def bind(function):
        return lambda q, k, v, sink=None: function(q, k, v, sink=sink, **options)

    return bind(functools.partial(flash_attention, backend=backend)), bind(flash_attention_reference)


OPTIONS = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window_size": (2, 0)},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.7},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 7},
    "documents": {"cu_seqlens": (0, 1, 1, 4, 5, 7)},
    "documents, not causal": {"cu_seqlens": (0, 0, 3, 7, 7), "causal": False},
    "all": {"window_size": (1, 0), "softcap": 3.0, "dropout_p": 0.2, "dropout_seed": 1, "cu_seqlens": (0, 5, 7)},
}


def option(name, device):
    options = dict(OPTIONS[name])
    if "cu_seqlens" in options:
        options["cu_seqlens"] = torch.tensor(options["cu_seqlens"], dtype=torch.int32, device=device)
    return options


every_option = pytest.mark.parametrize("name", OPTIONS)


WIDTHS = st.sampled_from([1, 7, 8, 33, 64, 80, 192])


@given(data=st.data(), dtype=st.sampled_from(DTYPES), d=WIDTHS, d_v=st.one_of(st.none(), WIDTHS))
def test_numerics_of_any_shape(device, data, dtype, d, d_v):
    """Lengths across strips, tiles and blocks of the kernels, in every combination of the options."""
    lengths = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 257, 300]))
    sk = data.draw(lengths)
    causal = data.draw(st.booleans())
    sq = data.draw(st.integers(1, sk) if causal else lengths)
    options = {"causal": causal, "softmax_scale": data.draw(st.sampled_from([None, 1.0, -0.3, 0.0]))}
    if data.draw(st.booleans()):
        options["window_size"] = data.draw(st.one_of(st.none(), st.tuples(*[st.integers(-1, 99)] * 2)))
    if data.draw(st.booleans()):
        sq = sk
        cuts = data.draw(st.lists(st.integers(0, sk), max_size=4))
        options["cu_seqlens"] = torch.tensor([0, *sorted(cuts), sk], device=device)
    options["softcap"] = data.draw(st.sampled_from([None, 3.0]))
    if data.draw(st.booleans()):
        options |= {
            "dropout_p": data.draw(st.sampled_from([0.1, 0.5, 1.0])),
            "dropout_seed": data.draw(st.integers(0, 2**63)),
        }
    kv_heads = data.draw(st.integers(1, 2))
    b, heads = data.draw(st.integers(1, 2)), kv_heads * data.draw(st.integers(1, 3))
    args = inputs(sq, sk, b, heads, kv_heads, d, dtype, device, d_v=d_v)
    check_numerics(options, args if data.draw(st.booleans()) else args[:3])


def check_numerics(options, args):
    """Error at most twice PyTorch's. Gradients of scores are differences of products with dout, which PyTorch computes
    both from the same numbers, so that they may cancel to nothing there; here, to the rounding of a product."""
    shape = *args[0].shape[:3], args[2].shape[3]
    grad = randn(*shape, dtype=args[0].dtype, device=args[0].device, seed=9).detach()
    op, reference = both(**options)
    true = suite.forward_backward(reference, suite.as_double(args), grad)
    widest = max(args[0].shape[-1], shape[-1])
    product = (16 * torch.finfo(torch.float32).eps + 2 * torch.finfo(grad.dtype).eps) * widest**0.5
    results = zip(
        suite.forward_backward(op, args, grad), suite.forward_backward(reference, args, grad), true, strict=True
    )
    for index, (got, peer, oracle) in enumerate(results):
        assert (got.shape, got.dtype) == (peer.shape, peer.dtype)
        largest = oracle.abs().max().item() if oracle.numel() else 0.0
        bound = 2 * suite.error(peer, oracle) + 2 * torch.finfo(got.dtype).eps * largest + product
        assert suite.error(got, oracle) <= bound, f"result {index}"


@every_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numerics_of_a_large_tensor(device, dtype, name):
    """Several blocks of keys and of queries, several heads a key. The slack is for the rounding of the logarithms of
    sums, which are some units large, to fp32: all probabilities of a row carry it in backward."""
    options = option(name, device)
    if "window_size" in options:
        options["window_size"] = (149, 0)
    if "cu_seqlens" in options:
        options["cu_seqlens"] = torch.tensor([0, 3, 3, 300, 309, 420], device=device)
    args = inputs(420, 420, heads=2, d=40, dtype=dtype, device=device, spread=1.5)
    grad = randn(*args[0].shape, dtype=dtype, device=device, seed=9).detach()
    if device == "cuda":  # the backward passes of cuDNN and FlashAttention add by atomics
        options["backend"] = "triton"
    suite.check_numerics(*both(**options), args, grad, slack_ulps=12 if dtype is torch.float32 else 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "d_v"), [(192, 128), (24, 70)])
def test_values_of_another_width(device, dtype, d, d_v):
    """192 and 128 as in DeepSeek's multi-head latent attention, all heads with keys of their own; few in parts."""
    for heads in (1, 4):
        args = inputs(330, 330, heads=heads, kv_heads=heads, d=d, d_v=d_v, dtype=dtype, device=device, spread=1.5)
        check_numerics({"window_size": (199, 0), "softcap": 20.0}, args)
        assert flash_attention(*args[:3]).shape == (330, 1, heads, d_v)


@every_option
def test_gradient_matches_finite_differences(device, name):
    op, _ = both(**option(name, device))
    suite.check_gradient(op, inputs(7, 7, d=3, device=device))
    suite.check_gradient(op, inputs(7, 7, d=3, d_v=2, device=device))


@every_option
def test_fp64_is_computed_in_fp64(device, name):
    args = inputs(7, 7, dtype=torch.float64, device=device, spread=3)
    op, reference = both(**option(name, device))
    for got, true in zip(suite.forward_backward(op, args), suite.forward_backward(reference, args), strict=True):
        torch.testing.assert_close(got, true, rtol=1e-13, atol=1e-13)


def test_custom_op_contract(device):
    q, k, v, sink = inputs(5, 7, device=device)
    plain = AttentionOptions(softmax_scale=0.3, right=0)
    suite.check_op(raw_op, [q, k, v, *plain])
    cu_seqlens, seed = torch.tensor([0, 3, 7], device=device), torch.tensor([3], device=device)
    q = inputs(7, 7, device=device)[0]
    suite.check_op(raw_op, [q, k, v, sink, cu_seqlens, None, seed, 0.3, 1, 0, 5.0, 0.5, 3])
    suite.check_op(raw_op, [q, k, v, *plain._replace(key_ranges=document_ranges(cu_seqlens))])
    suite.check_op(raw_op, [q, k, v[..., :5].detach().requires_grad_(), *plain])
    suite.check_second_derivative_raises(flash_attention, [q, k, v])


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (16, 16)])
def test_same_bits_on_every_run_and_thread_count(device, heads):
    """Few heads are split by their queries, and the parts' gradients of keys added."""
    args = inputs(400, 400, heads=heads[0], kv_heads=heads[1], d=16, device=device)
    suite.check_deterministic(both(dropout_p=0.1, dropout_seed=3)[0], args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(device, dtype):
    args = inputs(40, 40, b=2, d=16, dtype=dtype, device=device)
    # The backward passes of cuDNN and FlashAttention add by atomics.
    op = functools.partial(flash_attention, backend="triton") if device == "cuda" else flash_attention
    for index in range(3):
        suite.check_layouts(op, args[:3], index)


@pytest.mark.parametrize("name", ["causal", "all"])
def test_compiles_to_one_graph_for_all_sizes(device, name):
    options = option(name, device)
    options.pop("cu_seqlens", None)  # has one length
    cases = [inputs(s, s, d=d, device=device) for s, d in ((7, 8), (9, 12))]
    suite.check_compiles(both(**options)[0], cases)


def test_activation_checkpointing(device):
    """A seed that the op draws itself is drawn again."""
    suite.check_checkpointing(both(dropout_p=0.3)[0], inputs(9, 9, device=device))


def test_autocast(device):
    q, k, v, sink = inputs(9, 9, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = flash_attention(q, k.bfloat16(), v, sink=sink)
        assert flash_attention(q.double(), k.double(), v.double()).dtype is torch.float64
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), sink=sink))
    suite.check_compiles_under_autocast(flash_attention, [q, k, v])


def test_documents_are_separate_sequences(device):
    """One of a single token, one empty."""
    q, k, v, _ = (t.detach() for t in inputs(200, 200, device=device))
    edges = [0, 1, 1, 70, 150, 200]
    y = flash_attention(q, k, v, cu_seqlens=torch.tensor(edges, device=device))
    for start, end in itertools.pairwise(edges):
        if start < end:
            alone = flash_attention(q[start:end], k[start:end], v[start:end])
            torch.testing.assert_close(y[start:end], alone, rtol=1e-5, atol=1e-6)


def test_dropout_drops_what_it_says(device):
    """With equal scores and v of ones, the kept share of each row; the mask depends on the seed alone."""
    q, k = (torch.zeros(256, 2, 2, 8, device=device) for _ in range(2))
    v = torch.ones_like(k)
    run = functools.partial(flash_attention, q, k, v, causal=False, dropout_p=0.3)
    kept = run(dropout_seed=5) * 0.7
    assert (kept - 0.7).abs().max() < 6 * (0.21 / 256) ** 0.5
    assert (kept.mean() - 0.7).abs() < 5 * (0.21 / (256 * 256 * 4)) ** 0.5
    assert torch.equal(run(dropout_seed=5), run(dropout_seed=torch.tensor([5], device=device)))
    assert not torch.equal(run(dropout_seed=5), run(dropout_seed=6))
    torch.manual_seed(0)
    first = run()
    torch.manual_seed(0)
    assert torch.equal(first, run())


@pytest.mark.parametrize("shape", [(0, 0, 1), (0, 5, 1), (1, 1, 1), (3, 0, 1), (5, 5, 0), (1, 5000, 1)])
def test_extreme_shapes(device, shape):
    sq, sk, b = shape
    args = inputs(sq, sk, b, device=device)
    check_numerics({"causal": sq <= sk}, args)


def test_no_scores_in_memory(device):
    """32,768 tokens would have 4 GiB of scores."""
    if device == "cuda":
        pytest.skip("compiled code has no such tensor")
    q = torch.randn(32768, 1, 1, 8)
    with torch.profiler.profile(profile_memory=True) as profile:
        flash_attention(q, q, q, window_size=(63, 0))
    assert max(event.cpu_memory_usage for event in profile.key_averages()) < 64 << 20


def test_bad_arguments_are_named(device):
    q, k, v, sink = (t.detach() for t in inputs(4, 6, device=device))
    bad = [
        (TypeError, "q must be a tensor, got list", ([1.0], k, v), {}),
        (TypeError, "k must be float32", (q, k.long(), v), {}),
        (TypeError, "v is torch.float16, but q is torch.float32", (q, k, v.half()), {}),
        (ValueError, r"k must be \[s, b, h, d\] \(tensor_format='sbhd'\), got \[6, 8\]", (q, k[:, 0, 0], v), {}),
        (ValueError, "k must have the batch 1 and the d 8 of q", (q, k[..., :4], v), {}),
        (ValueError, r"v must have the shape of k, \[6, 1, 1, 8\], but for d", (q, k, v[:3]), {}),
        (ValueError, "the last dimension of v must be at least 1", (q, k, v[..., :0]), {}),
        (ValueError, "k has 3 heads, which do not divide the 2 heads of q", (q, *[k.expand(6, 1, 3, 8)] * 2), {}),
        (ValueError, "q has 6 queries for the 4 keys", (k.expand(6, 1, 2, 8), q, q), {}),
        (TypeError, "causal must be a bool", (q, k, v), {"causal": 1}),
        (TypeError, "softmax_scale must be a Python float", (q, k, v), {"softmax_scale": "1"}),
        (ValueError, "softmax_scale must be finite", (q, k, v), {"softmax_scale": float("inf")}),
        (
            TypeError,
            r"a causal window of 2 tokens, the query's own included, is \(1, 0\)",
            (q, k, v),
            {"window_size": 2},
        ),
        (TypeError, "window_size must be a pair of ints", (q, k, v), {"window_size": (2.0, 0)}),
        (ValueError, "window_size must be at least 0, or -1", (q, k, v), {"window_size": (-2, 0)}),
        (TypeError, "sink must be a tensor", (q, k, v), {"sink": 0.0}),
        (ValueError, r"sink must have shape \[2\]", (q, k, v), {"sink": sink[:1]}),
        (TypeError, "softcap must be a Python float or None", (q, k, v), {"softcap": True}),
        (ValueError, "softcap must be finite and above 0", (q, k, v), {"softcap": 0.0}),
        (TypeError, "dropout_p must be a number", (q, k, v), {"dropout_p": "0.1"}),
        (ValueError, "dropout_p must be from 0 to 1", (q, k, v), {"dropout_p": 1.5}),
        (ValueError, "seed must fit 64 bits", (q, k, v), {"dropout_p": 0.5, "dropout_seed": 2**64}),
        (TypeError, "cu_seqlens must be an int32 or int64 tensor", (q, k, v), {"cu_seqlens": [0, 4]}),
        (ValueError, "cu_seqlens must have shape", (q, k, v), {"cu_seqlens": torch.zeros(1, dtype=torch.int64)}),
        (ValueError, "cu_seqlens needs as many queries as keys", (q, k, v), {"cu_seqlens": torch.tensor([0, 6])}),
    ]
    for error, message, args, options in bad:
        given = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
        refuses(flash_attention, error, message, *args, **given)


@pytest.mark.parametrize("bounds", [[0, 3, 7], [0, 5, 2, 9], [0, 3, 20], [2, 3, 9], [-1, 3, 9]])
def test_documents_of_other_tokens_are_named(device, bounds):
    """As of a batch without its padding, or lengths that were not summed."""
    if device == "cuda":
        pytest.skip("the host would wait for their values")
    q, k, v, _ = (t.detach() for t in inputs(9, 9))
    documents = torch.tensor(bounds)
    message = rf"cu_seqlens must rise from 0 to 9, the tokens of q, got {re.escape(str(bounds))}"
    refuses(flash_attention, ValueError, message, q, k, v, cu_seqlens=documents)
    flash_attention(q, k, v, cu_seqlens=documents.copy_(torch.linspace(0, 9, len(bounds))))
