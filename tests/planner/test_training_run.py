"""Days, money, energy and goodput of a whole run."""

import json
import math
import re
from dataclasses import replace

import pytest

from parallel_ops.planner import Plan, estimate, presets
from parallel_ops.planner.cli import inputs
from parallel_ops.planner.training_run import GPU_HOURS_TO_FAILURE, Phase, TrainingRun, expected

CLUSTER = replace(presets.cluster("h100x64"), price=2.0)
FOUND = estimate(presets.model("llama3-8b"), CLUSTER, Plan(dp=64, zero=3, micro_batch=1, global_batch=512))


def test_without_failures_a_run_takes_its_tokens_and_no_more():
    made = expected(FOUND, TrainingRun(tokens=1e12, mtbf=1e15))
    assert made.days == pytest.approx(FOUND.days(1e12), rel=1e-3) and made.goodput == pytest.approx(1, abs=1e-3)
    assert made.steps == pytest.approx(1e12 / (512 * 8192))
    assert made.gpu_hours == pytest.approx(made.days * 24 * 64)
    assert made.money == pytest.approx(2 * made.gpu_hours)
    assert made.kwh == pytest.approx(made.gpu_hours * 0.7) and made.energy == 0


def test_the_interval_between_checkpoints_loses_the_least():
    run = TrainingRun(tokens=1e13, checkpoint=60, restart=300)
    made, rate = expected(FOUND, run), 64 / (run.mtbf * 3600)

    def lost(interval):
        return 60 / interval + rate * (interval / 2 + 300)

    assert made.goodput == pytest.approx(1 - lost(made.interval))
    assert lost(made.interval) < min(lost(0.8 * made.interval), lost(1.25 * made.interval))
    assert made.failures == pytest.approx(made.days * 86400 * rate)


def test_failures_are_those_of_llama_3():
    """16,384 GPUs failed 419 times in 54 days."""
    assert pytest.approx(419) == 54 * 24 * 16384 / GPU_HOURS_TO_FAILURE
    slow = [expected(FOUND, TrainingRun(tokens=1e13, mtbf=mtbf)).goodput for mtbf in (1e3, 1e4, 1e5)]
    assert slow == sorted(slow) and slow[0] < 0.99 < slow[2]


def test_a_price_table_counts_gpus_energy_and_the_data_centre():
    made = expected(FOUND, TrainingRun(tokens=1e12), {"h100": 3.0, "kwh": 0.1, "pue": 1.3})
    assert made.money == pytest.approx(3 * made.gpu_hours)
    assert made.kwh == pytest.approx(made.gpu_hours * 0.7 * 1.3) and made.energy == pytest.approx(0.1 * made.kwh)
    mixed = presets.cluster("a100-80x32+h100x32")
    plan = Plan(dp=32, pp=2, zero=1, global_batch=512)
    both = expected(
        estimate(presets.model("llama3-8b"), mixed, plan), TrainingRun(tokens=1e11), {"a100-80": 1, "h100": 3}
    )
    assert both.money == pytest.approx(2 * both.gpu_hours)


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ({"b200": 2}, "unknown price 'b200'; .*h100"), ({"h100": -1}, "prices: h100 must be zero or more"),
        ({"kwh": "cheap"}, "prices: kwh must be zero or more"), ({"pue": math.nan}, "prices: pue must be zero or more"),
    ],
)  # fmt: skip
def test_prices_of_nothing_are_refused(prices, message):
    with pytest.raises(ValueError, match=message):
        expected(FOUND, TrainingRun(tokens=1e12), prices)


def test_a_run_that_fails_all_the_time_is_refused():
    with pytest.raises(ValueError, match="leave no time to train"):
        expected(FOUND, TrainingRun(tokens=1e12, mtbf=5))


@pytest.mark.parametrize(
    ("text", "tokens", "mtbf"),
    [("15T", 15e12, GPU_HOURS_TO_FAILURE), ("tokens=1e12,mtbf=2e4", 1e12, 2e4), ("300B", 3e11, GPU_HOURS_TO_FAILURE)],
)  # fmt: skip
def test_a_run_is_its_tokens_or_fields(text, tokens, mtbf):
    assert (inputs.run(text, 8192).tokens, inputs.run(text, 8192).mtbf) == (tokens, pytest.approx(mtbf))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("15X", "--run: tokens must be a number such as 15T, got '15X'"), ("mtbf=5", "--run needs the tokens"),
        ("tokens=1T,mtbff=3", "unknown field of --run 'mtbff'; nearest: mtbf"),
        ("1T,checkpoint=soon", "--run: checkpoint must be a number"), ("1T,restart=-3", "restart must be finite"),
    ],
)  # fmt: skip
def test_a_run_that_is_none_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        inputs.run(text, 8192)


def test_prices_may_be_json(tmp_path):
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"h100": 2.5}))
    assert inputs.prices(str(path)) == {"h100": 2.5} and inputs.prices(None) == {}


def test_phases_take_the_steps_of_their_own_batch_and_sequence():
    run = inputs.run("tokens=1T,mtbf=1e15,phases=1M@4096:252B/128:500B", 8192)
    assert run.phases == (
        Phase(tokens=252e9, batch=256, seq_length=4096),
        Phase(tokens=500e9, batch=128, seq_length=8192),
    )
    short = estimate(replace(FOUND.model, seq_length=4096), CLUSTER, replace(FOUND.plan, global_batch=256))
    small = estimate(FOUND.model, CLUSTER, replace(FOUND.plan, global_batch=128))
    made = expected(FOUND, run)
    steps = 252e9 / 2**20, 500e9 / 2**20, 248e9 / 2**22
    seconds = sum(count * each.step for count, each in zip(steps, (short, small, FOUND), strict=True))
    assert made.steps == pytest.approx(sum(steps))
    assert made.days * made.goodput == pytest.approx(seconds / 86400)
    # A quarter of the batch: four times the updates.
    assert expected(FOUND, replace(run, phases=run.phases[1:])).days > expected(FOUND, replace(run, phases=())).days
    whole = expected(FOUND, replace(run, phases=(Phase(tokens=1e12, batch=512, seq_length=8192),)))
    assert whole.days == pytest.approx(expected(FOUND, replace(run, phases=())).days)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ("4M", "a phase is BATCH:TOKENS or BATCH@SEQ:TOKENS, as 4M@4096:252M, got '4M'"),
        ("4M@x:1B", "a phase is BATCH:TOKENS"),
        ("4M@0:1B", "tokens of a sequence must be at least 1, got 0"),
        ("x:1B", "--batch must be sequences"),
        ("512:2T", "phases have 2,000,000,000,000 tokens, but the run 1,000,000,000,000"),
        ("100:1B", "the phase of 100 x 8,192 tokens a step: Plan: global_batch must be a multiple of dp"),
        ("64@1048576:1B", "the phase of 64 x 1,048,576 tokens a step does not fit: stage 0 needs"),
    ],
)
def test_phases_that_cannot_run(phases, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        expected(FOUND, inputs.run(f"1T,phases={phases}", 8192))
