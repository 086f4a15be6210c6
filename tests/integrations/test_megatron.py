"""Megatron-core's own functions against the package's in their place."""

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron", reason="megatron-core is not installed")

from megatron.core.fusions import fused_bias_dropout, fused_bias_geglu, fused_bias_gelu, fused_bias_swiglu
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import L2Norm, WrappedTorchNorm
from megatron.core.transformer.utils import attention_mask_func

from parallel_ops.integrations import megatron
from parallel_ops.integrations.megatron.weight_gradient import MainGrad, extension

pytestmark = pytest.mark.usefixtures("megatron_on_cpu")


def _values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _positive(*shape):
    return _values(*shape, seed=9).abs()


def _late(module, name):
    """The function that has this name when it is called."""

    def call(*args):
        return getattr(module, name)(*args)

    return call


def _softmax(kind=AttnMaskType.causal, scale=None, window=None, **given):
    module = FusedScaleMaskSoftmax(False, False, kind, False, attention_mask_func, True, scale, window)
    return lambda scores: module(scores * 1, given.get("mask"), given.get("sink"))


def _angles(rows, width, batch=1, interleaved=False):
    angles = _values(rows, batch, 1, width // 2, seed=3)
    return angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)


def _rotary(freqs, interleaved=False, **options):
    return lambda t: rope_utils._apply_rotary_pos_emb_bshd(t, freqs, interleaved, **options)


def _packed(rows):
    starts, group = torch.tensor([0, 2, 7], dtype=torch.int32), SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    freqs = _angles(rows, 8)
    return lambda t: rope_utils._apply_rotary_pos_emb_thd(t, starts, freqs, cp_group=group)


def _bias_dropout_add(training, fused=True):
    def call(x, bias, residual):
        return fused_bias_dropout.get_bias_dropout_add(training, fused)((x, bias), residual, 0.0)

    return call


def _quick_geglu(**options):
    def call(x, weights, bias=None):
        return fused_bias_geglu.weighted_bias_quick_geglu_impl(x, bias, weights, **options)

    return call


_MASK = _values(2, 1, 6, 6, seed=5) > 0.5
_MASK[..., 0] = False
_MLA = {
    "mla_rotary_interleaved"
    if "mla_rotary_interleaved" in rope_utils.apply_rotary_pos_emb.__code__.co_varnames
    else "multi_latent_attention": True
}

