"""Models that somebody changes after ``apply``, or has changed before: the results are stock's, and it is said why."""

import copy
import importlib

import pytest
import torch
import transformers
from torch import nn
from transformers.loss import loss_utils
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

from parallel_ops.integrations import huggingface
from support.integrations.huggingface import LENGTH
from support.integrations.huggingface_changes import (
    OwnMLP,
    Prompted,
    Square,
    another_attention,
    another_attention_of_one_registry,
    exchange,
    hook,
    own_loss,
    own_loss_of_the_class,
    own_loss_type,
    quantise,
    register_attention,
    register_loss,
    replace,
    shifted,
    wrap,
    wrap_tables,
)
from support.integrations.huggingface_models import OLD, assert_same, assert_same_step, batch, kinds, model_of, step

LM = "vocab_parallel_linear_cross_entropy"
MLP, ATTN = "model.layers.0.mlp", "model.layers.0.self_attn"
GPT2_MLP, GPT2 = "transformer.h.0.mlp", "transformer.h.0"
# Family, change, the module that is stock then, and the op that it does not use; None: used, and right all the same.
CHANGES = {
    "an activation": ("llama", exchange(f"{MLP}.act_fn", lambda _: Square()), MLP, "silu_mul"),
    "the activation of one matrix": ("gpt2", exchange(f"{GPT2_MLP}.act", lambda _: nn.SiLU()), GPT2_MLP, "bias_gelu"),
    "a hook on an activation": ("llama", hook(f"{MLP}.act_fn"), MLP, "silu_mul"),
    "a hook before an activation": ("llama", hook(f"{MLP}.act_fn", "forward_pre_hook"), MLP, "silu_mul"),
    "a backward hook on an activation": ("llama", hook(f"{MLP}.act_fn", "backward_hook"), MLP, "silu_mul"),
    "an activation's forward": ("llama", wrap(f"{MLP}.act_fn"), MLP, "silu_mul"),
    "an activation's class": (
        "llama", lambda m, patch: replace(type(m.get_submodule(f"{MLP}.act_fn")), "forward")(m, patch), MLP, "silu_mul",
    ),
    "an MLP": ("llama", exchange(MLP, OwnMLP), None, None),
    "an MLP without the old one": ("llama", exchange(MLP, lambda _: nn.Linear(32, 32)), MLP, "silu_mul"),
    "an MLP's forward": ("llama", wrap(MLP), None, None),
    "an MLP's class": ("llama", replace(modeling_llama.LlamaMLP, "forward"), MLP, "silu_mul"),
    "a projection": ("llama", exchange(f"{MLP}.gate_proj", OwnMLP), None, None),
    "a hook on a projection": ("gpt2", hook(f"{GPT2_MLP}.c_fc"), None, None),
    "a projection's forward": ("gpt2", wrap(f"{GPT2_MLP}.c_fc"), None, None),
    "a norm's class": ("llama", replace(modeling_llama.LlamaRMSNorm, "forward"), "model.norm", "rms_norm"),
    "a norm": ("llama", exchange("model.norm", lambda _: nn.LayerNorm(32)), "model.norm", "rms_norm"),
    "attention around the old one": ("llama", exchange(ATTN, Prompted), None, None),
    "attention's class": ("llama", replace(modeling_llama.LlamaAttention, "forward"), ATTN, "rotary_embedding_qk"),
    "the rotation": (
        "llama", replace(modeling_llama, "apply_rotary_pos_emb"), ATTN, "rotary_embedding_qk",
    ),
    "another attention": ("llama", another_attention, ATTN, "flash_attention"),
    "another attention of one registry": ("llama", another_attention_of_one_registry, ATTN, "flash_attention"),
    "attention registered anew": ("llama", register_attention, ATTN, "flash_attention"),
    "attention of GPT-2 registered anew": ("gpt2", register_attention, f"{GPT2}.attn", "flash_attention"),
    "the tables' forward": ("llama", wrap_tables, None, None),
    "the tables' class": (
        "llama",
        replace(modeling_llama.LlamaRotaryEmbedding, "forward", lambda f: lambda *a, **k: shifted(f(*a, **k))),
        None, None,
    ),
    "a block's attention": ("gpt2", exchange(f"{GPT2}.attn", Prompted), GPT2, "bias_dropout_add"),
    "a block's MLP": ("gpt2", exchange(GPT2_MLP, OwnMLP), GPT2, "bias_dropout_add"),
    "a block's class": ("gpt2", replace(modeling_gpt2.GPT2Block, "forward"), GPT2, "bias_dropout_add"),
    "a hook on a dropout": ("gpt2", hook(f"{GPT2_MLP}.dropout"), GPT2, "bias_dropout_add"),
    "a dropout's forward": ("gpt2", wrap(f"{GPT2}.attn.resid_dropout"), GPT2, "bias_dropout_add"),
    "a hook on a block's MLP": ("gpt2", hook(GPT2_MLP), GPT2, "bias_dropout_add"),
    "the loss in the registry": ("llama", register_loss, "LlamaForCausalLM", LM),
    "the loss in its module": ("llama", replace(loss_utils, "fixed_cross_entropy"), "LlamaForCausalLM", LM),
    "a loss type": ("llama", own_loss_type, "LlamaForCausalLM", LM),
    "a class's loss function": ("llama", own_loss_of_the_class, "LlamaForCausalLM", LM),
    "a loss function": ("llama", own_loss, "LlamaForCausalLM", LM),
    "a head": ("llama", exchange("lm_head", OwnMLP), "LlamaForCausalLM", LM),
    "a hook on the head": ("llama", hook("lm_head"), "LlamaForCausalLM", LM),
    "the head's forward": ("llama", wrap("lm_head"), "LlamaForCausalLM", LM),
    "quantised weights": ("llama", quantise, "LlamaForCausalLM", LM),
}  # fmt: skip
if not OLD:
    EXPERTS = "model.layers.0.mlp.experts"
    CHANGES |= {
        "an expert's activation": (
            "mixtral", exchange(f"{EXPERTS}.act_fn", lambda _: Square()), EXPERTS, "grouped_linear"
        ),
        "a hook on an expert's activation": ("mixtral", hook(f"{EXPERTS}.act_fn"), EXPERTS, "grouped_linear"),
    }  # fmt: skip


