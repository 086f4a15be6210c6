"""Megatron-core's router and token permutation, with and without the drop-in."""

import inspect
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron", reason="megatron-core is not installed")

from megatron.core.transformer.moe import moe_utils, router, token_dispatcher

from parallel_ops import ops
from parallel_ops.integrations import megatron

LATER = "align_size" in inspect.signature(moe_utils.permute).parameters  # 0.17


pytestmark = pytest.mark.usefixtures("megatron_on_cpu")


@pytest.fixture
def called(monkeypatch):
    """The names of the ops that have been called."""
    names = []
    for name in ("route", "permute", "unpermute"):
        monkeypatch.setattr(ops, name, _noted(names, name, getattr(ops, name)))
    return names


def _noted(names, name, op):
    def call(*args, **options):
        names.append(name)
        return op(*args, **options)

    return call


def _values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


ROUTINGS = {
    "softmax of the chosen": {"topk": 3},
    "softmax of all": {"topk": 3, "use_pre_softmax": True},
    "one expert": {"topk": 1, "use_pre_softmax": True, "scaling_factor": 2.5},
    "every expert": {"topk": 12},
    "groups": {"topk": 4, "num_groups": 4, "group_topk": 2},
    "groups of the softmax": {"topk": 4, "num_groups": 4, "group_topk": 2, "use_pre_softmax": True},
    "all groups": {"topk": 3, "num_groups": 3, "group_topk": 3},
    "sigmoid": {"topk": 3, "score_function": "sigmoid"},
    "sigmoid of one": {"topk": 1, "score_function": "sigmoid", "scaling_factor": 0.5},
    "sigmoid with a bias": {"topk": 3, "score_function": "sigmoid", "expert_bias": _values(12, seed=7)},
    "DeepSeek-V3": {
        "topk": 4, "num_groups": 6, "group_topk": 2, "score_function": "sigmoid", "expert_bias": _values(12, seed=7),
        "scaling_factor": 2.5,
    },
}  # fmt: skip
KEPT = {
    "groups by their best": {"topk": 2, "num_groups": 4, "group_topk": 2},
    "groups by their three best": {"topk": 3, "num_groups": 4, "group_topk": 1},
    "softmax with a bias": {"topk": 2, "expert_bias": _values(12, seed=7)},
}


