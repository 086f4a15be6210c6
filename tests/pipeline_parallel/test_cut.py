"""How a model is cut into stages."""

import itertools
import random

import pytest

from parallel_ops.pipeline_parallel import Stages, cut
from parallel_ops.planner.placement import stage_layers
from parallel_ops.planner.plan import Plan


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("pp", [2, 3, 5])
def test_ranks_have_the_layers_that_the_planner_counts(kind, pp):
    virtual = {"1f1b": 1, "interleaved": 3}.get(kind, 2)
    plan = Plan(pp=pp, schedule=kind, virtual_stages=virtual)
    for layers in (pp * virtual, pp * virtual + 1, 47):
        stages = cut(layers, plan)
        v_shaped = kind in ("zb-v", "dualpipe-v")
        assert tuple(stages.layers_on(rank) for rank in range(pp)) == stage_layers(layers, pp, virtual, v_shaped)
        assert [layer for own in stages.layers for layer in own] == list(range(layers))
        assert sorted(s for rank in range(pp) for s in stages.on(rank)) == list(range(stages.count))
        for rank in range(pp):
            assert all(stages.rank_of(stage) == rank for stage in stages.on(rank))
    if v_shaped:
        assert stages.on(0) == (0, 2 * pp - 1)


def test_given_sizes():
    stages = cut(9, Plan(pp=2, schedule="zb-v", virtual_stages=2, layers_per_chunk=(4, 0, 3, 2)))
    assert [list(own) for own in stages.layers] == [[0, 1, 2, 3], [], [4, 5, 6], [7, 8]]
    assert stages.layers_on(0) == (0, 1, 2, 3, 7, 8)


def test_equal_costs_are_the_best_of_all_cuts():
    for seed in range(30):
        draw = random.Random(seed)
        count, layers = draw.randint(1, 4), draw.randint(4, 9)
        costs = [draw.choice([1.0, 2.5, 0.1, 7.0]) for _ in range(layers)]
        found = cut(layers, Plan(pp=count, global_batch=1), costs=costs)

        def most(sizes, costs=costs):
            ends = list(itertools.accumulate(sizes))
            return max(sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True))

        every = (sizes for sizes in itertools.product(range(1, layers + 1), repeat=count) if sum(sizes) == layers)
        assert most(found.sizes) == min(map(most, every))
        assert min(found.sizes) >= 1


@pytest.mark.parametrize(
    ("layers", "plan", "message"),
    [
        (3, Plan(pp=4), "pp=4 needs 4 layers, one for each stage, but the model has 3; the largest pp that fits is 3"),
        (
            5,
            Plan(pp=3, schedule="zb-v", virtual_stages=2),
            r"virtual_stages=2 needs 6 layers.*largest pp that fits is 2",
        ),
        (1, Plan(pp=2, schedule="zb-v", virtual_stages=2), "virtual_stages must be at most 1"),
        (8, Plan(pp=2, layers_per_chunk=(4, 5)), "layers_per_chunk has 9 layers, but the model has num_layers=8"),
    ],
)
def test_cuts_that_do_not_fit(layers, plan, message):
    with pytest.raises(ValueError, match=message):
        cut(layers, plan)


def test_stages_that_do_not_fit():
    with pytest.raises(ValueError, match="costs must have a value for each of the 4 layers, got 3"):
        cut(4, Plan(pp=2), costs=[1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="multiple of 2 stages"):
        Stages((1, 2, 3), 2)
    with pytest.raises(ValueError, match="a V-shaped pipeline of 2 ranks has 4 stages, got 2"):
        Stages((1, 2), 2, v_shaped=True)
