"""Mixtures of experts of Transformers with and without ``huggingface.apply``; what all families share is tested with
them in ``test_huggingface.py``."""

import copy

import pytest
import torch
import transformers
from torch import nn

from parallel_ops.integrations import huggingface
from support.integrations.huggingface import LENGTH, SIZES, VOCAB
from support.integrations.huggingface_families import HYBRIDS
from support.integrations.huggingface_families import model_of as model_of_family
from support.integrations.huggingface_models import EXPERTS, OLD, assert_same, assert_same_step, batch, model_of, step

families = pytest.mark.parametrize("family", EXPERTS)
stacked = pytest.mark.skipif(OLD, reason="before Transformers 5 experts have separate weights")


@families
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("in_config", [False, True])
def test_auxiliary_losses_and_router_logits_are_those_of_stock(family, padded, in_config):
    """They reach the loss and the gradients with logits, without them, and in evaluation."""
    model = model_of(family, router_aux_loss_coef=0.7, output_router_logits=in_config)
    given = batch(padded) | ({} if in_config else {"output_router_logits": True})
    stock = step(model, **given)
    without = step(model, **given | {"output_router_logits": False})
    assert without[0].loss < stock[0].loss
    huggingface.apply(model)
    for variant in ({}, {"skip_logits": False}):
        ours = step(model, **given, **variant)
        assert ("logits" in ours[0]) == bool(variant)
        assert_same_step(ours, stock)
        assert_same(ours[0].aux_loss, stock[0].aux_loss)
        assert len(ours[0].router_logits) == len(stock[0].router_logits) > 0
        for got, expected in zip(ours[0].router_logits, stock[0].router_logits, strict=True):
            assert_same(got, expected)
    ours = step(model, **given | {"output_router_logits": False})
    assert ours[0].aux_loss is None and ours[0].router_logits is None
    assert_same_step(ours, without)
    with torch.no_grad():
        evaluated = model.eval()(**given)
    assert_same(evaluated.loss, stock[0].loss)
    assert_same(evaluated.aux_loss, stock[0].aux_loss)


@families
def test_evaluation_and_hidden_states_are_those_of_stock(family):
    model = model_of(family).eval()
    given = {"input_ids": batch()["input_ids"], "output_hidden_states": True}
    with torch.no_grad():
        expected = model(**given)
        with huggingface.apply(model):
            got = model(**given)
        again = model(**given)
    assert_same(got.logits, expected.logits)
    assert torch.equal(again.logits, expected.logits)
    for ours, stock in zip(got.hidden_states, expected.hidden_states, strict=True):
        assert_same(ours, stock)


@stacked
@families
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_each_implementation_of_stock(family, implementation):
    """The first two are replaced; a choice of another is kept, also one that is made afterwards."""
    model = model_of(family, experts_implementation=implementation)
    expected = step(model, **batch())
    applied = huggingface.apply(model)
    reasons = [why for why in applied.unreplaced.values() if "'batched_mm' experts" in why]
    experts = [name for name in applied.replaced if name.endswith(".experts")]
    assert bool(reasons) == (implementation == "batched_mm") == (not experts)
    assert_same_step(step(model, **batch()), expected)
    model.set_experts_implementation("batched_mm")
    called = []
    original = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS["batched_mm"]

    def watched(module, *args):
        called.append(module)
        return original(module, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS._local_mapping, "batched_mm", watched)
        assert_same_step(step(model, **batch()), expected)
    assert called


BLOCKS = {"mixtral": "mlp", "olmoe": "mlp", "qwen3_moe": "mlp", "llama4": "feed_forward"}


