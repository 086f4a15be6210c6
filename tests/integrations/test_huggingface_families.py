"""Every family of docs/huggingface.md with and without ``huggingface.apply``."""

import copy
import importlib.util
import inspect
import sys

import pytest
import torch

from parallel_ops.integrations import huggingface
from parallel_ops.integrations.huggingface._families import COMPOSITES, FAMILIES
from parallel_ops.integrations.huggingface._trial import _Exact as Exact
from support.integrations import huggingface_models
from support.integrations.huggingface_families import (
    DENSE,
    END,
    HYBRIDS,
    IMAGE,
    KEPT,
    START,
    WITH_IMAGES,
    composite_of,
    model_of,
)
from support.integrations.huggingface_models import CONFIGS, OLD, batch, step, with_drawn_vectors

families = pytest.mark.parametrize("family", DENSE)
TOLERANCE = 3e-6
# One for each formula of a norm, an MLP, a rotation and logits that other tests do not have in 16 bits.
FORMULAS = ["olmo", "gemma", "gemma2", "phi3", "glm4", "starcoder2", "granite", "cohere2"]


def error(got, expected):
    return float((got.detach() - expected.detach()).norm() / expected.detach().norm())


def oracle_of(model, **given):
    """The step of the model in fp64, also what it computes in fp32 whatever its dtype: norms, rotations, softmax."""
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in given.items()}
    with Exact():
        return step(copy.deepcopy(model).double(), **wide)


def assert_same_step(got, stock, oracle):
    """The errors of gradients are at most twice those of stock; some gradients are zero in exact arithmetic."""
    assert error(got[0].loss, stock[0].loss) < TOLERANCE
    assert got[1].keys() == oracle[1].keys()
    scale = max(float(gradient.norm()) for gradient in oracle[1].values())
    for name, gradient in oracle[1].items():
        mine, theirs = (float((r[1][name].double() - gradient).norm()) for r in (got, stock))
        slack = torch.finfo(got[1][name].dtype).eps / 8 * scale
        assert mine <= 2 * theirs + slack, f"{name}: error {mine:.3e}, stock's is {theirs:.3e}, slack {slack:.3e}"


def test_every_family_is_tested():
    tested = {name.partition("-")[0] for name in (*DENSE, *CONFIGS, *WITH_IMAGES, *HYBRIDS)}
    assert {*FAMILIES, *COMPOSITES} - tested <= ({package for package in FAMILIES if not in_this_version(package)})


def in_this_version(package):
    return importlib.util.find_spec(f"transformers.models.{package}") is not None


@families
def test_logits_losses_and_gradients_are_those_of_stock(family):
    model = model_of(family)
    cases = [batch(), batch(padded=True) | {"num_items_in_batch": torch.tensor(29)}, batch() | {"use_cache": False}]
    expected = [(step(model, **case), oracle_of(model, **case)) for case in cases]
    applied = huggingface.apply(model)
    kept = KEPT.get(family, {})
    assert set(applied.unreplaced) == {name for name, _ in model.named_modules() if name.endswith(tuple(kept))}
    for name, reason in applied.unreplaced.items():
        assert kept[name.rpartition(".")[2]] in reason
    called = {op for ops in applied.replaced.values() for op in ops}
    assert {"vocab_parallel_linear_cross_entropy", "rotary_embedding_qk"} <= called
    for case, (stock, oracle) in zip(cases, expected, strict=True):
        ours = step(model, **case)
        assert "logits" not in ours[0]
        assert_same_step(ours, stock, oracle)
        with_logits = step(model, **case, skip_logits=False)
        assert error(with_logits[0].logits, stock[0].logits) < TOLERANCE
        assert_same_step(with_logits, stock, oracle)


@pytest.mark.parametrize("family", [*CONFIGS, *DENSE])
def test_generation_is_that_of_stock_token_by_token(family):
    model = (model_of if family in DENSE else huggingface_models.model_of)(family).eval()
    prompts = batch()["input_ids"][:, :6].clamp(min=3)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])  # padded on the left
    length = {"max_new_tokens": 14, "min_new_tokens": 14}
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, **length}
    expected = model.generate(prompts, **options)
    with huggingface.apply(model):
        assert torch.equal(model.generate(prompts, **options), expected)
    assert len(expected[0].unique()) > 3


composites = pytest.mark.parametrize("name", [] if OLD else WITH_IMAGES)  # other names before Transformers 5


def composite_batch(extra):
    ids = batch()["input_ids"]
    if extra is None:
        return {"input_ids": ids, "labels": ids}
    ids[:, 1:7] = torch.tensor([START, IMAGE, IMAGE, IMAGE, IMAGE, END])
    types = {name: (ids == IMAGE).long() for name in ("mm_token_type_ids", "token_type_ids")}
    return {"input_ids": ids, "labels": ids.masked_fill(ids >= START, -100), **types, **extra}


@composites
def test_of_models_of_text_and_images_the_text_model_is_served(name):
    torch.manual_seed(0)
    model, extra = composite_of(name)
    model = with_drawn_vectors(model).train()
    known = inspect.signature(type(model).forward).parameters
    given = {key: value for key, value in composite_batch(extra).items() if key in known}
    expected, oracle = step(model, **given), oracle_of(model, **given)
    applied = huggingface.apply(model)
    served = [path for path, ops in applied.replaced.items() if ops]
    assert all(path.startswith("model.language_model.") for path in served)
    called = {op for path in served for op in applied.replaced[path]}
    kept = {"model.visual"} if "qwen" in name else {"model.vision_tower", "model.multi_modal_projector"}
    kept.add(type(model).__name__)
    if hasattr(sys.modules[type(model).__module__], "apply_multimodal_rotary_pos_emb"):  # to 5.16
        kept |= {f"model.language_model.layers.{i}.self_attn" for i in range(2)}
    else:
        called.remove("rotary_embedding_qk")
    assert set(applied.unreplaced) == kept
    assert {"rms_norm", "flash_attention"} < called and "rotary_embedding_qk" not in called
    got = step(model, **given)
    assert error(got[0].logits, expected[0].logits) < TOLERANCE
    assert_same_step(got, expected, oracle)
    prompt = {key: v[:, :8] if v.dim() == 2 and v.shape[1] == 20 else v for key, v in given.items() if key != "labels"}
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    ours = model.eval().generate(**prompt, **options)
    applied.undo()
    assert torch.equal(model.generate(**prompt, **options), ours)


@pytest.mark.parametrize("family", [name for name in FORMULAS if name in DENSE])
def test_errors_in_16_bits_are_at_most_twice_those_of_stock(family):
    model = model_of(family).to(torch.bfloat16)
    oracle = oracle_of(model, **batch())
    stock = step(model, **batch())
    huggingface.apply(model)
    ours = step(model, **batch())
    for name, gradient in oracle[1].items():
        mine, theirs = (float((r[1][name].double() - gradient).norm() / gradient.norm()) for r in (ours, stock))
        assert mine <= 2 * theirs, name
