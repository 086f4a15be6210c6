"""What each rank does in the tests of experts."""

import gc
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from parallel_ops import ParallelMesh
from parallel_ops.expert_parallel import AuxiliaryLosses, Dispatch
from parallel_ops.expert_parallel.exchange import Exchange
from parallel_ops.layers import ParallelMoE
from parallel_ops.layers.experts import Experts, shard_experts
from parallel_ops.models import Transformer, TransformerConfig, config_from_pretrained
from parallel_ops.models.experts import ExpertsConfig
from parallel_ops.planner import Plan
from parallel_ops.tensor_parallel.linear.call import Overlap
from parallel_ops.train.parallelize_model import parallelize
from support.parallelism.layers import mesh_of, mesh_of_plan, whole

HIDDEN, FFN = 12, 10


def sent(
    rank: int, trial: int, num_experts: int, top_k: int, capacity: int | None, chunks: int = 1
) -> dict[str, Tensor]:
    """Rows, results and gradients of one dispatch over all ranks, whose experts multiply by their number + 1."""
    group = dist.group.WORLD if dist.is_initialized() else None
    size = 1 if group is None else group.size()
    generator = torch.Generator().manual_seed(trial)
    everyone = [tokens_of(generator, trial, number, num_experts, top_k) for number in range(size)]
    x, experts, weights, grad = everyone[rank]
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    load = torch.bincount(experts.flatten(), minlength=num_experts).int()
    journey = Dispatch(x, experts, load, num_experts, group=group, weights=weights, capacity=capacity, chunks=chunks)
    held, returning, rows = num_experts // size // chunks, [], 0
    for chunk in range(chunks):
        way = journey.receive(journey.in_flight[chunk], chunk)
        ids = torch.bucketize(torch.arange(way.rows.shape[0]), way.offs.long(), right=True)
        y = way.rows * (1 + (rank * chunks + chunk) * held + ids[:, None]) * way.weights[:, None]
        returning.append(journey.send_back(y, chunk))
        rows += way.rows.shape[0]
    out = journey.combine(returning)
    out.backward(grad)
    return {"x": x.detach(), "experts": experts, "weights": weights.detach(), "grad": grad, "out": out.detach(),
            "dx": x.grad, "dweights": weights.grad, "rows": torch.tensor(rows)}  # fmt: skip


def left_behind(rank: int, chunks: int) -> int:
    """How many exchanges live after the backward of a dispatch, without the garbage collector."""
    gc.disable()
    try:
        sent(rank, 1, 4, 2, None, chunks)
        return sum(issubclass(type(found), Exchange) for found in gc.get_objects())
    finally:
        gc.enable()  # the next tests have this process


def of_another_capacity(rank: int) -> None:
    """Ranks that do not agree about the capacity."""
    x, experts = torch.randn(4, HIDDEN), torch.zeros(4, 1, dtype=torch.int64)
    Dispatch(x, experts, torch.tensor([4, 0]).int(), 2, group=dist.group.WORLD, capacity=3 + rank)


