"""A model of a user's own, and what each rank does with it in the tests of ``ModuleChain``."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_ops.pipeline_parallel import ModuleChain, Pipeline
from parallel_ops.planner.plan import Plan
from parallel_ops.train import parallelize
from support.layers import mesh_of
from support.staged import whole

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
