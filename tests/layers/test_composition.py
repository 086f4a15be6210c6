"""Torch's own FSDP2, replicate, DDP, clipping, optimizers and checkpoints on the layers, as on any model."""

import functools
import itertools

import pytest
import torch

from support import composition
from support.composition import LAYOUTS, MODELS
from support.distributed import Raised, ranks

kinds = pytest.mark.parametrize("kind", MODELS)
layouts = pytest.mark.parametrize("layout", LAYOUTS)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*ShardedTensor"),
]


@functools.cache
def alone(kind):
    """Three steps on one process, and the weights after the second and the third."""
    run = composition.Run(kind, "one", seed=0)
    losses = [run.step(number) for number in range(2)]
    second = run.weights()
    losses.append(run.step(2))
    return losses, second, run.weights()


def compare(got, losses, weights):
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(losses), rtol=2e-6, atol=0)
    assert got[1].keys() == weights.keys()
    for name, weight in weights.items():
        # The gradient of a bias of all keys is rounding alone, which Adam makes a step of all the same.
        if not name.endswith("attention.k.bias"):
            torch.testing.assert_close(got[1][name], weight, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@kinds
@layouts
def test_losses_norms_and_weights_are_those_of_one_process(kind, layout):
    losses, second, _ = alone(kind)
    for got in ranks(4).run(composition.train, kind, layout):
        compare(got, losses[:2], second)


@kinds
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(kind, tmp_path):
    losses, _, third = alone(kind)
    saved = {layout: str(tmp_path / layout) for layout in ("one", "tp4", "fsdp4", "fsdp2 x tp2")}
    for layout, path in saved.items():
        if layout == "one":
            composition.train(0, kind, layout, path)
        else:
            ranks(4).run(composition.train, kind, layout, path)
    for number, layout in enumerate(saved):
        # A GPT from each into the next; a Llama from each into the one after that.
        paths = [list(saved.values())[number - (1 if kind == "gpt" else 2)]]
        if layout == "one":
            outcomes = [composition.resume(0, kind, layout, paths)]
        else:
            outcomes = ranks(4).run(composition.resume, kind, layout, paths)
        for got in itertools.chain.from_iterable(outcomes):
            compare(got, losses[2:], third)


@pytest.mark.parametrize("layout", ["fsdp4", "fsdp2 x tp2", "replicate2 x tp2", "ddp4"])
@pytest.mark.parametrize("main", [True, False])
def test_gradients_that_nobody_would_reduce_are_refused(layout, main):
    for before in (True, False) if layout.startswith("fsdp") else (False,):
        for outcome in ranks(4).outcomes(composition.hidden_gradients, layout, main, before):
            assert isinstance(outcome, Raised) and outcome.type == "ValueError", outcome
            assert "leave" in outcome.message and "main_grad" in outcome.message


@pytest.mark.parametrize("main", [True, False])
def test_gradients_of_inputs_alone_leave_those_of_weights_alone(main):
    assert ranks(2).run(composition.only_inputs, main) == [(0.0, 0)] * 2


def test_a_copy_is_over_the_same_mesh():
    assert all(ranks(4).run(composition.copies, "tp4"))
