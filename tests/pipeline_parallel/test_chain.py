"""A model of a user's own through a pipeline."""

import pytest
import torch
from torch import nn

from parallel_ops.planner.plan import Plan
from support import chains
from support.distributed import Raised, ranks


@pytest.mark.parametrize(
    "text",
    [
        "pp=4,schedule=1f1b,global_batch=6",
        "pp=2,dp=2,zero=2,schedule=interleaved,virtual_stages=2,global_batch=8",
        "pp=2,dp=2,zero=3,schedule=gpipe,global_batch=6",
        "pp=2,dp=2,schedule=1f1b,layers_per_chunk=4:1,global_batch=2",
    ],
)
def test_a_chain_equals_its_model(text):
    plan = Plan.parse(f"{text},dtype=fp32")
    torch.manual_seed(0)
    model = chains.Model()
    for replica in range(plan.dp):
        for given in chains.batches(plan.micro_batches, replica):
            (model(**given) / (plan.micro_batches * plan.dp)).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    seen = set()
    for grads, names in ranks(4).run(chains.step, f"{text},dtype=fp32"):
        assert set(grads) == set(names)  # under the names of the model
        seen |= set(names)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, want[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert seen == set(want)


def test_a_chain_without_a_pipeline_is_its_model():
    chain = chains.chain()
    torch.manual_seed(0)
    model = chains.Model()
    given = chains.batches(1)[0]
    assert torch.equal(chain(**given), model(**given))
    assert list(chain.state_dict()) == list(model.state_dict())
    chain.load_state_dict(model.state_dict())


def test_schedules_that_need_the_packages_linears():
    for outcome in ranks(4).outcomes(chains.step, "pp=4,schedule=zb-h1,global_batch=6,dtype=fp32"):
        assert isinstance(outcome, Raised)
        assert "models without the package's linears cannot; take '1f1b'" in outcome.message


class Beside(chains.Model):
    """Has a parameter that no module of the chain has."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ("tokens", "blocks.*")}, r"no module 'blocks.\*'; it has tokens, layers, final"),
        ({"names": ("tokens", "layers.*", "final.norm")}, "must have each parameter of the model in one module"),
        ({"names": ("tokens", "layers.*", "final.*", "final")}, "some of them twice"),
        ({"names": ("tokens", "layers.*", "final.*"), "blocks": "layers"}, "must have the blocks 'layers'"),
        ({"model": Beside()}, "they have 35 of 36"),
    ],
)
def test_models_that_are_no_chain(arguments, message):
    with pytest.raises(ValueError, match=message):
        chains.chain(**arguments)


def test_what_a_chain_does_not_take():
    chain = chains.chain()
    with pytest.raises(ValueError, match="takes tokens and targets alone, got cu_seqlens"):
        chain(**chains.batches(1)[0], positions=None, cu_seqlens=torch.tensor([0, 8]))
