"""16-bit training: the loss scale of fp16, overflows on any rank, and bytes a parameter."""

import dataclasses
import itertools
import math

import pytest

from parallel_ops.train import loop
from support.ranks.distributed import ranks
from support.runs import trainer as runs

BATCH = 8


def test_half_precision_finds_a_scale(data):
    """One that overflows at first: those steps are skipped, on all ranks."""
    settings = runs.settings_of(
        data, precision={"dtype": "fp16", "initial_scale": 2.0**22, "growth_interval": 3}, run={"steps": 12},
        parallel={"dp": 2, "tp": 2, "zero": 2, "global_batch": BATCH, "micro_batch": 2},
    )  # fmt: skip
    outcomes = ranks(4).run(runs.scales_of, settings)
    scales, skipped = outcomes[0]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    # Once it is found, the scale grows beyond the limit now and then: one step is left out, and the next is taken.
    found = skipped[skipped.index(False) :]
    assert skipped[0] and not any(step and following for step, following in itertools.pairwise(found))
    assert scales[0] == 2.0**21 and max(scales[6:]) >= 2 * min(scales)


@pytest.mark.parametrize(
    "plan",
    [{"cp": 2, "zero": 2}, {"cp": 4, "zero": 2}, {"pp": 2, "schedule": "zb-h1"}, {"pp": 2, "cp": 2, "zero": 1}],
    ids=str,
)
def test_half_precision_overflows_where_one_process_does(data, plan):
    """The loss scale means the same where ranks share a sequence or are stages: the same steps are skipped."""
    batches = {"global_batch": 4, "micro_batch": 2}
    options = {"model": runs.MODELS["llama"], "run": {"steps": 4}}
    options["precision"] = {"dtype": "fp16", "initial_scale": 2.0**22}
    scales, skipped = runs.scales_of(0, runs.settings_of(data, parallel=batches, **options))
    assert skipped[0] and not skipped[-1]
    shared = runs.settings_of(data, parallel=batches | plan, **options)
    for got in ranks(shared.plan.gpus).run(runs.scales_of, shared):
        assert got == (scales, skipped)


def test_a_run_ends_where_gradients_overflow_at_any_scale(data):
    with runs.trainer_of(runs.settings_of(data, precision={"dtype": "fp16"})) as trainer:
        step = dataclasses.replace(trainer.step(), grad_norm=math.inf)
        assert loop.check_finite(trainer, step) is None
        trainer.scale.scale = 2.0**-15
        with pytest.raises(
            FloatingPointError, match="step 1, samples 0 to 7: gradients are not finite at a loss scale of"
        ):
            raise loop.check_finite(trainer, step)


@pytest.mark.parametrize(("zero", "expected"), [(0, 16), (1, 8), (3, 8)])
def test_bytes_a_parameter_in_mixed_precision(data, zero, expected):
    """Parameters, gradients and two moments in fp32, over the ranks that share them; no copy in bf16 stays."""
    settings = runs.settings_of(
        data, model={**runs.MODELS["gpt"], "hidden_size": 128}, precision={"dtype": "bf16"},
        parallel={"dp": 2, "zero": zero, "global_batch": 2},
    )  # fmt: skip
    for found in ranks(2).run(runs.bytes_a_parameter, settings):
        assert expected <= found < 1.05 * expected
