"""``huggingface.apply`` replaces only forwards whose source it was written for."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.llama import modeling_llama

from parallel_ops.integrations import huggingface
from parallel_ops.integrations.huggingface._source import digest
from support.huggingface_families import DENSE, config_of
from support.huggingface_models import assert_same_step, batch, model_of, step


def scaled(self, x: torch.Tensor, factor=2) -> torch.Tensor:
    """Documented."""
    scaled = x * factor  # and commented
    return scaled + self.bias


def scaled_renamed(self, hidden, by=2):
    y = hidden * by
    return y + self.bias


def scaled_by_another(self, x, factor=3):
    scaled = x * factor
    return scaled + self.bias


def scaled_by_true(self, x, factor=True):
    scaled = x * factor
    return scaled + self.bias


def scaled_attribute(self, x, factor=2):
    scaled = x * factor
    return scaled + self.weight


def helper(x):
    return x.float()


def calls_a_helper(x):
    return helper(x) + 1


def test_digests_differ_by_what_is_computed_alone():
    assert digest(scaled) == digest(scaled_renamed)
    others = [digest(f) for f in (scaled, scaled_by_another, scaled_by_true, scaled_attribute, calls_a_helper)]
    assert None not in others and len(set(others)) == len(others)
    assert digest(len) is None
    assert digest(eval("lambda x: x")) is None


def test_what_a_function_calls_belongs_to_it(monkeypatch):
    digest.cache_clear()
    before = digest(calls_a_helper)
    monkeypatch.setitem(globals(), "helper", scaled_renamed)
    digest.cache_clear()
    assert digest(calls_a_helper) != before
    digest.cache_clear()

    class Norm:
        def forward(self, x):
            return self._norm(x)

        def _norm(self, x):
            return x

    class Other(Norm):
        def _norm(self, x):
            return x + 1

    assert digest(Norm.forward, Norm) != digest(Norm.forward, Other)


def twice_the_norm(self, hidden_states):
    return F.rms_norm(hidden_states, self.weight.shape, 2 * self.weight, self.variance_epsilon)


def gated_with_dropout(self, x):
    return F.dropout(self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)), 0.5)


STOCK_ROTATION = modeling_llama.apply_rotary_pos_emb
STOCK_TABLES = modeling_llama.LlamaRotaryEmbedding.forward


def rotate_the_other_way(q, k, cos, sin, unsqueeze_dim=1):
    return STOCK_ROTATION(q, k, cos, -sin, unsqueeze_dim=unsqueeze_dim)


def tables_that_differ_between_halves(self, x, position_ids):
    cos, sin = STOCK_TABLES(self, x, position_ids)
    return cos * torch.linspace(0.5, 1.0, cos.shape[-1]), sin


def halved_logits(self, input_ids=None, labels=None, **kwargs):
    logits = self.lm_head(self.model(input_ids, **kwargs).last_hidden_state) / 2
    return transformers.modeling_outputs.CausalLMOutput(loss=self.loss_function(logits, labels, 61), logits=logits)


@pytest.mark.parametrize(
    ("where", "name", "other", "kept", "op"),
    [
        (modeling_llama.LlamaRMSNorm, "forward", twice_the_norm, "norm", "rms_norm"),
        (modeling_llama.LlamaMLP, "forward", gated_with_dropout, "mlp", "silu_mul"),
        (modeling_llama, "apply_rotary_pos_emb", rotate_the_other_way, "self_attn", "rotary_embedding_qk"),
        (
            modeling_llama.LlamaRotaryEmbedding,
            "forward",
            tables_that_differ_between_halves,
            "self_attn",
            "rotary_embedding_qk",
        ),
        (modeling_llama.LlamaForCausalLM, "forward", halved_logits, "", "vocab_parallel_linear_cross_entropy"),
    ],
)
def test_a_forward_with_another_formula_is_kept_and_reported(monkeypatch, where, name, other, kept, op):
    """As another library, a newer version or a family that is built on this one would have it."""
    monkeypatch.setattr(where, name, other)
    model = model_of("llama")
    torch.manual_seed(5)
    expected = step(model, **batch())
    applied = huggingface.apply(model)
    torch.manual_seed(5)
    assert_same_step(step(model, **batch()), expected)
    reasons = [why for path, why in applied.unreplaced.items() if path.endswith(kept or "LlamaForCausalLM")]
    assert len(reasons) >= 1
    assert all(op in why and ("none that it was written for" in why or "is not known" in why) for why in reasons)
    assert not any(op in ops for ops in applied.replaced.values())


@pytest.mark.skipif("seed_oss" not in DENSE, reason="Transformers before 4.57")
def test_dropout_at_the_end_of_an_mlp_drops_what_stock_drops():
    def model():
        torch.manual_seed(0)
        config = config_of("seed_oss", residual_dropout=0.4)
        return transformers.AutoModelForCausalLM.from_config(config).train()

    stock, ours = model(), model()
    assert "silu_mul" in huggingface.apply(ours).replaced["model.layers.0.mlp"]
    results = []
    for m in (stock, ours):
        torch.manual_seed(3)
        results.append(step(m, **batch()))
    assert_same_step(results[1], results[0])
    torch.manual_seed(4)
    assert abs(step(ours, **batch())[0].loss - results[0][0].loss) > 1e-3


def test_scaled_logits_with_a_bias_are_kept():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of("granite")).train()
    model.lm_head = nn.Linear(32, 61)
    expected = step(model, **batch())
    applied = huggingface.apply(model)
    assert "its lm_head has a bias" in applied.unreplaced["GraniteForCausalLM"]
    assert_same_step(step(model, **batch()), expected)
    assert expected[0].logits is not None