@stacked
@pytest.mark.parametrize("family", [name for name in BLOCKS if name in EXPERTS or name in HYBRIDS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_experts_and_routers_alone_in_other_dtypes(family, dtype):
    """The block by itself, so that an input is routed alike whatever was rounded before it."""
    eager = {"experts_implementation": "eager"}
    model = (model_of(family, **eager) if family in EXPERTS else model_of_family(family)).to(dtype)
    path = f"model.layers.1.{BLOCKS[family]}"
    block = model.get_submodule(path)
    generator = torch.Generator().manual_seed(2)
    x, grad = torch.randn(2, 2, LENGTH, SIZES["hidden_size"], generator=generator).to(dtype)

    def run(block):
        dtype = next(block.parameters()).dtype
        given = x.to(dtype, copy=True).requires_grad_()
        block.zero_grad()
        y, *logits = out if isinstance(out := block(given), tuple) else (out,)
        y.backward(grad.to(dtype).view_as(y))
        assert y.dtype is dtype
        return [y.detach(), *(t.detach() for t in logits), given.grad, *(p.grad.clone() for p in block.parameters())]

    oracle, stock = run(copy.deepcopy(block).double()), run(block)
    replaced = huggingface.apply(model).replaced
    assert any("permute" in ops for name, ops in replaced.items() if name.startswith(path))
    for got, theirs, exact in zip(run(block), stock, oracle, strict=True):
        error, stock_error = ((r.double() - exact).norm() for r in (got, theirs))
        assert error <= 2 * stock_error + 1e-6 * exact.norm()  # stock's router is float32 in float64 too


@stacked
def test_jitter_uneven_loads_and_no_tokens():
    model = model_of("mixtral", router_jitter_noise=0.3)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[2:] *= 0.01  # so the first two experts get most tokens
    torch.manual_seed(3)
    expected = step(model, **batch(), use_cache=False)
    huggingface.apply(model)
    torch.manual_seed(3)
    assert_same_step(step(model, **batch(), use_cache=False), expected)
    block = model.model.layers[0].mlp.eval()
    empty = torch.empty(2, 0, SIZES["hidden_size"], requires_grad=True)
    assert block(empty).shape == empty.shape


@stacked
def test_says_what_it_replaced_and_what_not():
    model = model_of("qwen3_moe-dense")
    applied = huggingface.apply(model)
    assert applied.replaced["model.layers.0.mlp"] == ("silu_mul",)
    assert applied.replaced["model.layers.1.mlp.gate"] == ("route",)
    ops = ("sort_by_expert", "permute", "grouped_linear", "bias_swiglu", "unpermute")
    assert applied.replaced["model.layers.1.mlp.experts"] == ops
    assert all(f"1 x {op}" in repr(applied) for op in ("route", *ops))
    model = model_of("mixtral")
    first, second = (layer.mlp for layer in model.model.layers)
    first.experts.act_fn = nn.ReLU()
    first.gate.forward = first.gate.forward
    second.experts.act_fn.register_forward_hook(lambda *_: None)
    second.gate = nn.Linear(4, 4)
    applied = huggingface.apply(model)
    for name, reason in {
        "model.layers.0.mlp.experts": "grouped_linear: its activation is ReLU, for which there is no op",
        "model.layers.0.mlp.gate": "route: something else has replaced its forward",
        "model.layers.1.mlp.experts": "grouped_linear: there are hooks on its activation",
        "model.layers.1.mlp.gate": "any op: it is a Linear, which is not known",
    }.items():
        assert applied.unreplaced[name].startswith(reason)


@stacked
@pytest.mark.parametrize("op", ["router", "experts"])
def test_either_of_the_two_without_the_other(op):
    model = model_of("olmoe")
    expected = step(model, **batch(), output_router_logits=True)
    applied = huggingface.apply(model, ops=op)
    assert len(applied.replaced) == 2 and not applied.unreplaced
    ours = step(model, **batch(), output_router_logits=True)
    assert ours[0].logits.shape == (2, LENGTH, VOCAB)
    assert_same_step(ours, expected)


@stacked
def test_equal_logits_choose_the_lower_index():
    model = model_of("mixtral")
    gate = model.model.layers[0].mlp.gate
    huggingface.apply(model)
    with torch.no_grad():
        gate.weight.zero_()
        logits, weights, experts = gate(torch.randn(3, SIZES["hidden_size"]))
    assert logits.shape == (3, 5)
    assert torch.equal(experts, torch.tensor([[0, 1]] * 3))
    assert torch.equal(weights, torch.full((3, 2), 0.5))


@pytest.mark.skipif(not OLD, reason="since Transformers 5 experts have stacked weights")
@families
def test_separate_experts_are_kept_and_reported(family):
    applied = huggingface.apply(model_of(family))
    blocks = [name for name, why in applied.unreplaced.items() if "experts have separate weights" in why]
    assert len(blocks) == (1 if family.endswith("-dense") else 2)
    assert len(applied.unreplaced) == len(blocks)