def results(model, training):
    model.train(training)
    got, wants_logits = step(model, **batch()), {"skip_logits": False} if huggingface.applied(model) else {}
    with torch.no_grad():
        return got, model(**batch(), **wants_logits).logits


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_changes(name, training, monkeypatch):
    family, change, kept, op = CHANGES[name]
    stock = model_of(family)
    after, before = copy.deepcopy(stock), copy.deepcopy(stock)
    handle = huggingface.apply(after)
    if training:
        step(after, **batch())
        assert not handle.unreplaced
    torch.manual_seed(2)
    change(stock, monkeypatch)
    expected = results(stock, training)
    monkeypatch.undo()

    torch.manual_seed(2)
    change(after, monkeypatch)
    check(results(after, training), expected)
    if op is not None:
        assert op in handle.unreplaced[kept]
        assert op not in handle.replaced.get(kept, ())
        assert f"unreplaced: {kept}: " in repr(handle)
    monkeypatch.undo()

    torch.manual_seed(2)
    change(before, monkeypatch)
    handle = huggingface.apply(before)
    check(results(before, training), expected)
    if op is not None and kept in dict(before.named_modules()) | {"LlamaForCausalLM": None}:
        assert op not in handle.replaced.get(kept, ())


def check(got, expected):
    assert_same_step(got[0], expected[0])
    assert_same(got[1], expected[1])


@pytest.mark.parametrize("path", [f"{GPT2}.attn.resid_dropout", f"{GPT2_MLP}.dropout", f"{GPT2}.attn", GPT2_MLP])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_see_what_dropout_leaves(path, when):
    model, seen = model_of("gpt2", resid_pdrop=0.5), []
    if when == "after":
        huggingface.apply(model)
    model.get_submodule(path).register_forward_hook(
        lambda m, args, out: seen.append((out[0] if isinstance(out, tuple) else out).detach())
    )
    if when == "before":
        huggingface.apply(model)
    step(model, **batch())
    dropped = float((seen[0] == 0).float().mean())
    assert 0.4 < dropped < 0.6


def test_hooks_that_a_call_for_hidden_states_leaves_are_no_reason():
    model = model_of("gpt2", attn_implementation="eager")
    expected = step(model, **batch(), output_hidden_states=True, output_attentions=True)
    handles = {"after": huggingface.apply(copy.deepcopy(model))} if not OLD else {}
    after = model_of("gpt2", attn_implementation="eager")
    handles["before"] = huggingface.apply(after)
    for _ in range(2):
        got = step(after, **batch(), output_hidden_states=True, output_attentions=True)
        assert_same_step(got, expected)
        for name in ("hidden_states", "attentions"):
            for ours, stock in zip(got[0][name], expected[0][name], strict=True):
                assert_same(ours, stock)
    for handle in handles.values():
        assert "bias_dropout_add" in handle.replaced[GPT2]
        assert "bias_dropout_add" not in repr(handle).partition("unused")[2]


