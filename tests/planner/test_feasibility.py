"""Pipelines that cannot run: each reason names the nearest values that do, and they do."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parallel_ops.planner import Plan, SearchOptions, presets, search
from parallel_ops.planner.export import TARGETS, export
from parallel_ops.planner.feasibility import pipeline_problems, problem
from parallel_ops.planner.field_text import parse_fields
from parallel_ops.planner.plan import PLAN_FIELDS, SCHEDULES, V_SHAPED
from parallel_ops.planner.schedules.schedule import KINDS, actions, micro_batch_problem, nearest_micro_batches

LLAMA = presets.model("llama3-8b")  # 32 layers
TRAINER = TARGETS["parallel_ops"]


def stages_of(schedule, interleaved=2):
    return interleaved if schedule == "interleaved" else 2 if schedule in V_SHAPED else 1


def reasons(plan, model=LLAMA):
    """Kind of each problem, with the changes that its reason proposes."""
    found = {}
    for kind, reason, _ in pipeline_problems(model, plan, plan.recompute):
        *_, nearest = reason.partition("; nearest: ")
        found[kind] = [change for change in nearest.split(", ") if change]
    return found


def changed(plan, change):
    """The plan with a proposed change; dp takes the ranks that pp gives up."""
    given = parse_fields(change, "Plan", PLAN_FIELDS)
    if given.get("schedule") == "1f1b":
        given["virtual_stages"] = 1
    return replace(plan, **given, dp=plan.dp * plan.pp // given["pp"] if "pp" in given else plan.dp)


@settings(max_examples=300)
@given(
    st.sampled_from(SCHEDULES),
    st.sampled_from((1, 2, 3, 4, 8, 20, 64)),
    st.sampled_from((1, 2, 4)),
    st.integers(2, 20),
    st.sampled_from((1, 2, 3, 4)),
    st.integers(1, 12),
    st.sampled_from(("none", "full")),
    st.sampled_from((0, 3)),
)
def test_the_nearest_value_works(schedule, pp, dp, interleaved, micro_batch, count, recompute, zero):
    v = stages_of(schedule, interleaved)
    sizes = {"dp": dp, "pp": pp, "micro_batch": micro_batch, "global_batch": dp * micro_batch * count}
    plan = Plan(**sizes, schedule=schedule, virtual_stages=v, recompute=recompute, zero=zero)
    problems = reasons(plan)
    assume(problems)
    for kind, changes in problems.items():
        assert changes, kind
        for change in changes:
            if "pp=1" in change.split(",") and plan.global_batch % (dp * pp * micro_batch):
                continue  # the batch must grow too
            assert kind not in reasons(changed(plan, change)), (kind, change)


@given(st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 40))
def test_the_nearest_numbers_of_micro_batches(kind, pp, m):
    v = 2 if kind == "interleaved" else 1
    can = [n for n in range(1, 3 * m + 3 * pp) if micro_batch_problem(kind, pp, n) is None]
    below = [n for n in can if n <= m][-1:]
    above = [n for n in can if n >= m][:1]
    found = nearest_micro_batches(kind, pp, m)
    assert list(found) == sorted({*below, *above})
    for number in found:
        actions(kind, pp, number, v)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            "dp=2,pp=4,schedule=interleaved,virtual_stages=2,micro_batch=2,global_batch=24",
            "interleaved 1F1B needs micro-batches in multiples of PP 4; there are 6; "
            "nearest: global_batch=16, global_batch=32, micro_batch=1",
        ),
        (
            "pp=4,schedule=dualpipe-v,virtual_stages=2,global_batch=7",
            "DualPipe-V needs 8 micro-batches for PP 4; there are 7; nearest: global_batch=8",
        ),
        ("pp=64,global_batch=64", "pp is 64 stages, but the model has 32 layers; nearest: pp=32"),
        (
            "pp=17,schedule=zb-v,virtual_stages=2,global_batch=64",
            "pp * virtual_stages is 34 stages, but the model has 32 layers; nearest: schedule=1f1b,virtual_stages=1",
        ),
        (
            "pp=4,schedule=interleaved,virtual_stages=9,global_batch=64",
            "pp * virtual_stages is 36 stages, but the model has 32 layers; nearest: virtual_stages=8",
        ),
        ("schedule=gpipe,global_batch=8", "gpipe needs pp of 2 or more, got 1; nearest: schedule=1f1b"),
    ],
)
def test_reasons(fields, reason):
    plan = Plan.parse(fields)
    assert next(pipeline_problems(LLAMA, plan, "none")).reason == reason
    cluster, plan = (
        replace(presets.cluster("h100x8"), gpus=plan.gpus, gpus_per_node=1),
        replace(plan, **TRAINER.own(plan)),
    )
    with pytest.raises(ValueError, match="export: parallel_ops cannot run this plan: ") as raised:
        export("parallel_ops", LLAMA, cluster, plan)
    assert str(raised.value).endswith(reason)


def test_a_plan_names_what_would_fit():
    with pytest.raises(ValueError, match=r"multiple of dp \* micro_batch \(8\), got 20; nearest: 16, 24"):
        Plan(dp=4, micro_batch=2, global_batch=20)
    with pytest.raises(ValueError, match=r"multiple of dp \* micro_batch \(8\), got 3; nearest: 8"):
        Plan(dp=8, global_batch=3)
    with pytest.raises(ValueError, match="virtual_stages must be 2 for the schedule zb-v, got 1"):
        Plan(pp=2, schedule="zb-v")
    with pytest.raises(ValueError, match="virtual_stages must be 2 or more for the schedule interleaved, got 1"):
        Plan(pp=2, schedule="interleaved")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_trainer_runs_every_schedule_and_zero_stage(schedule, zero):
    cluster = presets.cluster("h100x8")
    plan = Plan(dp=2, pp=4, zero=zero, schedule=schedule, virtual_stages=stages_of(schedule), global_batch=16)
    plan = replace(plan, **TRAINER.own(plan))
    assert plan.input_grad_first and plan.fused_loss
    assert problem(LLAMA, cluster, plan) is None
    assert TRAINER.problem(LLAMA, cluster, plan) is None
    text = export("parallel_ops", LLAMA, cluster, plan)
    assert "\npp = 4\n" in text and "\ninput_grad_first = true\n" in text
    assert (f'\nschedule = "{schedule}"\n' in text) == (schedule != "1f1b")
    assert (f"\nvirtual_stages = {plan.virtual_stages}\n" in text) == (plan.virtual_stages > 1)


def test_a_search_for_the_trainer_finds_pipelines():
    model, cluster = presets.model("llama3-70b"), presets.cluster("h100x64")
    options = SearchOptions(target="parallel_ops", micro_batches=(1,), tp=(4, 8), cp=(1,), pp=(1, 4, 16))
    found = search(model, cluster, batch=512, options=options)
    plans = [plan for plan, _ in found.ranking]
    assert {plan.schedule for plan in plans if plan.pp > 1} == {"1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"}
    assert {plan.zero for plan in plans if plan.pp > 1} == {0, 1, 2, 3}
    assert any(plan.zero == 3 and plan.schedule == "zb-v" for plan in plans)
    assert all(plan.input_grad_first == (plan.pp > 1) for plan in plans)
    assert any(plan.layers_per_chunk for plan in plans)
    best = found.best.plan
    assert best.pp > 1 and f"\npp = {best.pp}\n" in export("parallel_ops", model, cluster, best)


def test_a_search_uses_the_shorter_bubble():
    cluster = presets.cluster("h100x8")
    options = SearchOptions(pp=(8,), tp=(1,), cp=(1,), zero=(0,), schedules=("1f1b",), micro_batches=(1,))
    late = search(LLAMA, cluster, batch=16, options=options, software="parallel_ops").best
    first = search(LLAMA, cluster, batch=16, options=replace(options, target="parallel_ops")).best
    assert first.plan.input_grad_first and not late.plan.input_grad_first
    assert first.bubble < 0.8 * late.bubble and first.step < 0.95 * late.step


def test_the_text_of_a_plan():
    plan = Plan(dp=2, tp=2, zero=3, sequence_parallel=True, global_batch=4, layers_per_chunk=(3,))
    assert plan.text == "dp=2,tp=2,zero=3,sequence_parallel=true,global_batch=4,layers_per_chunk=3"
    assert Plan.parse(plan.text) == plan and Plan.parse("") == Plan()
    with pytest.raises(ValueError, match="tp is given twice"):
        Plan.parse("tp=2,tp=4")


def test_tensor_parallelism_divides_the_widths_of_experts():
    """Routed experts are split by ``expert_tp``, shared ones by ``tp``; with ``expert_tp=1`` the latter alone."""
    cluster, model = presets.cluster("h100x8"), replace(presets.model("deepseek-v2"), expert_ffn=1538, shared_experts=2)
    for plan, reason in (
        (Plan(tp=4, dp=2, global_batch=8), "TP 4 does not divide expert_ffn (1538)"),
        (Plan(tp=4, dp=2, expert_tp=2, global_batch=8), None),
        (Plan(tp=8, expert_tp=1, global_batch=8), "TP 8 does not divide shared_experts * expert_ffn (3076)"),
    ):
        found = problem(model, cluster, plan)
        assert (found and found.reason) == reason


def test_adapters_are_in_16_bits():
    model, cluster = replace(LLAMA, lora_rank=16), presets.cluster("b200x8")
    plan = Plan(dp=8, zero=3, global_batch=8, fused_loss=True)
    assert TRAINER.runs(model, cluster, plan)
    assert "16 bits" in str(TRAINER.problem(model, cluster, replace(plan, dtype="mxfp8")))


def test_torchtitan_spreads_experts_over_ranks_that_shard():
    """``ParallelDims`` asserts that ``ep`` divides dp_shard * cp * tp; without ZeRO dp_shard is 1."""
    system, model, cluster = TARGETS["torchtitan"], presets.model("qwen3-30b-a3b"), presets.cluster("h100x8")
    plan = Plan(dp=4, tp=2, ep=2, expert_tp=1, sequence_parallel=True, global_batch=8)
    assert system.runs(model, cluster, plan)
    assert "zero=2" in str(system.problem(model, cluster, replace(plan, ep=4)))
    assert system.runs(model, cluster, replace(plan, ep=4, zero=2))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"recompute_layers": 4}, "recompute_layers needs recompute, such as recompute=full"),
        ({"recompute": "full", "recompute_layers": 33}, "recompute_layers is 33, but the model has 32 layers"),
        ({"offload_layers": 4}, "offload_layers needs offload=activations"),
        ({"offload": "activations", "offload_layers": 33}, "offload_layers is 33, but the model has 32 layers"),
    ],
)
def test_layers_of_recomputation_and_offload(fields, reason):
    assert problem(LLAMA, presets.cluster("h100x1"), Plan(**fields)).reason == reason
