"""Torch's kernels behind ``flash_attention`` and a ring.

On CPUs its own flash attention, on the meta device the operators that a GPU would run.
"""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import flash_attention
from parallel_ops.ops import flash_attention_reference
from parallel_ops.ops.attention import block, torch_kernels
from parallel_ops.ops.attention.options import AttentionOptions
from support.numerics import suite
from support.numerics.suite import randn
from support.parallelism.context_parallel import Case, joined, oracle, shared
from support.transports.loopback import LoopbackGroup

HALF = (torch.float16, torch.bfloat16)


class TestTorchsKernelsOnACpu:
    """The way of a GPU's calls through torch's kernels, with those of a CPU."""

    @given(data=st.data(), dtype=st.sampled_from([torch.float64, torch.float32, *HALF]))
    def test_numerics(self, data, dtype):
        causal, with_sink = data.draw(st.booleans()), data.draw(st.booleans())
        sk = data.draw(st.integers(1, 70))
        sq = sk if causal else data.draw(st.integers(1, 70))
        kv_heads, b, d = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.sampled_from([3, 64]))
        heads = kv_heads * data.draw(st.integers(1, 3))
        sizes = [(sq, b, heads, d), (sk, b, kv_heads, d), (sk, b, kv_heads, d), (heads,)]
        args = [randn(*s, dtype=dtype, seed=i) for i, s in enumerate(sizes[: 4 if with_sink else 3])]
        grad = randn(sq, b, heads, d, dtype=dtype, seed=9).detach()
        options = {"causal": causal, "softmax_scale": data.draw(st.sampled_from([None, 0.7]))}

        def results(function, args, **more):
            return suite.forward_backward(
                lambda q, k, v, sink=None: function(q, k, v, sink=sink, **options, **more), args, grad
            )

        # Differences of products with the gradient may cancel in PyTorch's arithmetic, here to a product's rounding.
        product = (16 * torch.finfo(torch.float32).eps + 8 * torch.finfo(dtype).eps) * d**0.5
        true, peer = (results(flash_attention_reference, a) for a in (suite.as_double(args), args))
        for got, other, oracle_of in zip(results(flash_attention, args, backend="flash"), peer, true, strict=True):
            assert (got.shape, got.dtype) == (other.shape, other.dtype)
            largest = oracle_of.abs().max().item()
            bound = 2 * suite.error(other, oracle_of) + 8 * torch.finfo(got.dtype).eps * largest + product
            assert suite.error(got, oracle_of) <= bound

    def test_it_is_torchs_kernel_that_runs_forward_and_backward(self, monkeypatch, caplog):
        ran = []
        for name in ("forward", "backward"):
            kernel = getattr(torch_kernels, name)
            monkeypatch.setattr(
                torch_kernels, name, lambda *a, _k=kernel, _n=name, **o: (ran.append((_n, a[0])), _k(*a, **o))[1]
            )
        q = randn(5, 1, 2, 8, dtype=torch.float32)
        with caplog.at_level(logging.DEBUG, "parallel_ops.attention"):
            flash_attention(q, q, q, backend="flash").sum().backward()
        assert ran == [("forward", "flash"), ("backward", "flash")]
        assert [r.getMessage().split(" for ")[0] for r in caplog.records] == ["flash: flash"] * 2
        flash_attention(q, q, q).sum().backward()
        assert len(ran) == 2

    def test_layouts_and_compilation(self):
        q, k, v = randn(6, 2, 9, 8, dtype=torch.float32, seed=1).detach().split([3, 3, 3], 2)
        expected = flash_attention(*(t.contiguous() for t in (q, k, v)), backend="flash")
        assert torch.equal(flash_attention(q, k, v, backend="flash"), expected)
        compiled = torch.compile(lambda *a: flash_attention(*a, backend="flash"), backend="aot_eager", fullgraph=True)
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        assert torch.equal(compiled(*inputs), expected)
        compiled(*inputs).square().sum().backward()
        ours = [t.clone().requires_grad_() for t in (q, k, v)]
        flash_attention(*ours, backend="flash").square().sum().backward()
        for a, b in zip(inputs, ours, strict=True):
            assert torch.equal(a.grad, b.grad)
        options = AttentionOptions(softmax_scale=0.3, right=0, backend="flash")
        torch.library.opcheck(torch.ops.parallel_ops.flash_attention.default, (*ours, *options))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("way", [{}, {"all_gather": True}, {"ulysses_degree": 2}])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"sink": True}], ids=str)
