"""The choice of a backend of ``flash_attention``."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from parallel_ops import flash_attention
from parallel_ops.ops.attention import backends
from parallel_ops.ops.attention.backends import Call, refusal, select
from parallel_ops.ops.attention.options import AttentionOptions
from support.numerics.suite import refuses

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
    refuses(flash_attention, ValueError, "sq different from sk", q[:2], q, q, backend="flash")
    refuses(flash_attention, ValueError, "values as wide as keys", q, q, q[..., :4], backend="flash")
    assert flash_attention(q[:0], q, q, causal=False, backend="flash").shape == (0, 1, 2, 8)


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
        refuses(flash_attention, ValueError, "its backward is not deterministic", q, q, q, backend="cudnn")
    finally:
        torch.use_deterministic_algorithms(False)