def tokens_of(
    generator: torch.Generator, trial: int, rank: int, num_experts: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, choices, weights and gradients of a rank: some have none, some choose the same experts."""
    draw = torch.randint(0, 9, (2,), generator=generator).tolist()
    count = 0 if draw[0] == 0 else draw[0] + rank
    scores = torch.rand(count, num_experts, generator=generator)
    if draw[1] < 2:  # all tokens to the same experts
        scores[:, :top_k] += 1
    experts = scores.topk(top_k).indices
    x, grad = (torch.randn(count, HIDDEN, generator=generator) for _ in range(2))
    return x, experts, torch.rand(count, top_k, generator=generator), grad


def layer(
    rank: int, sizes: dict[str, int], options: dict[str, Any], sequence_parallel: bool, seed: int
) -> dict[str, Any]:
    """A layer's result and gradients for tokens that tensor-parallel ranks share, whole; experts are over ``ep``."""
    mesh = mesh_of(**sizes) if dist.is_initialized() else None
    torch.manual_seed(seed)
    tp = None if mesh is None else mesh["tp"]
    moe = ParallelMoE(
        HIDDEN, FFN, tp_mesh=tp, ep_mesh=None if mesh is None else mesh["ep"], sequence_parallel=sequence_parallel,
        init_method=torch.nn.init.normal_, **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    x, grad, residual = (torch.randn(8, 2, HIDDEN, generator=generator) for _ in range(3))
    part = slice(0, 8)
    if tp is not None and sequence_parallel:
        part = slice(rank * 8 // tp.size(), (rank + 1) * 8 // tp.size())
    own = x[part].clone().requires_grad_()
    losses = AuxiliaryLosses(0.3, 0.2, scale=2.0)
    y = moe(own, residual=residual[part], losses=losses)
    y.backward(grad[part])
    if mesh is not None and (shards := mesh.expert_shards) is not None:  # as FSDP2 does
        for p in moe.experts.parameters():
            dist.all_reduce(p.grad.to_local(), group=shards.get_group())
    grads = {name: whole(p.grad) for name, p in moe.named_parameters()}
    return {"y": y.detach(), "dx": own.grad, "part": part, "grads": grads, "load": moe.load}


def folder_gradients(rank: int, folder: str, text: str, tokens: Tensor, targets: Tensor, save: str) -> Tensor:
    """The loss of a Hugging Face folder's model under a plan; its gradients are saved as if they were the weights.

    Args:
        tokens, targets: ``[s, b]``, of which each data-parallel rank takes its part of the columns.
    """
    plan = Plan.parse(text)
    mesh = mesh_of_plan(plan)
    model = parallelize(Transformer(config_from_pretrained(folder), device="meta"), mesh, plan)
    model.to_empty(device="cpu")
    model.load_pretrained(folder)  # type: ignore[operator]
    columns = tokens.shape[1] // plan.dp
    own = slice(mesh.rank("dp") * columns, (mesh.rank("dp") + 1) * columns)
    loss = model(tokens[:, own], targets[:, own])
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    model.save_pretrained(save)  # type: ignore[operator]
    return loss.detach()


def order_of_events(rank: int, overlap: Overlap = "auto") -> list[str]:
    """What happens to the messages of a layer with a shared MLP, and when that and each chunk of the experts are
    computed, forward and backward."""
    events: list[str] = []

    def noted(name: str, owner: type = Exchange) -> Any:
        original = getattr(owner, name)

        def method(*args: Any) -> Any:
            events.append(name.removeprefix("_"))
            return original(*args)

        return mock.patch.object(owner, name, method)

    torch.manual_seed(0)
    mesh = mesh_of(dp_shard=2, ep=2)["ep"]
    moe = ParallelMoE(HIDDEN, FFN, 4, 2, tp_mesh=None, ep_mesh=mesh, shared_experts=1, overlap=overlap)
    assert moe.shared is not None
    moe.shared.register_forward_hook(lambda *_: events.append("shared"))
    moe.shared.gate.weight.register_hook(lambda _: events.append("shared backward"))
    with noted("send"), noted("wait"), noted("_compute", Experts):
        y = moe(torch.randn(5, HIDDEN, requires_grad=True))
        events.append("backward")
        y.sum().backward()
    return events


OWN_LOOP = TransformerConfig(
    vocab_size=33, seq_length=8, num_layers=2, hidden_size=16, num_heads=4, activation="swiglu", bias=False,
    experts=ExpertsConfig(num_experts=8, top_k=2, ffn_hidden_size=12, shared_experts=1),
)  # fmt: skip


def own_loop(rank: int, sizes: dict[str, int], explicit: bool = False) -> dict[str, Tensor]:
    """Whole gradients of a model with experts in a loop of one's own; every rank of ``loss`` has a sequence."""
    mesh = mesh_of(**sizes) if dist.is_initialized() else ParallelMesh()
    model = Transformer(OWN_LOOP, tp_mesh=mesh["tp"], cp_mesh=mesh["cp"], ep_mesh=mesh["ep"], device="meta")
    if dist.is_initialized():
        if explicit:
            shard_experts(model, mesh)
        over = mesh["dp_replicate", "fsdp"] if mesh.size("dp_replicate") > 1 else mesh["fsdp"]
        for block in (*model.layers.values(), model):
            fully_shard(block, mesh=over)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    tokens, targets = torch.randint(33, (2, 8, 4), generator=torch.Generator().manual_seed(1))
    own = slice(mesh.rank("dp"), None, mesh.size("dp"))
    model(tokens[:, own], targets[:, own]).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: whole(grad) for name, grad in found.items() if grad is not None}
