"""What each rank does in the tests of parameters whose shards are uneven."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from parallel_ops import ParallelMesh
from parallel_ops.layers import VocabParallelEmbedding
from parallel_ops.layers.initialization import fill_
from parallel_ops.models import Transformer
from parallel_ops.train.checkpoint.planners import LoadPlanner, SavePlanner
from parallel_ops.train.step.muon import MuonAndAdamW
from support.parallelism.layers import mesh_of, whole


class Tables(nn.Module):
    """Embeddings of several sizes; their values are what the seed draws on one rank."""

    def __init__(self, sizes: list[int], mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.tables = nn.ModuleList(VocabParallelEmbedding(size, 4, tp_mesh=mesh, device="meta") for size in sizes)

    def draw(self, seed: int) -> "Tables":
        self.to_empty(device="cpu")
        for parameter in self.parameters():
            fill_(parameter, 7.0)  # what is not written must not be right by chance
        torch.manual_seed(seed)
        for table in self.tables:
            table.reset_parameters()
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch]`` numbers of any size to a scalar."""
        each = [table(tokens % table.num_embeddings).sin().mean() for table in self.tables]
        return torch.stack(each).sum()


def shards_of(mesh: ParallelMesh) -> DeviceMesh:
    found = mesh["dp_replicate", "fsdp"] if mesh.size("dp_replicate") > 1 else mesh["fsdp"]
    assert found is not None
    return found


def optimizer_of(model: Tables) -> MuonAndAdamW:
    """Muon for every other table."""
    parameters = list(model.parameters())
    return MuonAndAdamW(
        [{"params": parameters[::2], "momentum": 0.9}, {"params": parameters[1::2], "momentum": None}],
        lr=0.1, eps=1e-4,
    )  # fmt: skip


def sharded(sizes: list[int], mesh: ParallelMesh) -> Tables:
    model = Tables(sizes, mesh["tp"])
    fully_shard(model, mesh=shards_of(mesh))
    return model


def tables(rank: int, sizes: list[int], over: dict[str, int], other: dict[str, int], folder: Path) -> None:
    """Draws, trains and saves tables over a mesh as one process does; loads them over another mesh and on one rank."""
    mesh = mesh_of(**over)
    one, model = Tables(sizes).draw(0), sharded(sizes, mesh).draw(0)
    _same(model, one, exact=True)
    optimizers = optimizer_of(one), optimizer_of(model)
    tokens = torch.randint(10_000, (64, mesh.size("dp")), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        torch.stack([one(part) for part in tokens.t()]).mean().backward()
        model(tokens[:, mesh.rank("dp")]).backward()
        for own, theirs in zip(one.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(whole(theirs.grad), own.grad, rtol=1e-4, atol=1e-7)
        norms = [whole(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01)) for m in (one, model)]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _same(model, one, exact=False)  # Newton-Schulz is in bfloat16

    saved = _state(model, optimizers[1])
    dcp.save(saved, checkpoint_id=folder, planner=SavePlanner())
    want = _flat(saved)
    again = sharded(sizes, mesh_of(**other)).draw(1)
    found = _state(again, optimizer_of(again))
    dcp.load(found, checkpoint_id=folder, planner=LoadPlanner())
    assert all(torch.equal(t, want[name]) for name, t in _flat(found).items())
    alone = Tables(sizes).draw(1)
    found = _state(alone, optimizer_of(alone))
    dcp.load(found, checkpoint_id=folder, planner=LoadPlanner(), no_dist=True)
    assert all(torch.equal(t, want[name]) for name, t in _flat(found).items())


def _state(model: Tables, optimizer: MuonAndAdamW) -> dict[str, Any]:
    """Weights, and one moment of each: those of the others are sharded alike."""
    if not optimizer.state:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    moments = {name: of.get("momentum_buffer", of.get("exp_avg")) for name, of in state["state"].items()}
    return {"model": weights, "moments": moments}


def _flat(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{kind}.{name}": whole(t) for kind, named in state.items() for name, t in named.items()}


def _same(model: Tables, one: Tables, *, exact: bool) -> None:
    for own, theirs in zip(one.parameters(), model.parameters(), strict=True):
        bound = 0.0 if exact else 1e-2
        torch.testing.assert_close(whole(theirs), own, rtol=bound, atol=bound)


def folders(rank: int, folder: Path, over: dict[str, int]) -> dict[str, Tensor]:
    """The whole weights of a Hugging Face folder that ranks have loaded; they save it to ``folder / "again"``."""
    from parallel_ops.models import config_from_pretrained

    mesh = mesh_of(**over)
    model = Transformer(config_from_pretrained(folder), tp_mesh=mesh["tp"], device="meta")
    for layer in (*model.layers.values(), model):
        fully_shard(layer, mesh=shards_of(mesh))
    model.to_empty(device="cpu")
    model.load_pretrained(folder)
    model.save_pretrained(folder / f"again{dist.get_world_size()}")
    return {name: whole(p).detach() for name, p in model.named_parameters()}
