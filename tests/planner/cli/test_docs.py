"""docs/planner.md: its tables are what the code makes, and its case studies choose what they should, for its reasons.

One file, since both need the same searches, and files may run in different processes. The table of errors is in
``test_validation.py``, beside the tests of the report.
"""

import re
from dataclasses import replace

import pytest

from parallel_ops.planner import estimate, presets, search
from parallel_ops.planner.feasibility import quick_memory_problem
from parallel_ops.planner.placement import leaves_node, stage_layers, stage_layout
from parallel_ops.planner.results import GIB
from parallel_ops.planner.rules import RULES
from parallel_ops.planner.validation.published import measurements
from support.planning.planner_scenarios import (
    DOCUMENT,
    EXPERTS,
    FOUND,
    LONG,
    OFFLOADED,
    SCENARIOS,
    SMALL_CARDS,
    best,
    check_table,
)


@pytest.fixture(scope="module", autouse=True)
def _searches_are_forgotten():
    """Hundreds of thousands of rejected plans would slow down every garbage collection of the tests that follow."""
    yield
    FOUND.clear()


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "validation"])
def test_tables_are_up_to_date(name):
    check_table(name)


def test_the_first_example_runs():
    text = DOCUMENT.read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    # A smaller search than the example's, of the same call.
    code = (
        code.replace("llama3-70b", "llama2-7b").replace("a100-80x64", "a100-80x8").replace("dp=4, tp=8, pp=2", "dp=8")
    )
    code = code.replace("sequence_parallel=True, ", "")
    names: dict[str, object] = {}
    exec(code, names)
    assert names["search"] is search
    assert names["cluster"] == presets.cluster("a100-80x8")


def test_every_rule_is_described():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)[-len(RULES) :] == list(RULES)


def chosen(model, cluster, batch, *options):
    """The best plan, which must fit, and the reasons against the others."""
    found = best(presets.model(model), presets.cluster(cluster), batch, *options)
    peak = found.best.peak_memory
    assert peak.total <= found.best.cluster.stage_gpus(found.best.plan.pp)[peak.stage].memory
    reasons = found.reasons()
    assert sum(reasons.values()) == len(found.rejected) > 0
    assert all(rejection.reason for rejection in found.rejected)
    return found, found.best.plan, reasons


def test_70b_on_64_a100_shards_the_model_inside_nodes():
    found, plan, reasons = chosen("llama3-70b", "a100-80x64", 512, OFFLOADED)
    assert plan.tp * plan.pp > 1 or plan.zero == 3
    assert not leaves_node(found.cluster, plan, "tp")
    assert reasons["memory"] > 100


def test_180b_on_128_h100_needs_model_parallelism():
    _, plan, reasons = chosen("falcon-180b", "h100x128", 2048)
    assert plan.tp * plan.pp >= 8 or plan.zero == 3
    assert reasons["memory"] > 100


def test_405b_on_16384_h100_is_as_fast_as_the_published_plan():
    found, plan, reasons = chosen("llama3-405b", "llama3-cluster", 2048)
    published = next(row for row in measurements() if row.name == "405B on 16384 H100")
    assert found.best.step <= published.predicted() * 1.02
    assert quick_memory_problem(found.model, found.cluster, published.plan) is None
    assert plan.tp >= 4 and plan.pp >= 4
    assert {"memory", "micro-batches"} <= set(reasons)


def test_deepseek_v3_on_2048_h800_spreads_its_experts():
    found, plan, reasons = chosen("deepseek-v3", "deepseek-v3-cluster", 15360, EXPERTS)
    assert plan.ep >= 8 and plan.pp > 1
    assert {"memory", "tp leaves the node"} <= set(reasons)
    published = next(row for row in measurements() if row.table == "deepseek-v3")
    assert published.predicted() == pytest.approx(published.seconds, rel=0.15)
    # The published plan is among those that fit, and the choice is at most 5 % slower.
    assert replace(published.plan, fused_loss=True) in [each for each, _ in found.ranking]
    assert found.best.step <= published.predicted() * 1.05


def test_13b_on_eight_24_gigabyte_cards_offloads_or_shards_all():
    found, plan, reasons = chosen("llama2-13b", "rtx3090x8", 512, SMALL_CARDS)
    assert plan.zero == 3 or plan.offload != "none"
    assert all(each.zero == 3 or each.offload != "none" for each, _ in found.ranking)
    assert max(reasons, key=reasons.__getitem__) == "memory"
    assert found.best.peak_memory.total < 24 * GIB


def test_a_mixed_cluster_gives_its_faster_half_more_layers():
    found, plan, _ = chosen("llama3-70b", "a100-80x32+h100x32", 512, OFFLOADED)
    stages = [len(layers) for layers in stage_layers(found.model.num_layers, *stage_layout(plan))]
    assert sum(stages[: plan.pp // 2]) < sum(stages[plan.pp // 2 :])
    even = estimate(found.model, found.cluster, replace(plan, layers_per_chunk=()))
    assert found.best.step < even.step


@pytest.mark.parametrize("sequence", [2**17, 2**20])
def test_long_sequences_are_split_over_a_ring(sequence):
    model = replace(presets.model("llama3-8b"), seq_length=sequence)
    found = best(model, presets.cluster("h100x64"), 2**22 // sequence, LONG)
    plan = found.best.plan
    assert plan.cp >= 8 and plan.cp_kind == "ring"
    # All-to-all runs out of key-value heads.
    assert {"memory", "heads"} <= set(found.reasons())
    assert found.best.exposed < 0.05 * found.best.step
