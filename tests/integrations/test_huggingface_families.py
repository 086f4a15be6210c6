"""Every family of docs/huggingface.md with and without ``huggingface.apply``."""

import pytest
import torch
import transformers

from parallel_ops.integrations import huggingface
from support.huggingface_families import DENSE, KEPT, config_of
from support.huggingface_models import batch, step

families = pytest.mark.parametrize("family", DENSE)
TOLERANCE = 3e-6


def model_of(family, **options):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family, **options)).train()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases are ones and zeros otherwise
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def error(got, expected):
    return float((got.detach() - expected.detach()).norm() / expected.detach().norm())


def assert_same_step(got, expected):
    assert error(got[0].loss, expected[0].loss) < TOLERANCE
    assert got[1].keys() == expected[1].keys()
    scale = max(float(gradient.norm()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():  # some are zero in exact arithmetic, as that of a bias of keys
        assert float((got[1][name] - gradient).norm()) < TOLERANCE * max(float(gradient.norm()), 1e-2 * scale), name


@families
def test_logits_losses_and_gradients_are_those_of_stock(family):
    model = model_of(family)
    cases = [batch(), batch(padded=True) | {"num_items_in_batch": torch.tensor(29)}, batch() | {"use_cache": False}]
    expected = [step(model, **case) for case in cases]
    applied = huggingface.apply(model)
    kept = KEPT.get(family, {})
    assert set(applied.unreplaced) == {name for name, _ in model.named_modules() if name.endswith(tuple(kept))}
    for name, reason in applied.unreplaced.items():
        assert kept[name.rpartition(".")[2]] in reason
    called = {op for ops in applied.replaced.values() for op in ops}
    assert {"vocab_parallel_linear_cross_entropy", "rotary_embedding_qk"} <= called
    for case, stock in zip(cases, expected, strict=True):
        ours = step(model, **case)
        assert ours[0].logits is None
        assert_same_step(ours, stock)
        with_logits = step(model, **case, skip_logits=False)
        assert error(with_logits[0].logits, stock[0].logits) < TOLERANCE
        assert_same_step(with_logits, stock)


@families
def test_generation_is_that_of_stock_token_by_token(family):
    model = model_of(family).eval()
    prompts = batch()["input_ids"][:, :6].clamp(min=3)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])  # padded on the left
    options = {"attention_mask": mask, "max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False}
    expected = model.generate(prompts, **options)
    with huggingface.apply(model):
        assert torch.equal(model.generate(prompts, **options), expected)
    assert len(expected[0].unique()) > 3
