"""flash-attn-4 behind ``flash_attention``, and the calls for which ``auto`` takes another library's kernels."""

import ast
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import flash_attention
from parallel_ops.ops import flash_attention_reference
from parallel_ops.ops.attention import backends, fa4, torch_kernels
from parallel_ops.ops.attention.allow_list import ALLOWED
from parallel_ops.ops.attention.options import attention_options
from parallel_ops.ops.attention.refusals import Call, refusal
from support.integrations import flash_attn_4
from support.numerics import suite
from support.numerics.suite import randn

PLAIN = Call("cuda", 100, torch.bfloat16, 1, 128, 128, True)
# Where `make venv` unpacks the wheel; its package needs a GPU's libraries to be imported.
SOURCE = Path(sys.prefix, "flash-attn-4", "flash_attn", "cute", "interface.py")


@pytest.fixture(autouse=True)
def version(monkeypatch):
    monkeypatch.setattr(fa4, "installed", lambda: (4, 0, 0, 36))
    monkeypatch.setattr(fa4, "_interface", lambda: flash_attn_4)


def chosen(call, *, deterministic=False, flash=True):
    return backends.listed(call, deterministic=deterministic, flash=flash)


def test_the_rows_that_auto_takes(monkeypatch):
    assert chosen(PLAIN) == chosen(PLAIN, deterministic=True) == "fa4"
    assert chosen(PLAIN._replace(window=True, documents=True)) == "fa4"
    assert chosen(PLAIN._replace(d=192)) == "fa4" and chosen(PLAIN._replace(d=192, window=True)) is None
    hopper = PLAIN._replace(capability=90)
    assert chosen(hopper) == chosen(hopper._replace(documents=True)) == "fa4"
    assert chosen(hopper._replace(documents=True), deterministic=True) is None
    ampere = PLAIN._replace(capability=80)
    assert chosen(ampere) is None, "torch chooses between its own"
    assert chosen(ampere._replace(window=True)) == chosen(ampere._replace(documents=True)) == "flash"
    assert chosen(ampere._replace(documents=True, batch=2)) is None
    for call in (PLAIN._replace(d=256, d_v=256), PLAIN._replace(softcap=True), PLAIN._replace(dropout=True)):
        assert chosen(call) is None
    assert chosen(PLAIN, flash=False) is None and chosen(PLAIN._replace(dtype=torch.float32)) is None
    for older in (None, (4, 0, 0, 11)):
        monkeypatch.setattr(fa4, "installed", lambda older=older: older)
        assert chosen(PLAIN) is None


@given(data=st.data())
def test_what_is_listed_is_not_refused(data):
    flags = {name: data.draw(st.booleans()) for name in Call._fields[6:]}
    draw = {
        "device": ["cpu", "cuda"], "capability": [0, 80, 90, 100, 103, 120], "batch": [1, 2],
        "dtype": [torch.float32, torch.bfloat16], "d": [64, 128, 192, 256], "d_v": [64, 128, 256],
    }  # fmt: skip
    call = Call(**{name: data.draw(st.sampled_from(values)) for name, values in draw.items()}, **flags)
    taken = chosen(call, deterministic=data.draw(st.booleans()))
    assert taken is None or (refusal(taken, call) is None and call.device == "cuda")


def test_known_faults_are_refused():
    for changes, named in (
        ({"d": 256, "d_v": 256}, "at most 128"),
        ({"d_v": 96}, "at most 128"),
        ({"capability": 90, "d": 72, "d_v": 72}, "32, 64"),
        ({"capability": 90, "d": 192}, "32, 64"),
        ({"capability": 120, "d": 96, "d_v": 96}, "64 or 128"),
        ({"capability": 80}, "compute capability 9.0"),
        ({"documents": True, "batch": 2}, "a batch of 1"),
        ({"ranges": True}, "key_ranges"),
        ({"window": True, "causal": False, "shifted": True}, "sq different from sk"),
    ):
        assert named in refusal("fa4", PLAIN._replace(**changes))
    for changes in ({"softcap": True}, {"shifted": True}, {"window": True, "causal": False}, {"d_v": 64}):
        assert refusal("fa4", PLAIN._replace(**changes)) is None


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(fa4, "installed", lambda: None)
    q = torch.ones(4, 1, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="flash-attn-4 is not installed \\(pip install flash-attn-4\\)"):
        flash_attention(q, q, q, backend="fa4")


def test_versions_are_ordered(monkeypatch):
    monkeypatch.undo()
    found = []
    for version in ("4.0.0b5", "4.0.0b36", "4.0.0", "4.1.0b1"):
        monkeypatch.setattr(fa4.importlib.metadata, "version", lambda _, version=version: version)
        fa4.installed.cache_clear()
        found.append(fa4.installed())
    fa4.installed.cache_clear()
    assert found[1] == (4, 0, 0, 36) and found == sorted(found)
    assert all(row.source and (row.backend != "fa4" or row.since) for row in ALLOWED)


