"""Faults that users found in other systems: the same plans give the losses, norms and weights of one process here.

``docs/design/what_goes_wrong_elsewhere.md`` has the thread of each.
"""

import numpy as np
import pytest
import torch

from support.planning import plans
from support.ranks import elsewhere
from support.ranks.distributed import ranks
from support.runs import trainer as runs

MODELS = runs.MODELS
GQA = {**MODELS["llama"], "num_layers": 4, "num_kv_heads": 1}
# Scores that multiply rows before the experts, and behind them.
LATE = {**MODELS["gpt-oss"]["experts"], "top_k_first": False}
MANY = {**MODELS["experts"]["experts"], "num_experts": 16, "top_k": 1, "groups": 1, "top_groups": 1}
# Of ``uneven_data``.
UNEVEN = {"document_mask": True}
CLIPPED = {"optimizer": {"grad_clip": 0.05}}
SP = {"sequence_parallel": True}

# Name: model, plan, other sections.
CASES = {
    "valid tokens uneven over dp": ("gpt", {"dp": 4, "zero": 2}, {"data": UNEVEN}),
    "valid tokens uneven over micro-batches of a pipeline": ("llama", {"pp": 2, "dp": 2, "zero": 1}, {"data": UNEVEN}),
    "valid tokens uneven over cp": ("llama", {"cp": 2, "dp": 2}, {"data": UNEVEN}),
    "auxiliary losses over uneven valid tokens": ("experts", {"dp": 4, "ep": 2, "zero": 2}, {"data": UNEVEN}),
    "sinks in the gradient norm under tp": ("gpt-oss", {"tp": 4}, {}),
    "sinks in the gradient norm under tp and sp": ("gpt-oss", {"tp": 2, "dp": 2, "zero": 1, **SP}, {}),
    "counts of an auxiliary loss under tp and sp": ("experts", {"tp": 2, "dp": 2, "ep": 2, **SP}, {"data": UNEVEN}),
    "the norm over ep and tp": ("experts", {"tp": 2, "dp": 2, "ep": 4, "zero": 2}, {}),
    "the norm over ep and tp of the same ranks": ("experts", {"tp": 4, "ep": 4}, {}),
    "clipping where a stage has no experts": (
        {**MODELS["experts"], "experts": {**MODELS["experts"]["experts"], "dense_layers": 1}},
        {"pp": 2, "dp": 2, "ep": 2, "zero": 1}, CLIPPED,
    ),
    "clipping where experts have no gradients": (
        {**MODELS["experts"], "freeze": ["*.experts.*"]}, {"dp": 4, "ep": 4, "zero": 2}, CLIPPED,
    ),
    "clipping where experts have no tokens": (
        {**MODELS["experts"], "experts": MANY}, {"dp": 4, "ep": 4, "zero": 3}, CLIPPED,
    ),
    "the router under tp and ep": ("experts", {"tp": 2, "dp": 2, "ep": 2, "zero": 1}, {}),
    "the router under tp and ep, scores behind the experts": (
        {**MODELS["gpt-oss"], "experts": LATE}, {"tp": 2, "dp": 2, "ep": 2, "zero": 1}, {},
    ),
    "the bias of experts under full recomputation": (
        "experts", {"tp": 2, "dp": 2, "ep": 2, "zero": 2}, {"recompute": {"kind": "full"}},
    ),
    "the bias of experts under full recomputation in a pipeline": (
        "experts", {"pp": 2, "tp": 2, "ep": 2, "schedule": "zb-h1"}, {"recompute": {"kind": "full"}},
    ),
    **{
        f"fewer key heads than tensor ranks under {schedule}": (
            {**GQA, "attention_bias": True}, {"pp": 2, "tp": 2, "schedule": schedule, "sequence_parallel": sp}, {},
        )
        for schedule, sp in (("1f1b", True), ("zb-h1", False), ("interleaved", False), ("dualpipe-v", True))
    },
    "adapters of shared key heads in a pipeline": (GQA, {"pp": 2, "tp": 2, "schedule": "zb-h1"}, {"lora": {"rank": 2}}),
    "norms of all heads with shared key heads": (
        {**GQA, "num_kv_heads": 2, "qk_norm": True, "qk_norm_over": "all_heads"}, {"tp": 4, **SP}, {},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def uneven_data(tmp_path_factory):
    """Most documents are one token, after which comes another document, which is no target."""
    draw, tokens = np.random.default_rng(0), np.zeros(3000, "uint16")
    for start in draw.choice(2900, 120, replace=False):
        tokens[start : start + 12] = draw.integers(1, runs.VOCABULARY, 12)
    path = tmp_path_factory.mktemp("uneven") / "tokens.bin"
    tokens.tofile(path)
    return path


# Each is near a case that stays.
LONG = {
    "valid tokens uneven over cp", "sinks in the gradient norm under tp and sp", "the norm over ep and tp",
    "clipping where experts have no tokens", "the router under tp and ep",
    "the bias of experts under full recomputation", "fewer key heads than tensor ranks under 1f1b",
    "fewer key heads than tensor ranks under interleaved", "fewer key heads than tensor ranks under zb-h1",
    "the norm over ep and tp of the same ranks", "adapters of shared key heads in a pipeline",
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.runs] * (name in LONG)) for name in CASES])
def test_a_plan_that_computes_something_else_elsewhere(data, uneven_data, name):
    model, plan, sections = CASES[name]
    data = uneven_data if sections.get("data") is UNEVEN else data
    common = {"run": {"steps": 3}, **sections, "model": MODELS[model] if isinstance(model, str) else model}
    batch = {"global_batch": 8, "micro_batch": 1}
    alone = {key: value for key, value in common.items() if key != "recompute"}
    want = plans.steps(0, runs.settings_of(data, **alone, parallel=batch))
    settings = runs.settings_of(data, **common, parallel={**batch, **plan})
    for rank, got in enumerate(ranks(settings.plan.gpus).run(plans.steps, settings)):
        assert plans.differences(settings, got, want) == [], (name, rank)


