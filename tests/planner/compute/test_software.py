"""Software eras: their constants, where these are from, published runs that are read, and searches of an era."""

import json
import math
from dataclasses import replace
from importlib.resources import files

import pytest

from benchmarks.planner_fit_software import _BEGIN, carriers, loss, predicted, sample, start
from parallel_ops.planner import Plan, SearchOptions, efficiency, presets, search
from parallel_ops.planner.compute.software import (
    CURRENT,
    FEWEST_TABLES,
    constants_of,
    eras,
    fitted_constants,
    parts,
    uncertainty,
)
from parallel_ops.planner.error_band import error_band
from parallel_ops.planner.export import TARGETS, systems
from parallel_ops.planner.validation.published_runs import published_runs, runs

H100, LLAMA, QWEN = presets.cluster("h100x64"), presets.model("llama3-70b"), presets.model("qwen3-30b-a3b")


def test_every_constant_has_a_source_and_the_fitted_ones_a_range():
    data = json.loads(files("parallel_ops.planner.presets").joinpath("software.json").read_text(encoding="utf-8"))
    for kind in ("kernels", "runtimes"):
        for part in data[kind].values():
            for entries in part.values():
                for name, entry in entries.items():
                    assert entry["source"] in data["sources"], name
                    if entry["source"] == "fit":
                        low, high = entry["range"]
                        assert low <= entry["value"] <= high and name in _BEGIN
    assert not set(data["kernels"]) & set(data["runtimes"])
    for era in data["eras"].values():
        assert era["kernels"] in data["kernels"] and set(era["runtime"].split("+")) <= set(data["runtimes"])
    assert {system.software for system in TARGETS.values()} <= set(eras())


def test_no_step_in_either_direction_fits_better():
    """The constants that ship are those of the fit from round values: no step of 10 % gains more than 0.0002 of 0.08.

    The fit is a coordinate descent with smaller and smaller steps, which may stop beside such a gain.
    """
    rows, shipped = sample(), start()
    assert len(shipped) == 18 and len(rows) > 100
    begin = {key: _BEGIN[key[2]] for key in shipped}
    least = loss(shipped, rows, begin)
    for key, value in shipped.items():
        for factor in (1 / 1.1, 1.1):
            assert (
                loss(shipped | {key: min(1.0, value * factor) if value < 1 else value * factor}, rows, begin)
                > least - 2e-4
            ), key


def test_a_constant_that_few_tables_carry_is_a_range_that_widens_the_band():
    """Carriers are those that ship; a constant of fewer than three has a range of 10 % or more each way, and a band at
    least as wide as that moves a step."""
    carried, names = carriers(start(), sample()), {found.name: found for found in fitted_constants()}
    assert {"/".join(key) for key in carried} == set(names)
    for key, (tables, effect) in carried.items():
        found = names["/".join(key)]
        assert sorted(found.tables) == tables, found.name
        assert found.effect == pytest.approx(effect, rel=0.05) and 0 < effect < 1.1, found.name
        if len(tables) < FEWEST_TABLES:
            assert found.high / found.value >= 1.099 and found.low / found.value <= 0.901, found.name
            assert found.half_width >= 0.099 * found.effect
        else:
            assert found.half_width == 0
    plan = Plan(dp=8, zero=3, global_batch=8)
    for cluster, software in (("tpu-v5px8", "maxtext-2024"), ("a800x8", "deepspeed-2024")):
        found = presets.cluster(cluster)
        few = uncertainty(found.gpu.generation, found.gpu.name, software)
        assert 0.08 <= few <= error_band(found, plan, software=software).time
    assert uncertainty("ampere", "a100-80", "megatron-2021") == 0


def test_shipped_constants_are_those_that_efficiency_returns():
    shipped = start()
    for row in sample()[::5]:
        assert predicted(row, shipped) == pytest.approx(
            row.predicted(exact=False), rel=1e-3
        )  # flash_backward is rounded


def test_constants_of_a_gpu_come_before_those_of_its_generation():
    plain, own = (efficiency("blackwell", CURRENT, gpu) for gpu in ("b200", "gb300"))
    assert plain == efficiency("blackwell", CURRENT)
    assert own == replace(plain, fp8=own.fp8, matmul=own.matmul) != plain
    assert constants_of(presets.cluster("gb300x8"), CURRENT) == own


def test_a_search_spreads_experts_over_tensor_parallel_ranks_on_request():
    model, cluster = presets.model("qwen3-30b-a3b"), presets.cluster("h100x16")
    few = SearchOptions(
        schedules=("1f1b",),
        micro_batches=(1,),
        zero=(1,),
        tp=(1, 4),
        pp=(1,),
        cp=(1,),
        base=Plan(expert_tp=1, fused_loss=True),
    )
    found = search(model, cluster, batch=64, options=few)
    assert max(plan.ep for plan, _ in found.ranking if plan.tp == 4) == 16
    split = search(model, cluster, batch=64, options=replace(few, base=Plan(fused_loss=True)))
    assert max(plan.ep for plan, _ in split.ranking if plan.tp == 4) == 4
    # Experts in four parts fit no tensor parallelism of 1.
    four = search(model, cluster, batch=64, options=replace(few, base=Plan(tp=4, dp=4, expert_tp=4, global_batch=4)))
    assert {plan.tp for plan, _ in four.ranking} == {4}