def _routed(logits, options):
    logits = logits.clone().requires_grad_()
    probs, chosen = router.topk_routing_with_score_function(logits, **options)
    (gradient,) = torch.autograd.grad(probs, logits, _values(*probs.shape, seed=4, dtype=probs.dtype))
    return probs.detach(), chosen, gradient


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("name", ROUTINGS | KEPT)
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_routing_equals_megatrons(name, exact, tokens, called):
    options, logits = (ROUTINGS | KEPT)[name], _values(tokens, 12)
    if not tokens and "num_groups" in options:
        pytest.skip("Megatron cannot reshape the groups of no tokens")
    stock = _routed(logits, options)
    with megatron.apply("router", exact_megatron=exact):
        ours = _routed(logits, options)
    assert called == ([] if name in KEPT else ["route"])
    assert [t.dtype for t in ours] == [t.dtype for t in stock]
    assert torch.equal(ours[1], stock[1])
    torch.testing.assert_close(ours, stock, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_routing_of_other_dtypes(dtype, called):
    """Logits so far apart that scores in any dtype are chosen alike, if they are not summed."""
    permutations = [torch.randperm(12, generator=torch.Generator().manual_seed(i)) for i in range(9)]
    logits = torch.stack(permutations).to(dtype) / 4
    several = {name: options for name, options in ROUTINGS.items() if not {"num_groups", "expert_bias"} & set(options)}
    for name, options in several.items():
        stock = _routed(logits, options)
        with megatron.apply("router"):
            ours = _routed(logits, options)
        with megatron.apply("router", exact_megatron=True):
            exact = _routed(logits, options)
        assert [t.dtype for t in ours] == [t.dtype for t in stock]
        close = 2e-2 if dtype is torch.bfloat16 else 1e-6  # stock's softmax is float32 in float64
        torch.testing.assert_close(ours, stock, rtol=close, atol=close, msg=lambda m, n=name: f"{n}: {m}")
        assert all(torch.equal(got, expected) for got, expected in zip(exact, stock, strict=True))
    assert called == ["route"] * len(several)


@pytest.mark.skipif(not LATER, reason="since 0.17")
@pytest.mark.parametrize("name", ROUTINGS)
def test_dense_routing(name):
    stock = _routed(_values(40, 12), ROUTINGS[name] | {"dense_output": True})
    with megatron.apply("router"):
        ours = _routed(_values(40, 12), ROUTINGS[name] | {"dense_output": True})
    torch.testing.assert_close(ours, stock, rtol=2e-5, atol=2e-6)


def _moved(chosen, dtype, with_probs, weighted, rows=None):
    """Tokens by expert, each row changed, and back: results, and gradients of tokens and probabilities."""
    tokens = _values(len(chosen), 10, seed=1, dtype=dtype).requires_grad_()
    probs = (_values(*chosen.shape, seed=2).abs() * chosen).requires_grad_()
    number = int(chosen.sum()) if rows is None else rows
    y, of_rows, indices, *others = token_dispatcher.permute(
        tokens, chosen, probs=probs if with_probs else None, num_out_tokens=number
    )
    assert (of_rows is not None) == with_probs
    changed = y * (1 + _values(len(y), 1, seed=3, dtype=dtype))
    if with_probs:
        changed = changed * of_rows.unsqueeze(-1).to(dtype)
    back = token_dispatcher.unpermute(
        changed, indices, restore_shape=tokens.shape, probs=probs if weighted else None, routing_map=chosen
    )
    inputs = [tokens, probs] if with_probs or weighted else [tokens]
    gradients = torch.autograd.grad(back, inputs, _values(*back.shape, seed=4, dtype=dtype))
    results = [y.detach(), back.detach(), *gradients]
    return [*results, of_rows.detach()] if with_probs else results, indices, others


MAPS = {
    "three each": torch.zeros(40, 7, dtype=torch.bool).scatter(1, _values(40, 7).topk(3).indices, True),
    "any number": _values(40, 7) > 0.5,
    "integers": (_values(40, 7) > 0.5).int(),
    "not contiguous": (_values(7, 40) > 0.5).T,
    "one expert": torch.arange(7).eq(3).expand(40, 7),
    "none": torch.zeros(40, 7, dtype=torch.bool),
    "no tokens": torch.zeros(0, 7, dtype=torch.bool),
}


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_permutations_equal_megatrons(name, exact, with_probs, weighted, called):
    if weighted and name == "integers":
        pytest.skip("Megatron selects the weights with a boolean map alone")
    case = (MAPS[name], torch.float32, with_probs, weighted)
    stock, stock_indices, stock_others = _moved(*case)
    with megatron.apply("permute", exact_megatron=exact):
        ours, indices, others = _moved(*case)
    assert called == ["permute", "unpermute"]
    torch.testing.assert_close(ours, stock, rtol=2e-5, atol=2e-6)
    assert torch.equal(ours[0], stock[0])
    assert torch.equal(indices, stock_indices)
    assert others == stock_others


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_permutations_in_16_bits(dtype, called):
    case = (MAPS["any number"], dtype, True, False)
    right = _moved(MAPS["any number"], torch.float64, True, False)[0]
    stock = _moved(*case)[0]
    with megatron.apply("permute", exact_megatron=True):
        assert all(torch.equal(got, expected) for got, expected in zip(_moved(*case)[0], stock, strict=True))
    assert not called
    with megatron.apply("permute"):
        ours = _moved(*case)[0]
    assert called
    for got, theirs, exact in zip(ours, stock, right, strict=True):
        assert got.dtype is theirs.dtype
        assert (got - exact).norm() <= 1.01 * (theirs - exact).norm() + 1e-3 * exact.norm()


@pytest.mark.skipif(not LATER, reason="since 0.17")
@pytest.mark.parametrize("off", [-3, 0, 3])
def test_a_number_of_rows_that_is_not_that_of_the_map(off):
    """Rows that are missing are dropped. Further ones have no weight, as in stock, and are zero."""
    chosen = MAPS["any number"]
    number = int(chosen.sum())
    stock, *_ = _moved(chosen, torch.float32, True, False, number + off)
    with megatron.apply("permute"):
        ours, *_ = _moved(chosen, torch.float32, True, False, number + off)
    torch.testing.assert_close(ours[0][:number], stock[0][:number])
    torch.testing.assert_close(ours[1], stock[1])
    assert not ours[0][number:].any()
    assert not ours[-1][number:].any()


def test_what_the_ops_lack_is_megatrons(called):
    """Padding to a capacity; fused paths, which need Transformer Engine; indices of stock."""
    chosen = torch.zeros(40, 4, dtype=torch.bool)
    chosen[:10] = True
    tokens, probs = _values(40, 10), _values(40, 4) * chosen
    padded = {"probs": probs, "num_out_tokens": 40, "drop_and_pad": True}

    def run():
        y, of_rows, indices, *_ = token_dispatcher.permute(tokens, chosen, **padded)
        back = token_dispatcher.unpermute(y, indices, tokens.shape, routing_map=chosen, drop_and_pad=True)
        return y, of_rows, indices, back

    stock = run()
    plain = token_dispatcher.permute(tokens, chosen, num_out_tokens=40)
    with megatron.apply():
        assert all(torch.equal(got, expected) for got, expected in zip(run(), stock, strict=True))
        back = token_dispatcher.unpermute(plain[0], plain[2], tokens.shape, routing_map=chosen)
        with pytest.raises(ValueError, match="fused_permute is not available"):
            token_dispatcher.permute(tokens, chosen, fused=True, num_out_tokens=40)
        with pytest.raises(ValueError, match="fused_unpermute is not available"):
            token_dispatcher.unpermute(plain[0], plain[2], tokens.shape, fused=True)
        with pytest.raises(ValueError, match="fused_topk_with_score_function is not available"):
            router.topk_routing_with_score_function(tokens, 2, fused=True)
        with pytest.raises(ValueError, match="Invalid score_function"):
            router.topk_routing_with_score_function(tokens, 2, score_function="tanh")
    assert not called
    torch.testing.assert_close(back, token_dispatcher.unpermute(plain[0], plain[2], tokens.shape, routing_map=chosen))


def test_what_a_model_keeps_is_said():
    common = {
        "bias_activation_fusion": True, "apply_rope_fusion": False, "gradient_accumulation_fusion": True,
        "cross_entropy_loss_fusion": False, "num_moe_experts": 4, "moe_router_topk": 2,
    }  # fmt: skip
    model = torch.nn.Module()
    with megatron.apply() as applied:
        model.config = SimpleNamespace(**common)
        assert applied.unreplaced(model) == {}
        model.config = SimpleNamespace(
            **common, moe_router_fusion=True, moe_permute_fusion=True, moe_pad_expert_input_to_capacity=True,
            moe_router_load_balancing_type=["sinkhorn"], moe_router_num_groups=4, moe_router_group_topk=2,
        )  # fmt: skip
        unreplaced = applied.unreplaced(model)
    fields = {name.removeprefix("Module.config."): why.partition(":")[0] for name, why in unreplaced.items()}
    assert fields == {
        "moe_router_fusion": "router",
        "moe_permute_fusion": "permute",
        "moe_pad_expert_input_to_capacity": "permute",
        "moe_router_load_balancing_type": "router",
        "moe_router_group_topk": "router",
    }
    model.config.num_moe_experts = None
    with megatron.apply() as applied:
        assert applied.unreplaced(model) == {}
