"""What has been replaced and what not: asked of any model, undone without a handle, counted in steps, refused."""

import copy

import pytest
import torch
import transformers
from torch import nn

from parallel_ops.integrations import huggingface
from support.integrations.huggingface import LENGTH, VOCAB
from support.integrations.huggingface_models import (
    CONFIGS,
    assert_same,
    assert_same_step,
    batch,
    kinds,
    model_of,
    saved_and_loaded,
    step,
)

LOSS = "vocab_parallel_linear_cross_entropy"


def classes_of(model):
    return [type(m) for m in model.modules()]


@kinds
def test_copies_and_loaded_models_are_undone_without_their_handle(family):
    model = model_of(family)
    stock = classes_of(model)
    expected = step(model, **batch())
    assert huggingface.applied(model) is None
    with pytest.raises(ValueError, match="undo: nothing of this"):
        huggingface.undo(model)
    handle = huggingface.apply(model)
    step(model, **batch())
    for other in (copy.deepcopy(model), saved_and_loaded(model), model):
        found = huggingface.applied(other)
        assert found.replaced == handle.replaced
        assert found.unreplaced == handle.unreplaced
        assert ("unused" in repr(found)) == ("unused" in repr(handle))
        huggingface.undo(other)
        assert classes_of(other) == stock
        assert not any(name.startswith("_parallel_ops") for m in other.modules() for name in m.__dict__)
        assert huggingface.applied(other) is None
        assert_same_step(step(other, **batch()), expected)
    with pytest.raises(RuntimeError, match="by another handle"):
        handle.undo()


def test_a_half_replaced_model_is_reported_and_undone():
    model = model_of("llama")
    huggingface.apply(model)
    other = model_of("llama")
    model.model.layers[0] = other.model.layers[0]
    model.model.norm = other.model.norm
    found = huggingface.applied(model)
    assert found.unreplaced["model.norm"] == "rms_norm: it could be replaced, and is not"
    assert "model.layers.0.self_attn" in found.unreplaced
    assert "model.layers.1.self_attn" in found.replaced
    with pytest.raises(ValueError, match=r"applied to this model already .*undo\(model\) first"):
        huggingface.apply(model)
    huggingface.undo(model)
    assert classes_of(model) == classes_of(other)
    assert not huggingface.apply(model).unreplaced
    part = huggingface.applied(model.model.layers[0])
    assert part.replaced["mlp"] == ("silu_mul",)


@kinds
def test_new_models_of_a_served_class_are_stock(family, tmp_path):
    model = model_of(family)
    stock = classes_of(model)
    handle = huggingface.apply(model)
    model.save_pretrained(tmp_path)
    kind = type(model)
    for made in (kind(CONFIGS[family]()), kind.from_pretrained(tmp_path), kind._from_config(CONFIGS[family]())):
        assert classes_of(made) == stock
        assert huggingface.apply(made).replaced == handle.replaced
    loaded = kind.from_pretrained(tmp_path).train()
    huggingface.apply(loaded)
    assert_same_step(step(loaded, **batch()), step(model, **batch()))
    with pytest.raises(TypeError, match=rf"Mine: its base is the class of a replaced module.*\.{kind.__name__}"):
        type("Mine", (kind,), {})(model.config)


@kinds
@pytest.mark.parametrize("first", ["apply", "offload"])
@pytest.mark.parametrize("where", ["cpu_offload", "disk"])
def test_offloaded_models_take_norms_and_the_loss(family, first, where, tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def offload(model):
        if where == "cpu_offload":
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
            return
        base = "transformer" if family == "gpt2" else "model"
        layers, embedding = ("h", "wte") if family == "gpt2" else ("layers", "embed_tokens")
        rest = [f"{base}.{name}" for name, _ in getattr(model, base).named_children() if name != layers]
        places = {f"{base}.{layers}.0": "disk", f"{base}.{layers}.1": "cpu", "lm_head": "cpu"} | dict.fromkeys(
            rest, "cpu"
        )
        assert f"{base}.{embedding}" in places
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)

    whole = huggingface.apply(model_of(family)).replaced
    model = model_of(family).eval()
    if family == "gpt2":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    with torch.no_grad():
        expected = model(**batch())
    stock = classes_of(model)
    if first == "apply":
        handle = huggingface.apply(model)
        offload(model)
    else:
        offload(model)
        handle = huggingface.apply(model)
    assert handle.replaced == whole
    assert not handle.unreplaced
    with torch.no_grad():
        assert_same(model(**batch()).logits, expected.logits)
        ours = model(**batch(), skip_logits=True)
        assert "logits" not in ours
        assert_same(ours.loss, expected.loss)
    assert not [line for line in repr(handle).split("\n") if "unused" in line]
    handle.undo()
    assert classes_of(model) == stock
    with torch.no_grad():
        assert torch.equal(model(**batch()).logits, expected.logits)


def test_reasons_name_modules():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model_of("llama"), peft.LoraConfig(target_modules=["lm_head", "q_proj"]))
    handle = huggingface.apply(model)
    assert handle.unreplaced == {
        "base_model.model": f"{LOSS}: its lm_head is a peft.tuners.lora.layer.Linear"
    }  # fmt: skip
    model = model_of("llama")
    norm = model.model.norm
    norm.forward = norm.forward
    assert (
        "(transformers.models.llama.modeling_llama.LlamaRMSNorm.forward)"
        in huggingface.apply(model).unreplaced["model.norm"]
    )


