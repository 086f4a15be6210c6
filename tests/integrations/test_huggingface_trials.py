"""``huggingface.apply`` tries forwards: those that compute what an op does are replaced, others kept with a reason."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from parallel_ops.integrations import huggingface
from parallel_ops.integrations.huggingface import _formulas
from support.integrations.huggingface import VOCAB
from support.integrations.huggingface_families import DENSE
from support.integrations.huggingface_families import model_of as model_of_family
from support.integrations.huggingface_formulas import (
    block,
    experts,
    gated,
    halves,
    head,
    neighbours,
    rms,
    rotation,
    router,
    softmax_of_the_chosen,
    tables_that_differ_between_halves,
    up_first,
)
from support.integrations.huggingface_models import OLD, assert_same_step, batch, kinds, model_of, step

LM = "vocab_parallel_linear_cross_entropy"
STOCK_ROTATION = modeling_llama.apply_rotary_pos_emb
NORM = (modeling_llama.LlamaRMSNorm, "forward", "llama", "norm", "rms_norm")
MLP = (modeling_llama.LlamaMLP, "forward", "llama", "mlp", "silu_mul")
ROTATION = (modeling_llama, "apply_rotary_pos_emb", "llama", "self_attn", "rotary_embedding_qk")
TABLES = (modeling_llama.LlamaRotaryEmbedding, "forward", "llama", "self_attn", "rotary_embedding_qk")
HEAD = (modeling_llama.LlamaForCausalLM, "forward", "llama", "LlamaForCausalLM", LM)
BLOCK = (modeling_gpt2.GPT2Block, "forward", "gpt2", "transformer.h.0", "bias_dropout_add")
OTHERS = {
    "twice the norm": (NORM, rms(weight=lambda w: 2 * w)),
    "1 + weight": (NORM, rms(weight=lambda w: 1 + w)),
    "epsilon after the root": (NORM, rms(eps=0.0, outside=1e-6)),
    "another epsilon": (NORM, rms(eps=1.1e-6)),
    "an epsilon that is no option": (NORM, rms(eps=1e-6)),
    "a clamped norm": (NORM, rms(of=lambda x: x.clamp(-100, 100))),
    "a weight without gradients": (NORM, rms(weight=lambda w: w.detach())),
    "a norm in bfloat16": (NORM, rms(of=lambda x: x.bfloat16().double())),
    "exact GeLU": ((*MLP[:2], "llama-gelu", "mlp", "gelu_mul"), gated(lambda x: F.gelu(x, approximate="tanh"))),
    "quick GeLU": (MLP, gated(lambda x: x * torch.sigmoid(1.702 * x))),
    "a clamped gate": (MLP, gated(lambda x: F.silu(x.clamp(max=7)))),
    "clamped values": (MLP, gated(up=lambda x: x.clamp(-50, 50))),
    "up + 1": (MLP, gated(up=lambda x: x + 1)),
    "up first": (MLP, up_first),
    "dropout": (MLP, gated(y=lambda y: F.dropout(y, 0.5))),
    "a scaled MLP": (MLP, gated(y=lambda y: y * 1.000001)),
    "the other way": (ROTATION, rotation(halves, sign=-1)),
    "neighbours": (ROTATION, rotation(neighbours)),
    "more arguments": (ROTATION, lambda q, k, cos, sin, section, unsqueeze_dim=1: STOCK_ROTATION(q, k, cos, sin)),
    "tables": (TABLES, tables_that_differ_between_halves),
    "halved logits": (HEAD, head(lambda logits: logits / 2)),
    "weakly capped logits": (HEAD, head(lambda logits: 100 * torch.tanh(logits / 100))),
    "z-loss": (HEAD, head(plus=lambda logits: 1e-4 * logits.logsumexp(-1).square().mean())),
    "a scaled residual": (BLOCK, block(by=0.9)),
    "a parallel residual": (BLOCK, block(parallel=True)),
}  # fmt: skip
SAME = {
    "a norm": (NORM, rms()),
    "a centred norm": ((*NORM[:4], "layer_norm"), rms(of=lambda x: x - x.mean(-1, keepdim=True))),
    "an MLP": (MLP, gated()),
    "a rotation": (ROTATION, rotation(halves)),
    "a head": (HEAD, head()),
}
if not OLD:
    ROUTER = (getattr(modeling_mixtral, "MixtralTopKRouter", None), "forward", "mixtral", "mlp.gate", "route")
    EXPERTS = (modeling_mixtral.MixtralExperts, "forward", "mixtral", "mlp.experts", "grouped_linear")
    OTHERS |= {
        "sigmoid": (ROUTER, router(lambda x, dim: x.sigmoid())),
        "weights that are not normalised": (ROUTER, router(normalize=False)),
        "a temperature": (ROUTER, router(lambda x, dim: F.softmax(x * 1.0001, dim=dim))),
        "a clamped expert": (EXPERTS, experts(up=lambda x: x.clamp(-7, 7))),
        "an expert's quick GeLU": (EXPERTS, experts(lambda x: x * torch.sigmoid(1.702 * x))),
    }
    SAME |= {
        "a router": (ROUTER, router()),
        "another router": (ROUTER, softmax_of_the_chosen),
        "experts": (EXPERTS, experts()),
    }


@pytest.mark.parametrize("name", OTHERS)
def test_another_formula_is_kept_and_reported(monkeypatch, name):
    """As another library, a newer version or a family that is built on this one would have it."""
    (where, attribute, family, kept, op), other = OTHERS[name]
    monkeypatch.setattr(where, attribute, other)
    if name == "more arguments":
        assert _formulas.rotation(other)[0] is None
        return
    model = model_of(family)
    stock = copy.deepcopy(model)
    applied = huggingface.apply(model)
    if name not in ("a weight without gradients", "a norm in bfloat16"):  # no gradient, and too coarse to compare
        torch.manual_seed(5)
        expected = step(stock, **batch())
        torch.manual_seed(5)
        assert_same_step(step(model, **batch()), expected)
    reasons = [why for path, why in applied.unreplaced.items() if path.endswith(kept)]
    assert len(reasons) >= 1
    assert all(op in why and ("none that it was written for" in why or "recognized" in why) for why in reasons)
    assert not any(op in ops for path, ops in applied.replaced.items() if path.endswith(kept))


@pytest.mark.parametrize("name", SAME)
def test_the_same_formula_in_other_words_is_replaced(monkeypatch, name):
    """As a newer version would have it: no table of versions has to know it."""
    (where, attribute, family, path, op), other = SAME[name]
    monkeypatch.setattr(where, attribute, other)
    model = model_of(family)
    expected = step(model, **batch())
    applied = huggingface.apply(model)
    assert not applied.unreplaced
    assert any(op in ops for name, ops in applied.replaced.items() if name.endswith(path))
    assert_same_step(step(model, **batch()), expected)


def sdpa(**other):
    def forward(module, q, k, v, mask, dropout=0.0, scaling=None, **_):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        given = {"scale": scaling, "is_causal": True} | other
        return F.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2), None

    return forward


def test_core_attention():
    window = torch.ones(5, 5, dtype=torch.bool).tril().triu(-2)
    assert _formulas.core(sdpa())[0] == "causal"
    for other in ({"scale": None}, {"is_causal": False}, {"is_causal": False, "attn_mask": window}):
        assert "none that it was written for" in _formulas.core(sdpa(**other))[1]


def test_once_a_class_and_without_what_the_user_would_notice(monkeypatch):
    calls, stock = [], modeling_llama.LlamaRMSNorm.forward
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda self, x: (calls.append(x), stock(self, x))[1])
    model = model_of("llama")
    state, training = {name: p.clone() for name, p in model.state_dict().items()}, model.training
    random, fired = torch.get_rng_state(), []
    hook = nn.modules.module.register_module_forward_pre_hook(lambda module, _: fired.append(module))
    try:
        applied = huggingface.apply(model)
    finally:
        hook.remove()
    assert len(applied.replaced) == 2 * 4 + 2 and not applied.unreplaced
    assert len(calls) == 2 and all(x.dtype is torch.float64 for x in calls)
    assert not fired
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training == training and all(torch.equal(p, state[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "the meta device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fake tensors": FakeTensorMode,
    "a default dtype": default_dtype,
    "flops": lambda: FlopCounterMode(display=False),
}


@pytest.mark.parametrize("name", CONTEXTS)
@kinds
def test_in_the_contexts_of_a_user(name, family):
    model = model_of(family)
    expected = huggingface.apply(model).replaced
    huggingface.undo(model)
    with CONTEXTS[name]() as context:
        applied = huggingface.apply(model)
    assert applied.replaced == expected
    if name == "flops":
        assert context.get_total_flops() == 0
    with CONTEXTS[name]():
        assert huggingface.apply(type(model)(model.config).train()).replaced == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_take_no_part(dtype):
    """Quantised, of another dtype, on the meta device: linears that cannot be called."""

    class Packed(nn.Linear):
        def forward(self, x):
            raise RuntimeError("needs its GPU")

    model = model_of("llama").to(dtype)
    expected = huggingface.apply(model).replaced
    huggingface.undo(model)
    for module in list(model.model.layers.modules()):
        if type(module) is nn.Linear:
            module.__class__ = Packed
            module.weight = nn.Parameter(torch.zeros(7, 1, dtype=torch.uint8), requires_grad=False)
    assert huggingface.apply(model.to("meta")).replaced == expected


@pytest.mark.skipif("seed_oss" not in DENSE, reason="Transformers before 4.57")
def test_dropout_at_the_end_of_an_mlp_drops_what_stock_drops():
    stock, ours = (model_of_family("seed_oss", residual_dropout=0.4) for _ in range(2))
    assert "silu_mul" in huggingface.apply(ours).replaced["model.layers.0.mlp"]
    results = []
    for m in (stock, ours):
        torch.manual_seed(3)
        results.append(step(m, **batch()))
    assert_same_step(results[1], results[0])
    torch.manual_seed(4)
    assert abs(step(ours, **batch())[0].loss - results[0][0].loss) > 1e-3


def test_scaled_logits_with_a_bias_are_kept():
    model = model_of_family("granite")
    model.lm_head = nn.Linear(32, VOCAB)
    expected = step(model, **batch())
    applied = huggingface.apply(model)
    assert "its lm_head has a bias" in applied.unreplaced["GraniteForCausalLM"]
    assert_same_step(step(model, **batch()), expected)
    assert expected[0].logits is not None


def test_options_that_are_neutral_at_first():
    """What a formula is does not depend on the value that an option has when it is tried."""
    model = model_of_family("granite", logits_scaling=1)
    huggingface.apply(model)
    model.config.logits_scaling = 3.0
    ours = step(model, **batch())
    huggingface.undo(model)
    assert_same_step(ours, step(model, **batch()))
