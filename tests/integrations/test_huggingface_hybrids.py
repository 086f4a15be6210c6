"""Families with experts, linear or latent attention with and without ``huggingface.apply``, and their table."""

from pathlib import Path

import pytest
import torch
import transformers

from parallel_ops.integrations import huggingface
from parallel_ops.integrations.huggingface._attention import _is_band as is_band
from support.integrations.huggingface_hybrids import HYBRIDS, SENSITIVE, hybrid_of, table
from support.integrations.huggingface_models import batch

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def step(model, **given):
    """As of other families, but for parameters that stock has no gradient of: indexers, biases of routers."""
    model.zero_grad()
    outputs = model(**given)
    outputs.loss.backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", HYBRIDS)
def test_logits_losses_gradients_and_tokens_are_those_of_stock(family):
    model = hybrid_of(family)
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


@pytest.mark.parametrize("family", [name for name in ("gpt_oss", "mimo_v2_flash") if name in HYBRIDS])
def test_attention_with_sinks_is_replaced_where_nobody_reads_its_weights(family):
    model, inputs = hybrid_of(family), {"input_ids": batch()["input_ids"]}
    stock = model(**inputs, output_attentions=True)
    handle = huggingface.apply(model)
    step(model, **batch())
    assert "flash_attention" in repr(handle) and "unused" not in repr(handle)
    ours = model(**inputs, output_attentions=True)
    for got, want in zip(ours.attentions, stock.attentions, strict=True):
        torch.testing.assert_close(got, want)
    assert "flash_attention: it had to return its weights" in repr(handle)
    step(model, **batch(padded=True))
    assert "flash_attention: it got a mask" in repr(handle)


def test_masks_of_attention_with_sinks():
    """Kept with the mask until somebody writes into it."""
    rows = torch.arange(6)
    band = (rows[:, None] >= rows) & (rows[:, None] - rows < 3)
    mask = torch.zeros(2, 1, 6, 6).masked_fill_(~band, torch.finfo(torch.float32).min)
    assert is_band(mask, 6, 3) and is_band(mask, 6, 3) and is_band(mask[:1], 6, 3)
    assert not is_band(mask, 6, None) and not is_band(mask, 6, 2) and not is_band(mask, 5, 3)
    mask[1, 0, 4, 3] = -1.0
    assert not is_band(mask, 6, 3) and is_band(mask[:1], 6, 3) and not is_band(band[None, None], 6, 3)


@pytest.mark.skipif(transformers.__version__ != "5.23.0", reason="the table is that of Transformers 5.23.0")
def test_the_table_of_the_page():
    """Printed by ``python -m support.integrations.huggingface_hybrids`` in ``tests``."""
    rows = table()
    assert "\n".join(rows) in PAGE.read_text(encoding="utf-8"), "\n".join(rows)