def test_ops_that_a_step_does_not_use_are_printed():
    model = model_of("llama")
    handle = huggingface.apply(model)
    assert "unused" not in repr(handle)
    step(model, **batch())
    assert "unused" not in repr(handle)
    step(model, **batch(padded=True))
    assert "unused: 2 x flash_attention: it got a mask (in 2 calls)" in repr(handle)
    step(model, **batch(padded=True), skip_logits=False)
    assert "unused: 2 x flash_attention: it got a mask (in 4 calls)" in repr(handle)
    assert f"unused: 1 x {LOSS}: it made logits (in 1 calls)" in repr(handle)
    assert sorted(repr(huggingface.applied(model)).split("\n")) == sorted(repr(handle).split("\n"))
    handle.undo()
    assert "unused" not in repr(handle)


def test_a_forward_that_a_trainer_calls_instead_is_printed():
    model = model_of("llama")
    handle = huggingface.apply(model)
    hidden = model.model(batch()["input_ids"]).last_hidden_state  # and a loss of its own
    model.lm_head(hidden).sum().backward()
    model.model.layers[0].mlp.forward = lambda x: x
    assert f"unused: 1 x {LOSS}: it was not called" in repr(handle)
    assert repr(handle).count("unused") == 1


def test_evaluation_and_generation_are_no_reasons():
    model = model_of("llama").eval()
    handle = huggingface.apply(model)
    with torch.no_grad():
        model(**batch())
        model.generate(batch()["input_ids"], max_new_tokens=3, pad_token_id=0)
    assert "unused" not in repr(handle)


def test_counts_are_not_saved():
    model = model_of("llama")
    huggingface.apply(model)
    step(model, **batch(padded=True))
    assert "unused" in repr(huggingface.applied(model))
    for other in (copy.deepcopy(model), saved_and_loaded(model)):
        assert "unused" not in repr(huggingface.applied(other))


@pytest.mark.skipif(not hasattr(transformers, "Qwen3Config"), reason="Transformers before 4.51")
def test_compiled_code_is_not_counted():
    model = model_of("qwen3")
    handle = huggingface.apply(model)
    torch._dynamo.reset()
    torch.compile(model, backend="eager")(**batch(), use_cache=False).loss.backward()
    assert "unused" not in repr(handle)


@kinds
def test_torch_func(family):
    """Parameters from outside and maps work; its gradients are an error of ours, and backward works in their place."""
    model = model_of(family)
    given = batch() | {"use_cache": False}
    parameters = {name: (1.01 * p).detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), given).loss

    def gradients():
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        return torch.autograd.grad(loss(leaves), list(leaves.values()))

    def logits():
        def of_one(ids):
            return torch.func.functional_call(model, parameters, (ids[None],), {"use_cache": False}).logits

        return torch.vmap(of_one)(given["input_ids"])

    expected = gradients()
    mapped = None if family == "mixtral" else logits()  # whose experts no map goes through
    huggingface.apply(model)
    for got, stock in zip(gradients(), expected, strict=True):
        assert_same(got, stock)
    if mapped is not None:
        assert_same(logits(), mapped)
    with pytest.raises(RuntimeError, match=r"norm: torch.func's grad, .* do not go through this op; call \.backward"):
        torch.func.grad(loss)(parameters)


def test_other_attention_is_left_alone():
    model = model_of("llama", attn_implementation="eager")
    applied = huggingface.apply(model)
    assert "set to 'eager' attention" in applied.unreplaced["model.layers.0.self_attn"]
    assert len(model(**batch(), output_attentions=True).attentions) == 2


def test_some_ops():
    model = model_of("gpt2")
    applied = huggingface.apply(model, ops=["norm", "loss"], skip_logits=False)
    assert {op for ops in applied.replaced.values() for op in ops} == {
        "layer_norm",
        "vocab_parallel_linear_cross_entropy",
    }
    assert model(**batch()).logits.shape == (2, LENGTH, VOCAB)
    assert "logits" not in model(**batch(), skip_logits=True)
    assert len(model(**batch(), return_dict=False)) == len(model_of("gpt2")(**batch(), return_dict=False))


def test_errors_name_what_is_wrong_and_change_nothing():
    opt = transformers.OPTConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, ffn_dim=32)
    with pytest.raises(TypeError, match="OPTForCausalLM, which is no model of transformers that docs/huggingface"):
        huggingface.apply(transformers.OPTForCausalLM(opt))
    with pytest.raises(TypeError, match="model is or contains a Linear"):
        huggingface.apply(nn.Linear(2, 2))
    model = model_of("llama")
    classes = [type(m) for m in model.modules()]
    with pytest.raises(TypeError, match="OPTModel"):
        huggingface.apply(nn.ModuleList([model, transformers.OPTModel(opt)]))
    with pytest.raises(ValueError, match=r"ops must be 'all' or some of norm, .* got 'norms'"):
        huggingface.apply(model, ops=["norms"])
    with pytest.raises(ValueError, match=r"nothing of this LlamaForCausalLM can be replaced: it has no module"):
        huggingface.apply(model, ops="residual")
    assert [type(m) for m in model.modules()] == classes
    applied = huggingface.apply(model)
    with pytest.raises(ValueError, match="are applied to this model already"):
        huggingface.apply(model)
    model.forward = model.forward  # as Accelerate's mixed precision wraps it
    with pytest.raises(RuntimeError, match="LlamaForCausalLM has another class or forward since apply"):
        applied.undo()
    del model.forward
    applied.undo()
    with pytest.raises(RuntimeError, match="already undone"):
        applied.undo()