def test_runs_name_the_modules_and_the_settings_of_their_recipes():
    """In the note, in the column, or by the release of Megatron-Bridge."""
    header = "source,release,model,system,gpus,dtype,gbs,mbs,seq,zero,replicate,tp,pp,cp,vp,ep,recompute,"
    header += "tokens_s_gpu,tflops_gpu,memory_gib,flags,note"
    rows = (
        'Megatron MoE ModelZoo,2026-05,qwen3-235b-a22b,h100,256,bf16,256,1,16384,1,1,4,8,1,4,8,"layernorm, moe",'
        ",295,,,DeepEP",
        "Megatron-Bridge B200 MoE,26.04,gpt-oss-120b,b200,64,bf16,1280,4,4096,1,1,1,1,1,1,8,selective,13045,,,,"
        "dropless; recompute layernorm and moe_act",
        "Megatron-Bridge GB200,26.04,llama3-70b,gb200,64,fp8,256,1,8192,3,1,1,1,1,1,1,none,3000,,,,",
        "Megatron-Bridge GB300 MoE,26.06,qwen3-30b-a3b,gb300,8,fp8,512,8,4096,1,1,1,1,1,1,8,none,45275,,,,"
        '"MXFP8; HybridEP, full-iteration CUDA graph"',
    )
    zoo, oss, llama, qwen = (run.plan for run in runs("own.csv", "\n".join((header, *rows))))
    assert (zoo.recompute, zoo.dispatcher) == ("layernorm+moe", "deepep")
    assert (oss.recompute, oss.dispatcher, oss.cuda_graph) == ("layernorm+moe_act", "hybridep", "none")
    assert (llama.offload, llama.offload_layers, llama.dtype) == ("activations", 40, "fp8")
    assert (qwen.dtype, qwen.dispatcher, qwen.cuda_graph) == ("mxfp8", "hybridep", "full")


def test_runs_of_a_file_are_read_and_errors_name_the_row():
    found = list(published_runs())
    assert len(found) == 149 and len({row.table for row in found}) == 39
    assert all(row.seconds > 0 and math.isfinite(row.predicted(exact=False)) for row in found)
    header, row = (files("parallel_ops.planner.validation") / "runs/deepspeed_a800.csv").read_text().splitlines()[1:3]
    assert [found.plan.zero for found in runs("mine.csv", f"{header}\n{row}\n")] == [2]
    for text, message in (
        (f"{header}\n{row.replace('llama2-7b', 'llama2-8b')}", "mine.csv, row 1: unknown model 'llama2-8b'"),
        (f"{header}\n{row.replace('DeepSpeed 8', 'Mine')}", "mine.csv, row 1: runs: source must start with one of"),
        (f"{header.replace('gpus', 'cards')}\n{row}", "mine.csv: no column 'gpus'"),
    ):
        with pytest.raises(ValueError, match=message):
            list(runs("mine.csv", text))


def test_plans_of_no_system_are_found_on_request():
    model, cluster = presets.model("mixtral-8x7b"), presets.cluster("h100x64")
    model = replace(model, seq_length=4096, bias="all")  # Megatron has no DualPipe-V, parallel_ops no such biases
    few = SearchOptions(schedules=("dualpipe-v",), zero=(1,), micro_batches=(1,), tp=(1,), pp=(4,), recompute=("none",))
    assert not search(model, cluster, batch=512, options=few).plans
    every = search(model, cluster, batch=512, options=replace(few, any_system=True))
    assert every.plans and not any(systems(model, cluster, each.plan) for each in every.plans)


def test_targets_refuse_states_that_they_do_not_have():
    for changes in ({"moment_dtype": "bf16"}, {"master_bytes": 0}, {"inplace_loss": True}, {"expert_tp": 1}):
        plan = Plan(dp=4, tp=2, sequence_parallel=True, zero=2, global_batch=8, **changes)
        cluster = presets.cluster("h100x8")
        found = systems(LLAMA, cluster, plan)
        for target in ("torchtitan", "parallel_ops"):  # a dense model has no experts to split
            assert (target in found) == ("expert_tp" in changes)


def test_the_era_of_a_search_is_that_of_its_target():
    few = SearchOptions(schedules=("1f1b",), micro_batches=(1,), zero=(1, 2, 3), recompute=("none", "full"))
    for target, software in (("", CURRENT), ("torchtitan", "torchtitan-2025"), ("deepspeed", "deepspeed-2024")):
        model = presets.model("llama2-7b")
        found = search(model, presets.cluster("h100x8"), batch=64, options=replace(few, target=target), keep=3)
        assert {each.software for each in found.plans} == {software}
    with pytest.raises(ValueError, match="unknown software 'megatron-2020'; nearest: megatron-2024, megatron-2021"):
        search(LLAMA, H100, batch=64, options=few, software="megatron-2020")
    assert set(parts()) >= {"transformer-engine", "megatron-core"}
