"""Torch's own FSDP2, replicate, DDP, clipping, optimizers and checkpoints on the layers, as on any model."""

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from parallel_ops import ParallelMesh, vocab_parallel_linear_cross_entropy
from parallel_ops.layers import Norm, ParallelTransformerLayer, VocabParallelEmbedding
from support.parallelism.layers import local, mesh_of, set_handles, whole
from support.ranks.distributed import Raised, ranks

VOCAB, HIDDEN, LENGTH, BATCH = 31, 32, 8, 4  # no number of ranks divides the vocabulary


LLAMA: dict[str, Any] = {
    "activation": "swiglu", "norm": "rms_norm", "bias": False, "num_kv_heads": 2, "qk_norm": True,
}  # fmt: skip


# How the ranks of a group of four are used.
LAYOUTS: dict[str, dict[str, int]] = {
    "tp4": {"tp": 4},
    "fsdp2 x tp2": {"dp_shard": 2, "tp": 2},
    "hsdp2 x 2": {"dp_replicate": 2, "dp_shard": 2},
    "replicate2 x tp2": {"dp_replicate": 2, "tp": 2},
    "ddp4": {"dp_replicate": 4},
}


Losses = list[tuple[float, float]]


class Model(nn.Module):
    """Tokens and targets ``[s, b]`` to the mean loss, with a tied embedding."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"tp_mesh": mesh, "sequence_parallel": True}
        self.tokens = VocabParallelEmbedding(VOCAB, HIDDEN, **self.options)
        self.layers = nn.ModuleList(ParallelTransformerLayer(HIDDEN, 4, **LLAMA, **self.options) for _ in range(2))
        self.norm = Norm(HIDDEN, **self.options)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        weight, group = self.tokens.local_weight(), self.tokens.group
        return vocab_parallel_linear_cross_entropy(
            self.norm(x), weight, targets, group=group, sequence_parallel=group is not None
        )


def meshes(layout: str) -> ParallelMesh:
    return mesh_of(**LAYOUTS.get(layout, {}))


class Run:
    """A model and its optimizer, on the ranks of a layout; ``one`` is this process alone."""

    def __init__(self, layout: str, seed: int) -> None:
        torch.manual_seed(seed)
        mesh = None if layout == "one" else meshes(layout)
        self.dp = None if mesh is None else mesh["dp"]
        self.model = Model(None if mesh is None else mesh["tp"])
        self.call: nn.Module = self.model
        if layout.startswith(("fsdp", "hsdp")):
            assert mesh is not None
            shards = mesh["fsdp"] if layout.startswith("fsdp") else mesh["dp_replicate", "fsdp"]
            for layer in self.model.layers:
                fully_shard(layer.mlp, mesh=shards)
                fully_shard(layer, mesh=shards)
            fully_shard(self.model, mesh=shards)
        elif layout.startswith("replicate"):
            assert mesh is not None
            for layer in self.model.layers:
                replicate(layer, mesh=mesh["dp_replicate"])
            replicate(self.model, mesh=mesh["dp_replicate"])
        elif layout.startswith("ddp"):
            self.call = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-4)

    def step(self, number: int) -> tuple[float, float]:
        """(mean loss, norm of the gradient) of the step of this number, the same data in all over any ranks."""
        generator = torch.Generator().manual_seed(number)
        tokens, targets = torch.randint(VOCAB, (2, LENGTH, BATCH), generator=generator).unbind()
        ranks, rank = (1, 0) if self.dp is None else (self.dp.size(), self.dp.get_local_rank())
        loss = self.call(tokens.chunk(ranks, 1)[rank], targets.chunk(ranks, 1)[rank])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach().clone()
        if self.dp is not None:
            dist.all_reduce(mean, group=self.dp.get_group())
        return mean.item() / ranks, whole(norm).item()

    def weights(self) -> dict[str, Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {name: whole(p.detach()).clone() for name, p in self.model.named_parameters()}

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def train(rank: int, layout: str, save: str | None = None) -> tuple[Losses, dict[str, Tensor]]:
    """Two steps; then saves, if asked."""
    run = Run(layout, seed=0)
    losses = [run.step(number) for number in range(2)]
    weights = run.weights()
    if save is not None:
        dcp.save(run.state(), checkpoint_id=save, no_dist=layout == "one")
    return losses, weights


def resume(rank: int, layout: str, path: str) -> tuple[Losses, dict[str, Tensor]]:
    """One more step from a checkpoint, in a model of other weights."""
    run = Run(layout, seed=1)
    state = run.state()
    dcp.load(state, checkpoint_id=path, no_dist=layout == "one")
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return [run.step(2)], run.weights()


def hidden_gradients(rank: int, layout: str, main: bool, before: bool) -> None:
    """A step whose weight gradients go past whoever reduces them."""
    from parallel_ops.tensor_parallel import DeferredWeightGradients

    queue = None if main else DeferredWeightGradients()
    if before:
        mesh = meshes(layout)
        model = Model(mesh["tp"])
        set_handles(model, queue, main)
        fully_shard(model, mesh=mesh["fsdp"])
        model(*torch.randint(VOCAB, (2, LENGTH, 1)).unbind())
        return
    run = Run(layout, seed=0)
    set_handles(run.model, queue, main)
    run.step(0)


def copies(rank: int, layout: str) -> bool:
    """Whether a deep copy of a model over a mesh, which has gradients, computes what the model does."""
    run = Run(layout, seed=0)
    tokens, targets = torch.randint(VOCAB, (2, LENGTH, BATCH), generator=torch.Generator().manual_seed(0)).unbind()
    run.model(tokens, targets).backward()
    return bool(copy.deepcopy(run.model)(tokens, targets) == run.model(tokens, targets))


def only_inputs(rank: int, main: bool) -> tuple[float, int]:
    """(what is in every main_grad, what the queue holds) after a backward that asks for the input's gradient alone."""
    from parallel_ops.tensor_parallel import DeferredWeightGradients
    from support.parallelism.layers import build

    layer, queue = build("llama", sequence_parallel=True), DeferredWeightGradients()
    linears = set_handles(layer, None if main else queue, main)
    x = torch.randn(4, 2, 16, requires_grad=True)
    torch.autograd.grad(layer(x).sum(), [x])
    total = sum(linear.main_grad.abs().sum().item() for linear in linears.values()) if main else 0.0
    assert all(p.grad is None or not local(p.grad).any() for p in layer.parameters())
    return total, len(queue)


pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*ShardedTensor"),
]


@functools.cache
def alone():
    """Three steps on one process, and the weights after the second and the third."""
    run = Run("one", seed=0)
    losses = [run.step(number) for number in range(2)]
    second = run.weights()
    losses.append(run.step(2))
    return losses, second, run.weights()


def compare(got, losses, weights):
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(losses), rtol=2e-6, atol=0)
    assert got[1].keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(got[1][name], weight, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_norms_and_weights_are_those_of_one_process(layout):
    losses, second, _ = alone()
    for got in ranks(4).run(train, layout):
        compare(got, losses[:2], second)


def test_a_checkpoint_of_any_layout_goes_on_in_any_other(tmp_path):
    losses, _, third = alone()
    layouts = ("one", "tp4", "fsdp2 x tp2")
    for saved, other in zip(layouts, (*layouts[1:], layouts[0]), strict=True):
        path = str(tmp_path / saved)
        train(0, saved, path) if saved == "one" else ranks(4).run(train, saved, path)
        for got in [resume(0, other, path)] if other == "one" else ranks(4).run(resume, other, path):
            compare(got, losses[2:], third)


@pytest.mark.parametrize("layout", ["fsdp2 x tp2", "replicate2 x tp2", "ddp4"])
@pytest.mark.parametrize("main", [True, False])
def test_gradients_that_nobody_would_reduce_are_refused(layout, main):
    for before in (True, False) if layout.startswith("fsdp") else (False,):
        for outcome in ranks(4).outcomes(hidden_gradients, layout, main, before):
            assert isinstance(outcome, Raised) and outcome.type == "ValueError", outcome
            assert "leave" in outcome.message and "main_grad" in outcome.message


@pytest.mark.parametrize("main", [True, False])
def test_gradients_of_inputs_alone_leave_those_of_weights_alone(main):
    assert ranks(2).run(only_inputs, main) == [(0.0, 0)] * 2


def test_a_copy_is_over_the_same_mesh():
    assert all(ranks(4).run(copies, "tp4"))
