"""Transformers' models with and without ``huggingface.apply``: the same numbers, names and objects."""

import copy
import re
import runpy
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from parallel_ops.integrations import huggingface
from support.integrations.huggingface import LENGTH, VOCAB
from support.integrations.huggingface_models import (
    CONFIGS,
    EXPERTS,
    OLD,
    assert_same,
    assert_same_step,
    batch,
    fully_sharded_steps,
    kinds,
    model_of,
    saved_and_loaded,
    step,
    tensor_parallel_step,
)
from support.ranks.distributed import ranks

families = pytest.mark.parametrize("family", CONFIGS)


@families
def test_steps_are_those_of_stock(family):
    """Whole and padded, by the mean and by the number of items that Trainer passes, with a cache and without one."""
    model = model_of(family)
    cases = [
        batch(),
        batch(padded=True) | {"num_items_in_batch": torch.tensor(29)},
        batch() | {"use_cache": False, "num_items_in_batch": 7},
    ]
    expected = [step(model, **case) for case in cases]
    applied = huggingface.apply(model)
    assert not applied.unreplaced or (OLD and family in EXPERTS)
    for case, stock in zip(cases, expected, strict=True):
        ours = step(model, **case)
        assert "logits" not in ours[0]
        assert_same_step(ours, stock)
        with_logits = step(model, **case, skip_logits=False)
        assert_same(with_logits[0].logits, stock[0].logits)
        assert_same_step(with_logits, stock)


def in_the_given_dtype(family):
    """Stock's default for experts has no float64, and is float32 under autocast."""
    return {"experts_implementation": "eager"} if family in EXPERTS else {}


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"], ids=str)
def test_errors_in_16_bits_are_at_most_twice_those_of_stock(family, dtype):
    model = model_of(family, **in_the_given_dtype(family))
    model = model if dtype == "autocast" else model.to(dtype)
    oracle = step(copy.deepcopy(model).double(), **batch())
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        stock = step(model, **batch())
        huggingface.apply(model)
        ours = step(model, **batch())
    for name, gradient in oracle[1].items():
        error, stock_error = ((r[1][name].double() - gradient).norm() for r in (ours, stock))
        assert error <= 2 * stock_error


def test_dropout_drops_the_share_that_it_should_and_is_recomputed_alike():
    """The masks are others than stock's, so shares and gradients under checkpointing stand in for values."""
    model = model_of("gpt2", resid_pdrop=0.3, attn_pdrop=0.3)
    huggingface.apply(model)
    torch.manual_seed(3)
    expected = step(model, **batch(), use_cache=False)
    torch.manual_seed(4)
    assert step(model, **batch(), use_cache=False)[0].loss != expected[0].loss
    model.gradient_checkpointing_enable()
    torch.manual_seed(3)
    assert_same_step(step(model, **batch(), use_cache=False), expected)
    block = model.transformer.h[0]
    dropped = []
    block.register_forward_hook(lambda _, inputs, output: dropped.append((inputs[0], output)))
    with torch.no_grad():
        for weight in (block.attn.c_proj.weight, block.mlp.c_proj.weight, block.mlp.c_proj.bias):
            weight.zero_()
        block.attn.c_proj.bias.fill_(7.0)
        model(torch.randint(VOCAB, (64, 32)), use_cache=False)
    x, y = dropped[0][0], dropped[0][1][0] if isinstance(dropped[0][1], tuple) else dropped[0][1]
    kept = (y - x).abs() > 1
    assert abs(float(kept.float().mean()) - 0.7) < 0.01
    torch.testing.assert_close((y - x)[kept], torch.full_like(y[kept], 10.0))


@kinds
def test_gradient_checkpointing(family):
    model = model_of(family)
    expected = step(model, **batch(), use_cache=False)
    huggingface.apply(model)
    model.gradient_checkpointing_enable()
    assert_same_step(step(model, **batch(), use_cache=False), expected)


@kinds
def test_compiles_to_one_graph_that_calls_the_ops(family):
    model = model_of(family)
    cases = [batch() | {"use_cache": False}, batch(padded=True) | {"use_cache": False}]
    expected = [step(model, **case) for case in cases]
    applied = huggingface.apply(model)
    called = set()

    def backend(graph, _):
        called.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for case, stock in zip(cases, expected, strict=True):
        assert_same_step(step(model, compiled, **case), stock)
    ops = {op.removesuffix("_qk") for names in applied.replaced.values() for op in names}
    ops.remove("flash_attention")  # Transformers makes a mask whenever it is traced
    assert {f"parallel_ops.{op}.default" for op in ops} <= called


@kinds
def test_trainer(family, tmp_path):
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(VOCAB, (12, LENGTH))]

    def losses(model):
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
            logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])
        trainer.train()
        evaluated = trainer.predict(rows[:4])
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], evaluated

    stock, stock_predicted = losses(model_of(family))
    model = model_of(family)
    huggingface.apply(model)
    ours, predicted = losses(model)
    assert len(ours) == 3
    assert ours == pytest.approx(stock, rel=1e-5)
    assert predicted.metrics["test_loss"] == pytest.approx(stock_predicted.metrics["test_loss"], rel=1e-4)
    assert predicted.predictions.shape == stock_predicted.predictions.shape