def test_parts_called_by_themselves_drop_out():
    """As tools do that look into a block: its attention and MLP outside of it."""
    model = model_of("gpt2", resid_pdrop=0.5)
    huggingface.apply(model)
    step(model, **batch())
    block = model.transformer.h[0]
    y = block.mlp(torch.randn(2, LENGTH, 32))
    assert 0.4 < float((y == 0).float().mean()) < 0.6


def test_norms_take_their_input_by_its_name():
    """As code does that calls a norm by itself: the name is that of the stock forward."""
    llama, gpt2 = model_of("llama"), model_of("gpt2")
    for model, norm, name in ((llama, llama.model.norm, "hidden_states"), (gpt2, gpt2.transformer.ln_f, "input")):
        x = torch.randn(2, LENGTH, 32)
        expected = norm(**{name: x})
        huggingface.apply(model)
        torch.testing.assert_close(norm(**{name: x}), expected)


def test_a_change_that_is_taken_back():
    model = model_of("llama")
    handle = huggingface.apply(model)
    removed = model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: None)
    step(model, **batch())
    assert handle.unreplaced == {MLP: "silu_mul: there are hooks on act_fn, a SiLUActivation"} or OLD
    assert "was not used: there are hooks on act_fn" in repr(handle)
    removed.remove()
    assert not handle.unreplaced
    assert "silu_mul" in handle.replaced[MLP]


def test_tables_of_the_model_alone_are_read_by_half():
    """The op is used where the tables are as the model's own module made them, and the rest is stock's."""
    model, positions = model_of("llama"), torch.arange(LENGTH)[None]
    tables = model.model.rotary_emb(torch.zeros(1, LENGTH, 32), positions)
    handle = huggingface.apply(model)
    seen = []
    for given in (model.model.rotary_emb(torch.zeros(1, LENGTH, 32), positions), tables):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model.model.layers[0].self_attn(torch.randn(2, LENGTH, 32), position_embeddings=given, attention_mask=None)
        seen.append("parallel_ops::rotary_embedding" in {event.key for event in profile.key_averages()})
    assert seen == [True, False]
    assert not handle.unreplaced
    model.model.rotary_emb = type(model_of("llama").model.rotary_emb)(model.config)
    assert handle.unreplaced["model.rotary_emb"].startswith("any op: the LlamaRotaryEmbedding that it was")


def test_copies_see_changes_of_their_own():
    model = model_of("llama")
    huggingface.apply(model)
    other = copy.deepcopy(model)
    other.model.layers[0].mlp.act_fn = nn.ReLU()
    assert "its activation is ReLU since" in huggingface.applied(other).unreplaced[MLP]
    assert not huggingface.applied(model).unreplaced


def test_undo_after_changes():
    model = model_of("gpt2")
    classes = [type(m) for m in model.modules()]
    with huggingface.apply(model):
        model.transformer.h[0].mlp.act = nn.ReLU()
        model.transformer.h[0].attn.resid_dropout.register_forward_hook(lambda *_: None)
        step(model, **batch())
    classes[classes.index(type(transformers.activations.ACT2FN["gelu_new"]))] = nn.ReLU
    assert [type(m) for m in model.modules()] == classes


@kinds
def test_replicas_of_data_parallel(family, monkeypatch):
    """``Trainer`` takes ``DataParallel`` where one process has several GPUs."""
    replication = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(replication, "_get_device_index", lambda device, _: device)
    monkeypatch.setattr(
        replication, "_broadcast_coalesced_reshape", lambda given, devices, detach=False: [given for _ in devices]
    )
    model = model_of(family)
    expected = step(model, **batch())
    huggingface.apply(model)
    replicas = replication.replicate(model, [0, 1])
    assert [[type(m) for m in replica.modules()] for replica in replicas] == [[type(m) for m in model.modules()]] * 2
    assert_same_step(step(model, replicas[1], **batch()), expected)


@kinds
def test_regions_that_accelerate_compiles(family):
    accelerate = pytest.importorskip("accelerate", "1.7", reason="needs accelerate, 1.7 or later")
    model = model_of(family)
    expected = step(model, **batch(), use_cache=False)
    huggingface.apply(model)
    torch._dynamo.reset()
    compiled = accelerate.utils.compile_regions(model, backend="eager")
    assert_same_step(step(model, compiled, **batch(), use_cache=False), expected)