@pytest.mark.skipif(not SOURCE.is_file(), reason="make venv unpacks flash-attn-4's wheel there")
def test_the_stand_in_has_the_parameters_of_the_real_functions():
    tree = ast.parse(SOURCE.read_text())
    real = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    ours = {
        n.name: n for n in ast.parse(Path(flash_attn_4.__file__).read_text()).body if isinstance(n, ast.FunctionDef)
    }
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        defaults = []
        for node in (real[name], ours[name]):
            names = [a.arg for a in node.args.args]
            values = [None] * (len(names) - len(node.args.defaults)) + [ast.dump(d) for d in node.args.defaults]
            defaults.append(dict(zip(names, values, strict=True)))
        theirs, stand_in = defaults
        required = [n for n, value in stand_in.items() if value is None]
        assert list(theirs)[: len(required)] == required
        assert {n: theirs[n] for n in stand_in} == stand_in


@given(data=st.data())
def test_values_and_gradients(data):
    """Through the package's own layout, masks, sink and saved statistics, against fp64."""
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16]))
    documents = data.draw(st.booleans())
    causal = data.draw(st.booleans())
    sk = data.draw(st.integers(1, 40))
    sq = sk if documents else data.draw(st.integers(1, sk))
    b, kv_heads = 1 if documents else data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    heads, d = kv_heads * data.draw(st.integers(1, 2)), data.draw(st.sampled_from([(16, 16), (24, 16)]))
    cuts = sorted(data.draw(st.lists(st.integers(0, sk), max_size=3)))
    window = data.draw(st.sampled_from([(-1, -1), (3, 0), (3, 2)] if causal or sq == sk else [(-1, -1)]))
    given_ = {
        "causal": causal, "window_size": window, "softmax_scale": data.draw(st.sampled_from([None, 0.6])),
        "softcap": data.draw(st.sampled_from([None, 3.0])),
        "cu_seqlens": torch.tensor([0, *cuts, sk], dtype=torch.int32) if documents else None,
    }  # fmt: skip
    shapes = [(sq, b, heads, d[0]), (sk, b, kv_heads, d[0]), (sk, b, kv_heads, d[1])]
    args = [randn(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
    grad = randn(sq, b, heads, d[1], dtype=dtype, seed=9).detach()
    true = suite.forward_backward(lambda *a: flash_attention_reference(*a, **given_), suite.as_double(args), grad)
    peer = suite.forward_backward(lambda *a: flash_attention_reference(*a, **given_), args, grad)

    options = attention_options("flash_attention", *args, **given_)
    q, k, v = (t.detach() for t in args)
    out, lse = torch_kernels.forward("fa4", options, q, k, v)
    assert out.shape == (sq, b, heads, d[1]) and lse.shape == (b, heads, sq)
    found = out, *torch_kernels.backward("fa4", options, grad, q, k, v, out, lse)
    product = (16 * torch.finfo(torch.float32).eps + 8 * torch.finfo(dtype).eps) * max(d) ** 0.5
    for got, other, oracle in zip(found, peer, true, strict=True):
        largest = oracle.abs().max().item()
        assert (
            suite.error(got, oracle) <= 2 * suite.error(other, oracle) + 8 * torch.finfo(dtype).eps * largest + product
        )


@pytest.mark.parametrize("backend", ["auto", "flash"])
def test_the_largest_logit_of_each_head(backend):
    masks = [{}, {"causal": False}] if backend == "flash" else [
        {}, {"causal": False, "softcap": 2.0}, {"window_size": (3, 0)}, {"cu_seqlens": torch.tensor([0, 4, 4, 9])},
        {"key_ranges": (torch.tensor([0, 0, 2, 5, 5, 5, 6, 7, 8]), torch.tensor([1, 3, 3, 4, 5, 6, 7, 7, 8]))},
    ]  # fmt: skip
    for mask, sink, tensor_format in itertools.product(masks, (None, torch.full((4,), 99.0)), ("sbhd", "bhsd")):
        q, k = (randn(9, 2, h, 8, dtype=torch.float32, seed=h) for h in (4, 2))
        options = {**mask, "sink": sink, "softmax_scale": 0.7}
        order = (0, 1, 2, 3) if tensor_format == "sbhd" else (1, 2, 0, 3)
        tensors = [t.permute(order) for t in (q, k, k)]
        out, largest = flash_attention(
            *tensors, **options, backend=backend, tensor_format=tensor_format, return_max_logit=True
        )
        assert torch.equal(out, flash_attention(*tensors, **options, backend=backend, tensor_format=tensor_format))
        scores = torch.einsum("ibhd,jbhd->bhij", q, k.repeat_interleave(2, 2)).detach() * 0.7
        scores = 2.0 * torch.tanh(scores / 2.0) if "softcap" in mask else scores
        plain = {name: value for name, value in mask.items() if name != "softcap"}
        ones = torch.zeros(9, 2, 1, 9)
        values = torch.eye(9).view(9, 1, 1, 9).expand(9, 2, 1, 9).contiguous()
        seen = flash_attention_reference(ones, ones, values, **plain)[:, 0, 0] > 0  # uniform over what is seen
        expected = scores.masked_fill(~seen, -math.inf).amax((0, 2, 3))
        torch.testing.assert_close(largest, expected, rtol=1e-6, atol=1e-6)
        assert not largest.requires_grad
    nothing = torch.ones(0, 1, 2, 8)
    assert flash_attention(nothing, nothing, nothing, return_max_logit=True)[1].tolist() == [-math.inf] * 2
