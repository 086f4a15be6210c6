"""What decays, the learning rate of each step, and the loss scale."""

import itertools
import math

import pytest
import torch
from torch import nn

from parallel_ops.train.step.optimizer import LossScale, learning_rate, optimizer_of
from parallel_ops.train.step.settings import OptimizerSettings


def test_only_matrices_decay_and_saving_is_no_step():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    before = [p.clone() for p in model.parameters()]
    optimizer = optimizer_of(model, OptimizerSettings(weight_decay=0.3))
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert [p.dim() for p in matrices["params"]] == [2] and {p.dim() for p in vectors["params"]} == {1}
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(state["step"] == 0 for state in optimizer.state.values())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_rates(schedule):
    decay = 20 if schedule == "wsd" else 0
    settings = OptimizerSettings(lr=2.0, warmup=10, schedule=schedule, decay=decay, min_lr_ratio=0.1)
    rates = [learning_rate(settings, 100, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * k for k in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True) and max(rates) == 2.0
    assert rates[-1] == pytest.approx(2.0 if schedule == "constant" else 0.2)
    falling = sum(later < earlier for earlier, later in itertools.pairwise(rates))
    assert falling == {"cosine": 89, "linear": 89, "wsd": 20, "constant": 0}[schedule]
    middle = {"cosine": 0.1 + 0.9 * 0.5, "linear": 0.1 + 0.9 * 0.5, "wsd": 1.0, "constant": 1.0}[schedule]
    assert rates[54:56] == pytest.approx([2 * middle] * 2, rel=0.05)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_a_run_beyond_its_schedule_keeps_the_last_rate(schedule):
    settings = OptimizerSettings(schedule=schedule, warmup=3, decay=4 if schedule == "wsd" else 0)
    for steps in (7, 20):
        last = learning_rate(settings, steps, steps - 1)
        assert [learning_rate(settings, steps, step) for step in range(steps, 3 * steps)] == [last] * 2 * steps


def test_a_run_of_one_step():
    assert learning_rate(OptimizerSettings(lr=1.0), 1, 0) == 1.0


def test_the_scale_of_half_precision():
    scale = LossScale(8.0, 2)
    seen = []
    for finite in (True, True, False, True, False, True, True):
        scale.update(1.0, 2.0 if finite else math.inf)
        seen.append(scale.scale)
    assert seen == [8, 16, 8, 8, 4, 4, 8]
    again = LossScale(1.0, 2)
    again.load_state_dict(scale.state_dict())
    assert (again.scale, again.good) == (8, 0)
    scale.update(math.nan, math.nan)  # which is no overflow of gradients
    assert scale.scale == 8
    scale.scale = 2.0**-14
    assert not scale.is_exhausted
    scale.update(1.0, math.inf)
    assert scale.is_exhausted
