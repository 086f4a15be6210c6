"""Questions as users put them, beside what published recipes of these models run."""

from dataclasses import replace

import pytest

from parallel_ops.planner import SearchOptions, presets, search
from parallel_ops.planner.cli import tables
from parallel_ops.planner.export import TARGETS, systems
from parallel_ops.planner.search.result import features

# Model, tokens of a sequence (0: the model's), cluster, batch, system, fields of the recipes.
QUESTIONS = {
    "Llama 2 7B: FSDP (torchtitan), DDP (Megatron-Bridge)": ("llama2-7b", 0, "h100x8", 1024, "", ({"dp": 8},)),
    "the same in torchtitan": ("llama2-7b", 0, "h100x8", 1024, "torchtitan", ({"dp": 8, "zero": 3},)),
    "8B on 40 GB: FSDP with recomputation": ("llama3-8b", 0, "a100-40x8", 512, "", ({"dp": 8, "zero": 3},)),
    "13B on 24 GB over PCIe: ZeRO-3 offload": ("llama2-13b", 0, "rtx3090x8", 512, "", ({"dp": 8, "zero": 3},)),
    "32B at 32K: TP 8 and CP 2 (Megatron-Bridge)": (
        "qwen3-32b", 32768, "h100x16", 128, "", ({"tp": 8, "cp": 2}, {"tp": 8, "pp": 2}),
    ),
    "70B in torchtitan: FSDP": ("llama3-70b", 0, "h100x64", 512, "torchtitan", ({"dp": 64, "zero": 3},)),
    "30B-A3B on one node: EP 8 and FSDP": ("qwen3-30b-a3b", 0, "h100x8", 512, "", ({"ep": 8, "tp": 1, "pp": 1},)),
    "8B at 1M tokens: TP and CP": (
        "llama3-8b", 2**20, "h100x64", 4, "", ({"tp": 8, "cp": 8}, {"tp": 4, "cp": 16}, {"cp": 64}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_published_recipe_is_near_the_top_or_the_text_has_it(question):
    name, seq, cluster, batch, target, recipes = QUESTIONS[question]
    model = presets.model(name)
    model = replace(model, seq_length=seq) if seq else model
    found = search(model, presets.cluster(cluster), batch=batch, options=SearchOptions(target=target))

    def published(plan):
        return any(all(getattr(plan, key) == value for key, value in recipe.items()) for recipe in recipes)

    in_view = [found.plain] if found.plain else []
    assert any(published(each.plan) for each in (*found.plans[:5], *in_view))
    if found.plain:
        assert any(found.plain.plan.describe() in line for line in tables.beside(found))
    # The first is what a public system runs, and nothing simpler is as fast.
    best = found.best
    assert target or set(systems(model, best.cluster, best.plan)) - {"parallel_ops"}
    near = [each for each in found.plans if each.step <= 1.02 * min(p.step for p in found.plans if not p.tight)]
    assert all(features(each.plan) >= features(best.plan) for each in near if not each.tight)
    if found.own:
        assert systems(model, best.cluster, found.own.plan) == ("parallel_ops",) and found.own.step < best.step


def test_tensor_parallelism_counts_by_its_ranks():
    """No TP 8 where TP 4 with ZeRO is as fast, and ZeRO before either."""
    found = search(presets.model("llama3-8b"), presets.cluster("a100-40x8"), batch=512)
    assert found.best.plan.tp <= 4
    plan = found.best.plan
    order = [replace(plan, dp=8 // tp, tp=tp, zero=zero, sequence_parallel=tp > 1)
             for tp, zero in ((1, 0), (1, 1), (1, 3), (2, 0), (4, 3), (8, 0))]  # fmt: skip
    assert [features(each) for each in order] == sorted(features(each) for each in order)
    assert set(TARGETS) > {"parallel_ops"}