def test_a_ring_of_torchs_blocks(layout, way, options, monkeypatch):
    """In fp64, where both must be exact; where the blocks are eligible they are torch's."""
    blocks = []
    kernel = torch_kernels.forward
    monkeypatch.setattr(torch_kernels, "forward", lambda *a: (blocks.append(a[0]), kernel(*a))[1])
    case = Case(24, heads=4, kv_heads=2, layout=layout, backend="flash", **way, **options)
    tensors = case.tensors()
    run = LoopbackGroup(4, seed=3).run(lambda transport: shared(case, transport, tensors))
    for got, want in zip(joined(case, run), oracle(case, tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    # Queries of a zigzag strip over all keys before them are shifted.
    shifted = case.all_gather and case.causal and layout == "zigzag"
    assert bool(blocks) != shifted


def test_a_ring_of_torchs_blocks_in_16_bits():
    """Each block is rounded: the error stays that of one rounding, for 2 ranks and for 16."""
    errors = []
    for size in (2, 16):
        case = Case(256, heads=2, kv_heads=1, backend="flash")
        low = case.tensors(torch.bfloat16)
        true = oracle(case, low)
        run = LoopbackGroup(size).run(lambda transport, case=case, low=low: shared(case, transport, low))
        errors.append(suite.error(joined(case, run)[0].double(), true[0]) / true[0].abs().max().item())
    assert max(errors) < 0.02 and errors[1] < 2 * errors[0]


PLAIN_CALLS = ({}, {"causal": False, "sk": 96})


CALLS = {
    "cudnn": PLAIN_CALLS,
    "flash": (*PLAIN_CALLS, {"left": 15}, {"documents": True}, {"documents": True, "left": 8}),
}


class TestArgumentsOfTheOperators:
    """On the meta device torch checks the schema and gives shapes: what a GPU would return."""

    @pytest.mark.parametrize(("backend", "options"), [(b, o) for b, options in CALLS.items() for o in options], ids=str)
    @pytest.mark.parametrize("b", [1, 2])
    def test_shapes(self, backend, options, b):
        documents, sk, causal = options.get("documents"), options.get("sk", 64), options.get("causal", True)
        if documents and b > 1:
            pytest.skip("documents have a batch of 1")
        q, k, v = (torch.empty(s, b, h, 32, dtype=HALF[1], device="meta") for s, h in ((64, 4), (sk, 2), (sk, 2)))
        bounds = torch.empty(4, dtype=torch.int32, device="meta") if documents else None
        right = 0 if causal else None
        given = AttentionOptions(cu_seqlens=bounds, softmax_scale=0.1, left=options.get("left"), right=right)
        out, lse = torch_kernels.forward(backend, given, q, k, v)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (b, 4, 64), torch.float32)
        assert out.is_contiguous(), "another copy"
        gradients = torch_kernels.backward(backend, given, torch.empty_like(q), q, k, v, out, lse)
        assert [(t.shape, t.dtype) for t in gradients] == [(t.shape, t.dtype) for t in (q, k, v)]

    def test_every_argument_is_where_the_schema_has_it(self, monkeypatch):
        """Bound by name, so that an argument in another's place shows."""
        seen = []

        class Operators:
            def __getattr__(self, name):
                op = getattr(torch.ops.aten, name).default

                def call(*args, **kwargs):
                    names = [a.name for a in op._schema.arguments]
                    seen.append({**dict(zip(names, args, strict=False)), **kwargs})
                    return op(*args, **kwargs)

                return call

        monkeypatch.setattr(torch_kernels, "_aten", Operators())
        q, k = (torch.empty(s, 1, 4, 32, dtype=HALF[1], device="meta") for s in (64, 96))
        torch_kernels._cudnn_dims()
        for backend in ("cudnn", "flash"):
            plain = AttentionOptions(softmax_scale=0.25)
            masked = plain._replace(right=0, left=4 if backend == "flash" else None)
            # As wide as all keys, so a plain call: a limit to the right would make it causal.
            wide = plain._replace(left=100)
            for mask, others in ((masked, q), (plain, k), (wide, k)):
                seen.clear()
                out, lse = torch_kernels.forward(backend, mask, q, others, others)
                torch_kernels.backward(backend, mask, out, q, others, others, out, lse)
                for call in seen[-2:]:
                    assert (call["is_causal"], call["scale"], call["dropout_p"]) == (mask.causal, 0.25, 0.0)
                    assert call["query"].shape[3] == 32 and call.get("attn_bias") is None
                    if "max_q" in call:
                        assert (call["max_q"], call["max_k"]) == (64, others.shape[0])
                        assert call.get("cum_seq_q") is None
                    if "max_q" in call and backend == "flash":
                        window = call.get("window_size_left"), call.get("window_size_right")
                        assert window == (mask.left, mask.right if mask.left else None)
                assert seen[-2].get("compute_log_sumexp", True) and not seen[-2]["return_debug_mask"]


@given(data=st.data(), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_merged_blocks_are_the_whole(data, dtype):
    """Blocks in any order, and a sink, against the softmax of all."""
    parts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    q, k, v = (randn(s, 2, 3, 4, dtype=dtype, seed=i).detach() for i, s in enumerate((5, sum(parts), sum(parts))))
    sink = randn(3, dtype=dtype, seed=7).detach() if data.draw(st.booleans()) else None
    out, statistics = torch.full_like(q, torch.nan), q.new_full((2, 2, 3, 5), torch.nan)
    if sink is not None:
        block.begin_carry(out, statistics, sink)
    for n, (ks, vs) in enumerate(zip(k.split(parts), v.split(parts), strict=True)):
        theirs = torch_kernels.forward("flash", AttentionOptions(softmax_scale=0.5), q, ks, vs)
        block.merge_block(*theirs, out=out, statistics=statistics, merge=n > 0 or sink is not None)
    want = flash_attention_reference(q.double(), k.double(), v.double(), causal=False, softmax_scale=0.5, sink=sink)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-12 if dtype is torch.float64 else 1e-5)