# Each calls Megatron by the names that its own modules use.
FUNCTIONS = {
    "bias_gelu": (_late(fused_bias_gelu, "bias_gelu_impl"), (5, 3, 8), (8,)),
    "bias_swiglu": (_late(fused_bias_swiglu, "bias_swiglu_impl"), (5, 3, 8), (8,)),
    "swiglu": (lambda x: fused_bias_swiglu.bias_swiglu_impl(x, None), (5, 3, 8)),
    "weighted swiglu": (lambda x, w: fused_bias_swiglu.weighted_bias_swiglu_impl(x, None, w), (5, 8), (5, 1)),
    "bias_geglu": (_late(fused_bias_geglu, "bias_geglu_impl"), (5, 3, 8), (8,)),
    "geglu": (lambda x: fused_bias_geglu.bias_geglu_impl(x, None), (5, 3, 8)),
    "quick geglu": (_quick_geglu(linear_offset=1.0), (5, 8), (5, 1), (8,)),
    "clamped quick geglu": (_quick_geglu(linear_offset=1.0, clamp_value=0.7), (5, 8), (5, 1)),
    "bias_dropout_add": (_bias_dropout_add(True), (5, 3, 8), (8,), (5, 3, 8)),
    "bias_dropout_add, not fused": (_bias_dropout_add(True, fused=False), (5, 3, 8), (8,), (5, 3, 8)),
    "bias_dropout_add, evaluated": (_bias_dropout_add(False), (5, 3, 8), (8,), (5, 3, 8)),
    "causal softmax": (_softmax(), (2, 4, 6, 6)),
    "causal softmax with a mask": (_softmax(mask=_MASK), (2, 4, 6, 6)),
    "scaled masked softmax": (_softmax(AttnMaskType.padding, 0.5, mask=_MASK), (2, 4, 6, 6)),
    "softmax without a mask": (_softmax(AttnMaskType.no_mask, 2.0), (2, 4, 6, 7)),
    "softmax of one query": (_softmax(), (2, 4, 1, 7)),
    "softmax with a window": (_softmax(window=(2, 0)), (2, 4, 6, 8)),
    "softmax with a window ahead": (_softmax(window=(2, 1)), (2, 4, 6, 6)),
    "softmax with sinks": (_softmax(sink=torch.tensor([0.0, 1.0, -1.0, 2.0])), (2, 4, 6, 6)),
    "rotary": (_rotary(_angles(6, 8)), (6, 2, 4, 8)),
    "rotary of a part": (_rotary(_angles(6, 4), mscale=1.5), (6, 2, 4, 8)),
    "interleaved rotary": (_rotary(_angles(6, 8, interleaved=True), True), (6, 2, 4, 8)),
    "rotary of each batch": (_rotary(_angles(6, 8, batch=2)), (6, 2, 4, 8)),
    "rotary with halves that differ": (_rotary(_values(6, 1, 1, 8)), (6, 2, 4, 8)),
    "rotary of latent attention": (_rotary(_angles(6, 4), **_MLA), (6, 2, 4, 8)),
    "packed rotary": (_packed(5), (7, 4, 8)),
    "packed rotary with all angles": (_packed(7), (7, 4, 8)),
    "L2 norm": (L2Norm(8), (5, 3, 8)),
}


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
def test_functions_equal_megatrons(exact):
    def run(function, *shapes):
        inputs = [_values(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
        y = function(*inputs)
        gradient = _values(*reversed(y.shape), seed=8).permute(*reversed(range(y.dim())))  # not contiguous
        return [y.detach(), *torch.autograd.grad(y, inputs, gradient)]

    stock = [run(*function) for function in FUNCTIONS.values()]
    with megatron.apply(exact_megatron=exact):
        ours = [run(*function) for function in FUNCTIONS.values()]
    for name, of_stock, of_ours in zip(FUNCTIONS, stock, ours, strict=True):
        assert [t.dtype for t in of_ours] == [t.dtype for t in of_stock], name
        torch.testing.assert_close(of_ours, of_stock, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_what_is_replaced_is_ours():
    """Else the comparisons above would compare Megatron with itself."""
    with megatron.apply() as replaced:
        for name, original in replaced.items():
            owner, _, attribute = name.rpartition(".")
            if name.startswith("sys."):
                continue
            module = sys.modules.get(owner) or getattr(sys.modules[owner.rpartition(".")[0]], owner.rpartition(".")[2])
            assert vars(module)[attribute] is not original
        assert {name.rpartition(".")[2] for name in replaced} >= {"bias_gelu_impl", "vocab_parallel_cross_entropy"}
        assert "megatron.core.transformer.mlp.bias_gelu_impl" in replaced


def test_rows_that_see_no_key():
    mask = _MASK.clone()
    mask[0, 0, 2] = True
    softmax = _softmax(AttnMaskType.padding, mask=mask)
    with megatron.apply("softmax"):
        assert not softmax(_values(2, 4, 6, 6))[0, :, 2].any()
    with megatron.apply("softmax", exact_megatron=True):
        torch.testing.assert_close(softmax(_values(2, 4, 6, 6))[0, :, 2], torch.full((4, 6), 1 / 6))


def test_a_mask_counts_beside_a_window():
    """Megatron drops it (through 0.19), and with it the padding of the sequence."""
    softmax, both = _softmax(window=(2, 0), mask=_MASK), _values(2, 4, 6, 6)
    ago = torch.arange(6)[:, None] - torch.arange(6)
    hidden = (ago < 0) | (ago > 2) | _MASK
    with megatron.apply("softmax", exact_megatron=True):
        exact = softmax(both)
    assert torch.equal(exact, softmax(both))
    with megatron.apply("softmax"):
        seen = softmax(both)
    right = both.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(seen, right)


def test_bias_dropout_add_in_evaluation_and_of_two_dtypes():
    x, bias, residual = _values(4, 8).bfloat16(), _values(8).bfloat16(), _values(4, 8)
    stock = _bias_dropout_add(True)(x, bias, residual).dtype
    with megatron.apply(exact_megatron=True):
        evaluated = x.float()
        assert _bias_dropout_add(False)(evaluated, bias, residual).data_ptr() == evaluated.data_ptr()
        assert _bias_dropout_add(True)(x, bias, residual).dtype == stock
    with megatron.apply():
        evaluated = x.float()
        assert _bias_dropout_add(False)(evaluated, bias, residual).data_ptr() == evaluated.data_ptr()
        evaluated.requires_grad_()
        assert _bias_dropout_add(False)(evaluated, bias, residual).data_ptr() != evaluated.data_ptr()
        assert _bias_dropout_add(True)(x, bias, residual).dtype is torch.float32


def test_dropout_follows_the_seed_and_is_megatrons_where_exact():
    def dropped(seed=1):
        torch.manual_seed(seed)
        return fused_bias_dropout.get_bias_dropout_add(True, True)((torch.ones(64, 8), None), torch.zeros(64, 8), 0.5)

    stock = dropped()
    with megatron.apply(exact_megatron=True):
        assert torch.equal(dropped(), stock)
    with megatron.apply():
        ours = dropped()
        assert torch.equal(dropped(), ours)
        assert not torch.equal(dropped(2), ours)
    assert set(ours.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_take_what_megatrons_own_refuses(kind, zero_centered):
    config = SimpleNamespace(
        normalization=kind, layernorm_zero_centered_gamma=zero_centered, sequence_parallel=True,
        persist_layer_norm=True, memory_efficient_layer_norm=True,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        WrappedTorchNorm(config, 8)
    with megatron.apply("norm"):
        norm = WrappedTorchNorm(config=config, hidden_size=8, eps=1e-3)
    stock = getattr(torch.nn, kind)(8, eps=1e-3)
    assert isinstance(norm, type(stock))
    assert list(norm.state_dict()) == list(stock.state_dict())
    assert all(p.sequence_parallel for p in norm.parameters())
    with torch.no_grad():
        stock.weight.copy_(_positive(8))
        norm.weight.copy_(stock.weight - 1 if zero_centered else stock.weight)
    x = _values(5, 8)
    torch.testing.assert_close(norm(x), stock(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_in_the_place_of_apex(dtype, main_dtype):
    x, dy = _values(6, 8).to(dtype), _values(6, 4, seed=1).t().contiguous().t().to(dtype)
    before = _values(4, 8, seed=2).to(main_dtype)
    if dtype is torch.float32 and main_dtype is torch.bfloat16:
        return  # which Megatron has not
    total = before.clone()
    wgrad = {torch.float32: "wgrad_gemm_accum_fp32", torch.bfloat16: "wgrad_gemm_accum_fp16"}[main_dtype]
    getattr(extension, wgrad)(x, dy, total)
    right = before.double() + dy.double().t() @ x.double()
    limits = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
    torch.testing.assert_close(total.double(), right, rtol=limits[main_dtype], atol=limits[main_dtype])


def test_what_megatrons_data_parallelism_reads_of_a_fused_gradient():
    weight = torch.nn.Parameter(_values(4, 8))
    weight.main_grad = torch.zeros(4, 8)
    assert MainGrad(weight).add(_values(6, 4), _values(6, 8)) is None
    weight.grad_added_to_main_grad = False
    dummy = MainGrad(weight).add(_values(6, 4), _values(6, 8))
    assert weight.grad_added_to_main_grad
    assert dummy.shape == weight.shape
    weight.zero_out_wgrad = True
    assert not MainGrad(weight).add(_values(6, 4), _values(6, 8)).any()
    torch.testing.assert_close(weight.main_grad, 3 * _values(6, 4).t() @ _values(6, 8))