@kinds
def test_fully_sharded(family):
    stock, ours = (ranks(2).run(fully_sharded_steps, family, drop_in) for drop_in in (False, True))
    for of_stock, of_ours in zip(stock, ours, strict=True):
        for expected, got in zip(of_stock, of_ours, strict=True):
            assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(OLD, reason="the plan is for the modules of Transformers 5")
@pytest.mark.parametrize("sharded_loss", [False, True])
def test_torch_tensor_and_sequence_parallelism_after_apply(sharded_loss):
    (stock, _), *_ = ranks(2).run(tensor_parallel_step, False, sharded_loss)
    for ours, counted in ranks(2).run(tensor_parallel_step, True, sharded_loss):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
        assert "unused: 5 x rms_norm: it got a DTensor" in counted


@kinds
def test_parameters_classes_and_files_are_those_of_stock(family, tmp_path):
    model = model_of(family)
    parameters = dict(model.named_parameters())
    classes = [type(m) for m in model.modules()]
    applied = huggingface.apply(model)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert [type(m).__name__ for m in model.modules()] == [cls.__name__ for cls in classes]
    assert all(isinstance(m, cls) for m, cls in zip(model.modules(), classes, strict=True))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is classes[0]
    assert all(torch.equal(p, parameters[name]) for name, p in loaded.named_parameters())
    expected = step(model, **batch())
    for same in (copy.deepcopy(model), saved_and_loaded(model)):
        assert [type(m) for m in same.modules()] == [type(m) for m in model.modules()]
        assert_same_step(step(same, **batch()), expected)
    applied.undo()
    assert [type(m) for m in model.modules()] == classes
    assert step(model, **batch())[0].logits is not None


def test_says_what_it_replaced_and_what_not():
    model = model_of("llama")
    layer = model.model.layers[0]
    layer.mlp.act_fn = nn.ReLU()
    layer.input_layernorm.forward = layer.input_layernorm.forward
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: None)
    model.loss_function = nn.functional.cross_entropy
    model.model.layers[1].input_layernorm = nn.RMSNorm(32)
    applied = huggingface.apply(model)
    attention = ("rotary_embedding_qk", "flash_attention")
    assert applied.replaced["model.layers.1.self_attn"] == attention
    assert applied.replaced["model.norm"] == ("rms_norm",)
    for name, reason in {
        "model.layers.0.mlp": "silu_mul: its activation is ReLU, for which there is no op",
        "model.layers.0.input_layernorm": "rms_norm: something else has replaced its forward",
        "model.layers.1.mlp": "silu_mul: there are hooks on its activation, a SiLU",
        "model.layers.1.input_layernorm": "any op: it is a RMSNorm, which is not known",
        "LlamaForCausalLM": "vocab_parallel_linear_cross_entropy: it has a loss function of its own",
    }.items():
        assert applied.unreplaced[name].startswith(reason)
        assert f"{name}: {reason}" in repr(applied)
    assert "3 x rms_norm" in repr(applied)
    applied.undo()
    assert "undone" in repr(applied)


def test_own_subclasses_and_other_heads():
    class Mine(transformers.LlamaForCausalLM):
        pass

    class Square(LlamaMLP):
        def forward(self, x):
            return super().forward(x) ** 2

    model = Mine(CONFIGS["llama"]()).train()
    model.model.layers[0].mlp.__class__ = Square
    applied = huggingface.apply(model)
    assert "Mine" in applied.replaced
    assert applied.unreplaced == {
        "model.layers.0.mlp": f"silu_mul: its class {__name__}.{Square.__qualname__} overrides the forward of LlamaMLP"
    }
    classifier = transformers.LlamaForSequenceClassification(CONFIGS["llama"]())
    assert not huggingface.apply(classifier).unreplaced
    twice = transformers.GPT2DoubleHeadsModel(CONFIGS["gpt2"]())
    assert "causal language model alone" in huggingface.apply(twice).unreplaced["GPT2DoubleHeadsModel"]


def test_an_adapter_around_a_linear_takes_part():
    """PEFT puts a module of its own in the place of a linear, before or after."""

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return self.base(x) + x.sum(-1, keepdim=True)

    def adapt(model):
        for block in model.transformer.h:
            block.mlp.c_fc = Adapter(block.mlp.c_fc)
        model.lm_head = Adapter(model.lm_head)

    stock, before, after = (model_of("gpt2") for _ in range(3))
    adapt(stock)
    expected = step(stock, **batch())
    adapt(before)
    reason = f"its lm_head is a {__name__}.{Adapter.__qualname__}"
    assert reason in huggingface.apply(before).unreplaced["GPT2LMHeadModel"]
    huggingface.apply(after)
    adapt(after)
    for model in (before, after):
        assert_same_step(step(model, **batch()), expected)


def test_the_example_prints_the_same_numbers_twice(capsys):
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "huggingface_drop_in.py"))
    rows = re.findall(r"(\d\.\d{6}) +(\d\.\d{6}) +(\d\.\d{6}) +(\d\.\d{6})", capsys.readouterr().out)
    assert len(rows) == 16
    for loss, our_loss, norm, our_norm in rows:
        assert float(our_loss) == pytest.approx(float(loss), abs=1e-5)
        assert float(our_norm) == pytest.approx(float(norm), abs=1e-5)
