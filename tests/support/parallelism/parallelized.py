"""A transformer trained under ``parallelize``, on the ranks of a group or on one."""

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallel_ops import ParallelMesh
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.planner import Plan
from parallel_ops.train.parallelize_model import micro_batch, parallelize
from support.numerics.layer_reductions import reductions
from support.parallelism.layers import mesh_of, whole

MODELS = {
    "gpt": TransformerConfig(vocab_size=31, seq_length=8, num_layers=2, hidden_size=32, num_heads=4, dropout=0.0),
    "llama": TransformerConfig(
        vocab_size=31, seq_length=8, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2,
        activation="swiglu", norm="rms_norm", bias=False, positions="rotary", tied_embeddings=False,
    ),
}  # fmt: skip
SEQUENCES = 8  # of a step, over all ranks and micro-batches


def plan_of(mesh: ParallelMesh, **options: Any) -> Plan:
    """A plan of the mesh's sizes, in fp32."""
    sizes = {name: mesh.size(name) for name in ("dp", "dp_replicate", "tp", "cp")}
    return Plan(**{"dtype": "fp32", "global_batch": mesh.size("dp"), **sizes, **options})


def reductions_of_settings(rank: int, given: dict[str, Any]) -> set[str]:
    """Of the linears of the model that the trainer builds."""
    from parallel_ops.train.build import build_model  # needs pydantic
    from parallel_ops.train.config_file import settings_of

    settings = settings_of(given)
    mesh = mesh_of(tp=settings.plan.tp, dp_shard=settings.plan.dp)
    return set(reductions(build_model(settings, mesh, torch.device("cpu"), None)))


def devices_of_offloaded(rank: int, given: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Where the trainer's model has its parameters and its buffers, with a device of its own as the GPU."""
    from parallel_ops.train.build import build_model  # needs pydantic
    from parallel_ops.train.config_file import settings_of

    settings = settings_of(given)
    model = build_model(settings, mesh_of(dp_shard=settings.plan.dp), torch.device("meta"), None)
    return {p.device.type for p in model.parameters()}, {b.device.type for b in model.buffers()}


def dtypes_of_blocks(rank: int, zero: int) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Of hidden states and of the tables of rotary positions in the blocks of a bf16 plan."""
    mesh = mesh_of(**{"dp_shard" if zero else "dp_replicate": 2})
    model = parallelize(Transformer(MODELS["llama"]), mesh, plan_of(mesh, zero=zero, dtype="bf16"))
    found: tuple[set[torch.dtype], set[torch.dtype]] = set(), set()

    def look(_: nn.Module, given: tuple[Any, ...]) -> None:
        x, tables, *_ = given
        found[0].add(x.dtype)
        found[1].update(t.dtype for t in tables)

    for block in model.layers.values():
        block.attention.register_forward_pre_hook(look)
    model(*torch.randint(31, (2, 8, 1))).backward()
    return found


def train(
    rank: int, kind: str, sizes: dict[str, int], options: dict[str, Any], accumulation: int = 1, steps: int = 2
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a few steps, the same data in all over any ranks and micro-batches."""
    mesh = mesh_of(**sizes) if dist.is_initialized() else ParallelMesh()
    plan = plan_of(mesh, **options)
    model = parallelize(Transformer(MODELS[kind], device="meta"), mesh, plan)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    # Unlike Adam's, its updates show the scale of gradients.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, norms = [], []
    replicas, replica = mesh.size("dp"), mesh.rank("dp")
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens, targets = torch.randint(31, (2, 8, SEQUENCES), generator=generator).chunk(replicas, 2)[replica]
        total = torch.zeros(())
        for number in range(accumulation):
            micro_batch(model, plan.zero, last=number == accumulation - 1)
            part = slice(number, None, accumulation)
            loss = model(tokens[:, part], targets[:, part]) / accumulation
            loss.backward()
            total += loss.detach()
        norms.append(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)).item())
        optimizer.step()
        optimizer.zero_grad()
        if (ranks := mesh["loss"]) is not None:
            dist.all_reduce(total, group=ranks.get_group())
            total /= ranks.size()
        losses.append(total.item())
    return losses, norms


def saved_bytes(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes that a forward keeps for its backward, without parameters and buffers, each storage counted once.

    Counts tensors saved by autograd and by selective recomputation.
    """

    def alive() -> dict[int, int]:
        plain = (t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter))
        # Tensors of a trace, which compiled code may hold, have no memory.
        tensors = [t for t in plain if t.layout is torch.strided and not torch._is_functional_tensor(t)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    before = alive()
    # Saved tensors that pass through a hook are Python objects, which the garbage collector tracks.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        out = model(*args, **kwargs)
    kept = sum(size for memory, size in alive().items() if memory not in before)
    del out
    return kept
