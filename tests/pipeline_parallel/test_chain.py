"""A model of a user's own through a pipeline."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_ops.pipeline_parallel import ModuleChain, Pipeline
from parallel_ops.planner.plan import Plan
from parallel_ops.train import parallelize
from support.parallelism.layers import mesh_of, whole
from support.ranks.distributed import Raised, ranks

VOCABULARY, WIDTH = 29, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.final = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, VOCABULARY)})

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return loss(self.final["head"](self.final["norm"](x)), targets)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


NAMES = ("tokens", "layers.*", "final.norm", "final.head")


def chain(model: nn.Module | None = None, names: tuple[str, ...] = NAMES, blocks: str = "layers.*") -> ModuleChain:
    torch.manual_seed(0)
    made = Model() if model is None else model
    return ModuleChain(made, names, blocks=blocks, loss=loss, shape=lambda s, b: (s, b, WIDTH))


def batches(count: int, replica: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(replica)
    texts = torch.randint(VOCABULARY, (count, 9, 2), generator=generator)
    return [{"tokens": text[:-1], "targets": text[1:]} for text in texts]


def step(rank: int, text: str) -> tuple[dict[str, Tensor], list[str]]:
    """(whole gradients, names of all parameters) of this rank after a step."""
    plan = Plan.parse(text)
    mesh = mesh_of(pp=plan.pp, dp_shard=plan.dp)
    model = parallelize(chain(), mesh, plan)
    pipeline = Pipeline(model, mesh, plan)
    pipeline.step(batches(plan.micro_batches, mesh.rank("dp")), lambda _: 1 / plan.micro_batches)
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return grads, [name for name, _ in model.named_parameters()]


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
    model = Model()
    for replica in range(plan.dp):
        for given in batches(plan.micro_batches, replica):
            (model(**given) / (plan.micro_batches * plan.dp)).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    seen = set()
    for grads, names in ranks(4).run(step, f"{text},dtype=fp32"):
        assert set(grads) == set(names)  # under the names of the model
        seen |= set(names)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, want[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert seen == set(want)


def test_a_chain_without_a_pipeline_is_its_model():
    whole = chain()
    torch.manual_seed(0)
    model = Model()
    given = batches(1)[0]
    assert torch.equal(whole(**given), model(**given))
    assert list(whole.state_dict()) == list(model.state_dict())
    whole.load_state_dict(model.state_dict())


def test_schedules_that_need_the_packages_linears():
    for outcome in ranks(4).outcomes(step, "pp=4,schedule=zb-h1,global_batch=6,dtype=fp32"):
        assert isinstance(outcome, Raised)
        assert "models without the package's linears cannot; take '1f1b'" in outcome.message


def refused(rank: int) -> list[str]:
    """The errors of inputs that are no micro-batches of tokens."""
    plan, mesh, found = Plan.parse("pp=4,global_batch=2,dtype=fp32"), mesh_of(pp=4), []
    pipeline = Pipeline(parallelize(chain(), mesh, plan), mesh, plan)
    pair, images = batches(2), [{"tokens": torch.zeros(2, 3, 8, 8)}] * 2
    for inputs in ([], [tuple(given.values()) for given in pair], [{"input_ids": pair[0]["tokens"]}] * 2, images):
        with pytest.raises((TypeError, ValueError)) as error:
            pipeline.evaluate(inputs)
        found.append(str(error.value))
    return found


def test_inputs_that_are_no_tokens():
    for found in ranks(4).run(refused):
        assert found == [
            "Pipeline: inputs must have tokens of one shape [s, b], got []",
            "Pipeline: inputs must be mappings with a tensor 'tokens', got tuple",
            "Pipeline: inputs must be mappings with a tensor 'tokens', got ['input_ids']",
            "Pipeline: inputs must have tokens of one shape [s, b], got [(2, 3, 8, 8)]",
        ]


class Beside(Model):
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
        chain(**arguments)


def test_what_a_chain_does_not_take():
    whole = chain()
    with pytest.raises(ValueError, match="takes tokens and targets alone, got cu_seqlens"):
        whole(**batches(1)[0], positions=None, cu_seqlens=torch.tensor([0, 8]))
