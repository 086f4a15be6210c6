"""The outputs of a call in training, which made no logits."""

import dataclasses

import pytest
import torch
import torch.utils._pytree as pytree
from torch.distributed.utils import _apply_to_tensors

from parallel_ops.integrations import huggingface
from support.integrations.huggingface_models import OLD, batch, model_of, saved_and_loaded

families = pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])


def outputs_of(family, **given):
    model = model_of(family)
    huggingface.apply(model)
    return model(**batch(), **given)


@families
def test_reading_the_logits_says_how_to_have_them(family):
    outputs = outputs_of(family, output_hidden_states=True)
    assert outputs[0] is outputs.loss is outputs["loss"]
    assert outputs[:1] == (outputs.loss,)
    assert len(outputs.hidden_states) == 3
    assert outputs.get("logits") is None
    assert getattr(outputs, "logits", None) is None
    assert " logits=" not in repr(outputs) and "loss=" in repr(outputs)
    with pytest.raises(AttributeError, match=r"made no logits.* skip_logits=False"):
        _ = outputs.logits
    with pytest.raises(KeyError, match=r"skip_logits=False"):
        _ = outputs["logits"]
    with pytest.raises(KeyError, match="router"):
        _ = outputs["router"]
    for key in (1, 2, -1, slice(None), slice(1, None), slice(0, 2), slice(0, -1)):
        with pytest.raises(IndexError, match=r"skip_logits=False"):
            _ = outputs[key]
    with pytest.raises(IndexError, match=r"skip_logits=False"):
        outputs.to_tuple()


@pytest.mark.parametrize("kept", [5, torch.tensor([1, 4, 6])], ids=["last", "positions"])
def test_logits_to_keep_are_those_that_labels_are_of(kept):
    model, given = model_of("llama"), batch()
    given |= {"labels": given["labels"][:, -5:] if isinstance(kept, int) else given["labels"][:, kept]}
    stock = model(**given, logits_to_keep=kept)
    huggingface.apply(model)
    outputs = model(**given, logits_to_keep=kept)
    torch.testing.assert_close(outputs.loss, stock.loss)
    torch.testing.assert_close(outputs.logits, stock.logits)


@pytest.mark.skipif(OLD, reason="before Transformers 5 routers return no logits here")
def test_the_auxiliary_loss_comes_before_the_logits():
    outputs = outputs_of("mixtral", output_router_logits=True)
    assert outputs[1] is outputs.aux_loss
    assert outputs[:2] == (outputs.loss, outputs.aux_loss)
    with pytest.raises(IndexError, match=r"skip_logits=False"):
        _ = outputs[2]


@families
def test_what_goes_through_all_fields_works(family):
    """As FSDP, DDP, Accelerate, DataParallel and pickling do."""
    outputs = outputs_of(family, use_cache=False, output_hidden_states=True)
    tensors = pytree.tree_leaves(outputs)
    assert len(tensors) == 4
    doubled = [
        _apply_to_tensors(lambda t: t * 2, outputs),
        pytree.tree_map(lambda t: t * 2, outputs),
        type(outputs)({"loss": outputs.loss * 2, "hidden_states": tuple(h * 2 for h in outputs.hidden_states)}),
        dataclasses.replace(outputs, loss=outputs.loss * 2, hidden_states=tuple(h * 2 for h in outputs.hidden_states)),
    ]
    for other in doubled:
        assert type(other) is type(outputs)
        assert other.keys() == outputs.keys()
        assert torch.equal(other.loss, 2 * outputs.loss)
        assert all(torch.equal(a, 2 * b) for a, b in zip(other.hidden_states, outputs.hidden_states, strict=True))
    assert torch.equal(saved_and_loaded(pytree.tree_map(torch.Tensor.detach, outputs)).loss, outputs.loss)


def test_a_head_on_another_device_than_the_last_layer():
    """The meta device stands for a GPU, the CPU for another: ``device_map="auto"`` keeps a tied head on the first."""
    hooks = pytest.importorskip("accelerate.hooks")

    class ToMeta(hooks.ModelHook):
        def post_forward(self, module, output):
            output["last_hidden_state"] = output["last_hidden_state"].to("meta")
            return output

    class FromMeta(hooks.ModelHook):
        def pre_forward(self, module, rows, *, target, **options):
            return (torch.zeros(rows.shape),), {"target": torch.zeros(target.shape, dtype=target.dtype), **options}

    model = model_of("llama")
    huggingface.apply(model)
    hooks.add_hook_to_module(model.model, ToMeta())
    hooks.add_hook_to_module(model.lm_head, FromMeta())
    loss = model(**batch(), use_cache=False, num_items_in_batch=torch.tensor(29)).loss
    assert loss.device.type == "cpu"
