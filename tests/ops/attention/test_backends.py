"""The choice of a backend, and torch's kernels behind ``flash_attention`` and a ring: on CPUs its own flash attention,
on the meta device the operators that a GPU would run."""

import itertools
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from parallel_ops import flash_attention
from parallel_ops.ops import flash_attention_reference
from parallel_ops.ops.attention import backends, block, torch_kernels
from parallel_ops.ops.attention.backends import Call, refusal, select
from parallel_ops.ops.attention.options import AttentionOptions
from support.numerics import suite
from support.numerics.suite import randn
from support.parallelism.context_parallel import Case, joined, oracle, shared
from support.transports.loopback import LoopbackGroup

HALF = (torch.float16, torch.bfloat16)
PLAIN = Call("cuda", 90, torch.bfloat16, 1, 128, 128, True)


def test_a_plain_call_goes_where_torch_would_take_it():
    for preferred in ("flash", "cudnn"):
        for causal, dtype, d in itertools.product((True, False), HALF, (8, 64, 128)):
            call = PLAIN._replace(causal=causal, dtype=dtype, d=d, d_v=d)
            assert select(call, preferred, deterministic=False, replaced=True) == preferred
            assert select(call, preferred, deterministic=True, replaced=True) == "triton"
    assert select(PLAIN, None, deterministic=False, replaced=True) == "triton"
    for capability, expected in ((80, "flash"), (89, "flash"), (90, "triton"), (100, "flash"), (120, "flash")):
        call = PLAIN._replace(capability=capability)
        assert select(call, "flash", deterministic=False, replaced=False) == expected
        assert select(call, "cudnn", deterministic=False, replaced=False) == "cudnn"