@pytest.mark.parametrize("plan", [{"dp": 4, "zero": 2}, {"dp": 4, "dp_replicate": 2, "zero": 1}, {"dp": 4}], ids=str)
def test_losses_of_several_tokens_over_uneven_valid_tokens(uneven_data, plan):
    """Each is normalised by the valid tokens of the step, whatever ranks and micro-batches have."""
    batch = {"global_batch": 16, "micro_batch": 2}
    want = elsewhere.two_heads(0, runs.settings_of(uneven_data, data=UNEVEN, parallel={**batch, "micro_batch": 16}))
    settings = runs.settings_of(uneven_data, data=UNEVEN, parallel={**batch, **plan})
    for got in ranks(4).run(elsewhere.two_heads, settings):
        assert plans.differences(settings, got, want) == []


def test_valid_tokens_are_uneven(uneven_data):
    """What the cases above are about: replicas and micro-batches of a step have other numbers of targets."""
    settings = runs.settings_of(uneven_data, data=UNEVEN, parallel={"global_batch": 8, "micro_batch": 1})
    trainer = runs.trainer_of(settings)
    counts = [int((batch.targets != -100).sum()) for batch in trainer.loader.step(0)]
    trainer.loader.close()
    assert len(set(counts)) > 3 and max(counts) > 2 * min(counts)


def test_a_model_on_a_sub_mesh_reduces_over_its_own_ranks_alone():
    """Two pairs of ranks with other weights and tokens: a reduction over all four would mix them."""
    results = ranks(4).run(elsewhere.on_a_sub_mesh)
    for seed, (want, grads) in enumerate(elsewhere.both_alone()):
        for loss, found in results[2 * seed : 2 * seed + 2]:
            assert loss == pytest.approx(want, rel=1e-6)
            for name, grad in found.items():
                torch.testing.assert_close(grad, grads[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_sequence_parallelism_changes_no_norm_in_bfloat16(data):
    """26.3 and 28.9 elsewhere."""
    norms = []
    for sp in (False, True):
        settings = runs.settings_of(
            data, model=MODELS["llama"], run={"steps": 2}, precision={"dtype": "bf16"},
            parallel={"tp": 4, "global_batch": 8, "micro_batch": 2, "sequence_parallel": sp},
        )  # fmt: skip
        norms += [[norm for _, norm in ranks(4).run(runs.steps_of, settings)[0]]]
    assert norms[0] == pytest.approx(norms[1], rel=5e-3)
