"""Families with experts, linear or latent attention with and without ``huggingface.apply``, and their table."""

from pathlib import Path

import pytest
import torch
import transformers

from parallel_ops.integrations import huggingface
from parallel_ops.integrations.huggingface._attention import _is_band as is_band
from support.integrations.huggingface_families import HYBRIDS, model_of
from support.integrations.huggingface_hybrids import SENSITIVE, table
from support.integrations.huggingface_models import OLD, batch, step

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


@pytest.mark.parametrize("family", HYBRIDS)
def test_logits_losses_gradients_and_tokens_are_those_of_stock(family):
    model = model_of(family)
    cases = [batch(), batch(padded=True) | {"num_items_in_batch": torch.tensor(29)}]
    expected = [step(model, **case) for case in cases]
    prompts = batch()["input_ids"][:, :6].clamp(min=3)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    tokens = model.eval().generate(prompts, **options)
    tolerance = SENSITIVE.get(family, 3e-6)
    with huggingface.apply(model.train()):
        for case, (stock, gradients) in zip(cases, expected, strict=True):
            ours, own = step(model, **case)
            assert abs(ours.loss - stock.loss) <= tolerance * abs(stock.loss)
            assert own.keys() == gradients.keys()
            scale = max(float(gradient.norm()) for gradient in gradients.values())
            for name, gradient in gradients.items():
                off = float((own[name] - gradient).norm())
                assert off < tolerance * max(float(gradient.norm()), 1e-2 * scale), name
            logits = step(model, **case, skip_logits=False)[0].logits
            assert (logits - stock.logits).norm() < tolerance * stock.logits.norm()
        assert torch.equal(model.eval().generate(prompts, **options), tokens)


sinks = [name for name in ("gpt_oss", "mimo_v2_flash") if name in HYBRIDS]


@pytest.mark.parametrize("family", sinks)
def test_attention_with_sinks_is_replaced_where_nobody_reads_its_weights(family):
    model, inputs = model_of(family), {"input_ids": batch()["input_ids"]}
    stock = model_of(family)(**inputs, output_attentions=True)  # 4.57 leaves forwards in the modules of such a call
    handle = huggingface.apply(model)
    step(model, **batch())
    assert "flash_attention" in repr(handle) and "unused" not in repr(handle)
    ours = model(**inputs, output_attentions=True)
    for got, want in zip(ours.attentions, stock.attentions, strict=True):
        torch.testing.assert_close(got, want)
    assert "flash_attention: it had to return its weights" in repr(handle)
    step(model, **batch(padded=True))
    assert "flash_attention: it got a mask" in repr(handle)


@pytest.mark.parametrize("family", sinks)
def test_attention_with_sinks_where_masks_count_no_writes_or_have_no_values(family):
    model, ids = model_of(family).eval(), batch()["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits
    huggingface.apply(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, expected)
    if not OLD:  # stock's export was tried with Transformers 5 alone
        exported = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
        torch.testing.assert_close(exported.module()(ids, use_cache=False).logits, expected)


def test_masks_of_attention_with_sinks():
    """Kept with the mask until somebody writes into it."""
    rows = torch.arange(6)
    band = (rows[:, None] >= rows) & (rows[:, None] - rows < 3)
    mask = torch.zeros(2, 1, 6, 6).masked_fill_(~band, torch.finfo(torch.float32).min)
    assert is_band(mask, 6, 3) and is_band(mask, 6, 3) and is_band(mask[:1], 6, 3)
    assert not is_band(mask, 6, None) and not is_band(mask, 6, 2) and not is_band(mask, 5, 3)
    mask[1, 0, 4, 3] = -1.0
    assert not is_band(mask, 6, 3) and is_band(mask[:1], 6, 3) and not is_band(band[None, None], 6, 3)


LLAMA4 = "model.layers.1.feed_forward"
llama4 = pytest.mark.skipif("llama4" not in HYBRIDS, reason="a family of Transformers 5")


class Cubes(torch.nn.Module):
    def forward(self, x):
        return x**3


def of_outputs(self, hidden_states):
    """Llama 4's block with weights on what the experts return, as other families have them."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    y = self.experts(x.repeat(self.num_experts, 1)) * scores.T.reshape(-1, 1)
    return self.shared_expert(x) + y.view(self.num_experts, *x.shape).sum(0), logits


def every_expert(self, hidden_states):
    """A router whose scores are not 0 where an expert is not chosen."""
    logits = torch.nn.functional.linear(hidden_states, self.weight)
    return logits.sigmoid(), logits


def first_expert(self, hidden_states):
    return hidden_states @ self.gate_up_proj[0, :, : self.hidden_size]


def change_class(name, forward):
    module = "transformers.models.llama4.modeling_llama4"
    return lambda _, patch: patch.setattr(f"{module}.{name}.forward", forward)


CHANGES = {
    "a hook on the experts": lambda block, _: block.experts.register_forward_hook(lambda *_: None),
    "an activation": lambda block, _: setattr(block.experts, "act_fn", Cubes()),
    "a router": lambda block, _: setattr(block.router, "forward", every_expert.__get__(block.router)),
    "the class of routers": change_class("Llama4Router", every_expert),
    "the class of blocks": change_class("Llama4TextMoe", of_outputs),
    "the class of experts": change_class("Llama4TextExperts", first_expert),
}


@llama4
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("applied", ["before", "after"])
def test_changes_around_weighted_inputs(name, applied, monkeypatch):
    """Experts get their tokens alone only while the router, the block and they compute what was tried."""
    stock, model = model_of("llama4"), model_of("llama4")
    if applied == "before":
        huggingface.apply(model)
        step(model, **batch())
    for each in (stock, model):
        CHANGES[name](each.get_submodule(LLAMA4), monkeypatch)
    expected, gradients = step(stock, **batch())
    handle = huggingface.apply(model) if applied == "after" else huggingface.applied(model)
    ours, own = step(model, **batch())
    assert "permute" not in handle.replaced.get(LLAMA4, ())
    assert any(path.startswith(LLAMA4) for path in handle.unreplaced)
    torch.testing.assert_close(ours.loss, expected.loss)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(own[parameter], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(transformers.__version__ != "5.23.0", reason="the table is that of Transformers 5.23.0")
def test_the_table_of_the_page():
    """Printed by ``python -m support.integrations.huggingface_hybrids`` in ``tests``."""
    rows = table()
    assert "\n".join(rows) in PAGE.read_text(encoding="utf-8"), "\n".join(rows)