# What each takes: the change of a plain call, flash attention's answer and cuDNN's.
CHANGES = {
    "fp32": ({"dtype": torch.float32}, False, False),
    "fp64": ({"dtype": torch.float64}, False, False),
    "odd heads": ({"d": 100, "d_v": 100}, False, False),
    "wide heads": ({"d": 256, "d_v": 256}, True, False),
    "wider heads": ({"d": 264, "d_v": 264}, False, False),
    "wide heads, RTX 4090": ({"d": 256, "d_v": 256, "capability": 89}, False, False),
    "RTX 4090": ({"capability": 89}, True, True),
    "A100": ({"capability": 80}, True, True),
    "T4": ({"capability": 75}, False, False),
    "narrower values": ({"d_v": 64}, False, True),
    "latent attention": ({"d": 192}, False, False),
    "more keys, causal": ({"shifted": True}, False, False),
    "more keys": ({"shifted": True, "causal": False}, True, True),
    "a window": ({"window": True}, True, False),
    "a window that is not causal": ({"window": True, "causal": False}, False, False),
    "ranges": ({"ranges": True}, False, False),
    "documents": ({"documents": True}, True, False),
    "documents of a batch": ({"documents": True, "batch": 2}, False, False),
    "a batch": ({"batch": 2}, True, True),
    "a soft cap": ({"softcap": True}, False, False),
    "dropout": ({"dropout": True}, False, False),
    "a negative scale": ({"positive_scale": False}, False, False),
    "nothing": ({"empty": True}, False, False),
    "not aligned": ({"aligned": False}, False, False),
    "a CPU": ({"device": "cpu", "capability": 0}, True, False),
    "a CPU, fp64": ({"device": "cpu", "capability": 0, "dtype": torch.float64, "d": 7, "d_v": 7}, True, False),
    "a CPU, a window": ({"device": "cpu", "capability": 0, "window": True}, False, False),
    "a CPU, documents": ({"device": "cpu", "capability": 0, "documents": True}, False, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_who_takes_what(name):
    changes, *takes = CHANGES[name]
    call = PLAIN._replace(**changes)
    on_cuda = call.device == "cuda"
    assert (refusal("triton", call) is None) == on_cuda
    for backend, able in zip(("flash", "cudnn"), takes, strict=True):
        assert (refusal(backend, call) is None) == able, refusal(backend, call)
        narrowed = call.window or call.documents  # for which torch is not asked
        expected = ("flash" if takes[0] else "triton") if narrowed else backend if able else "triton"
        assert select(call, backend, deterministic=False, replaced=True) == (expected if on_cuda else "triton")
        if narrowed:
            assert select(call, backend, deterministic=False, replaced=False) == "triton"


@given(data=st.data())
def test_no_backend_is_chosen_that_refuses(data):
    flags = {name: data.draw(st.booleans()) for name in Call._fields[6:]}
    draw = {
        "device": ["cpu", "cuda"], "capability": [0, 75, 80, 86, 89, 90, 100, 103, 120], "batch": [1, 2],
        "dtype": [torch.float32, *HALF], "d": [1, 64, 128, 192, 256, 300], "d_v": [64, 128, 256],
    }  # fmt: skip
    call = Call(**{name: data.draw(st.sampled_from(values)) for name, values in draw.items()}, **flags)
    preferred = data.draw(st.sampled_from([None, "flash", "cudnn"]))
    chosen = select(call, preferred, deterministic=data.draw(st.booleans()), replaced=data.draw(st.booleans()))
    assert chosen == "triton" or refusal(chosen, call) is None
    assert chosen == "triton" or call.device == "cuda"


def test_bad_backends_are_named():
    q = torch.ones(4, 1, 2, 8)
    for options, named in (
        ({"backend": "fa2"}, "auto, triton, cudnn, flash, fa4, got 'fa2'"),
        ({"backend": "triton"}, "backend='triton' cannot do this call: q is on a CPU"),
        ({"backend": "cudnn"}, "needs a GPU"),
        ({"backend": "flash", "window_size": (1, 0)}, "neither windows nor cu_seqlens"),
        ({"backend": "flash", "softcap": 1.0}, "a soft cap"),
        ({"backend": "flash", "dropout_p": 0.1}, "dropout"),
        ({"backend": "flash", "softmax_scale": -1.0}, "a scale of 0 or less"),
    ):
        with pytest.raises(ValueError, match="flash_attention: backend") as raised:
            flash_attention(q, q, q, **options)
        assert named in str(raised.value)
    with pytest.raises(ValueError, match="sq different from sk"):
        flash_attention(q[:2], q, q, backend="flash")
    with pytest.raises(ValueError, match="values as wide as keys"):
        flash_attention(q, q, q[..., :4], backend="flash")
    assert flash_attention(q[:0], q, q, causal=False, backend="flash").shape == (0, 1, 2, 8)


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
            for mask, others in ((masked, q), (plain, k)):
                seen.clear()
                out, lse = torch_kernels.forward(backend, mask, q, others, others)
                torch_kernels.backward(backend, mask, out, q, others, others, out, lse)
                for call in seen[-2:]:
                    assert (call["is_causal"], call["scale"], call["dropout_p"]) == (mask.causal, 0.25, 0.0)
                    assert call["query"].shape[3] == 32 and call.get("attn_bias") is None
                    if "max_q" in call:
                        assert (call["max_q"], call["max_k"]) == (64, others.shape[0])
                        assert call.get("cum_seq_q") is None
                    if mask.left:
                        assert (call["window_size_left"], call["window_size_right"]) == (4, 0)
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


class OnCuda:
    """A tensor of a CPU that says it is on a GPU; what is made of it is not."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, tensor):
        self._tensor = tensor

    def __getattr__(self, name):
        return getattr(self._tensor, name)


def test_auto_asks_torch(monkeypatch):
    """With the arguments of the schema; on a CPU torch answers as on a GPU without cuDNN."""

    def chosen(t, backend="auto", **options):
        given = {"right": 0, "softmax_scale": 0.3, "backend": backend, **options}
        backends._chosen.clear()
        return backends.resolve(AttentionOptions(**given), *(OnCuda(x) for x in (t, t, t)))

    monkeypatch.setattr(backends, "_capability", lambda q: 80)
    half = torch.zeros(5, 1, 2, 16, dtype=torch.bfloat16)
    assert chosen(half) == "flash"
    assert chosen(half, backend="triton") == "triton" and chosen(half, backend="cudnn") == "cudnn"
    assert chosen(half, left=2) == chosen(half, softcap=1.0) == chosen(half, softmax_scale=-1.0) == "triton"
    assert chosen(half.float()) == chosen(half[:, :, :, :12]) == "triton"
    shifted = torch.zeros(161, dtype=torch.bfloat16)[1:].view(5, 1, 2, 16)
    strided = torch.zeros(5, 1, 2, 17, dtype=torch.bfloat16)[..., :16]
    assert chosen(shifted) == chosen(strided) == chosen(strided, backend="flash") == "triton"
    with sdpa_kernel(SDPBackend.MATH):
        assert chosen(half) == "triton"

    def none(*_, **__):
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "_fused_sdp_choice", none)
        assert chosen(half) == "triton"
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(half) == "triton" and chosen(half, backend="flash") == "flash"
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(backends, "_capability", lambda q: 90)
    assert chosen(half) == "triton"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3", raising=False)
    assert chosen(half) == chosen(half, left=2) == "flash"


@pytest.mark.skipif(backends._priorities is None, reason="this torch does not say what its choice depends on")
def test_torch_is_asked_again_when_its_answer_may_differ(monkeypatch):
    monkeypatch.setattr(backends, "_capability", lambda q: 80)
    half = torch.zeros(7, 1, 2, 16, dtype=torch.bfloat16)
    asked, ask = [], torch._fused_sdp_choice
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *a, **k: asked.append(None) or ask(*a, **k))

    def chosen(t=half, **options):
        given = AttentionOptions(**{"right": 0, "softmax_scale": 0.3, **options})
        return backends.resolve(given, *(OnCuda(x) for x in (t, t, t)))

    assert [chosen() for _ in range(3)] == ["flash"] * 3
    assert len(asked) == 1
    for _ in range(2):
        with sdpa_kernel(SDPBackend.MATH):
            assert chosen() == "triton"
        assert chosen() == "flash"
    assert len(asked) == 2
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        chosen()
    assert len(asked) == 3
    chosen(right=None)
    chosen(half[:6])
    assert len(asked) == 5
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen() == "triton"
    finally:
        torch.use_deterministic_algorithms(False)
    assert chosen() == "flash" and len(asked) == 5


def test_cudnn_is_refused_in_deterministic_mode(monkeypatch):
    monkeypatch.setattr(backends, "refusal", lambda *_: None)
    q = torch.ones(4, 1, 2, 8)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="its backward is not deterministic"):
            flash_attention(q, q, q, backend="cudnn")
    finally:
        torch.use_deterministic_algorithms(False)
