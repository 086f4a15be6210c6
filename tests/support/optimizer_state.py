"""What each rank does in the tests of optimizer state: gradients are parts of whole ones, so every size steps alike."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from parallel_ops import ParallelMesh
from parallel_ops.comm._group import group_rank, group_size
from parallel_ops.layers import load_optimizer_state_dict, optimizer_state_dict
from parallel_ops.layers._sharding import ShardedModule
from support.layers import build

FROZEN, LATE = "norm_attention.weight", "norm_mlp.weight"  # never stepped; stepped from the third step on


class Master(Optimizer):
    """Steps fp32 copies of its parameters, with a momentum in fp32; counts its steps in a Python number."""

    def __init__(self, groups: Any, lr: float = 0.1) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.names_of_state = "master", "momentum"  # of the instance, as subclasses have them

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        master, momentum = self.names_of_state
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, master: p.float(), momentum: torch.zeros_like(p, dtype=torch.float32)}
                state["step"] += 1
                state[momentum].mul_(0.9).add_(p.grad.float())
                state[master].sub_(state[momentum] + group["weight_decay"] * state[master], alpha=group["lr"])
                p.copy_(state[master])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.1),  # a number in its state that is not a count
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.5),
    "plain": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
    "master": Master,
}


def make(kind: str, optimizer: str, seed: int = 0, **options: Any) -> tuple[nn.Module, Optimizer]:
    """A layer, and an optimizer with matrices in one group and vectors in another."""
    module = build(kind, seed, dtype=torch.bfloat16 if optimizer == "master" else torch.float32, **options)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name != FROZEN)
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return module, OPTIMIZERS[optimizer]([g for g in groups if g["params"]])


def step(module: nn.Module, optimizer: Optimizer, number: int) -> None:
    shardings = {
        child.get_parameter(name): (sharding, child.group)
        for child in module.modules()
        if isinstance(child, ShardedModule)
        for name, sharding in child.shardings.items()
    }
    generator = torch.Generator().manual_seed(number)
    for name, parameter in module.named_parameters():
        sharding, group = shardings.get(parameter, (None, None))
        whole = torch.randn(sharding.shape if sharding else parameter.shape, generator=generator).to(parameter.dtype)
        if name == FROZEN or (name == LATE and number < 2):
            continue
        part = sharding.part_of(whole, group_rank(group), group_size(group)) if sharding else whole
        parameter.grad = part.reshape(parameter.shape).clone()
    optimizer.step()
    optimizer.zero_grad()


def whole(state: Any) -> Any:
    """The same with whole plain tensors, that share no memory."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    if isinstance(state, DTensor):
        return state.full_tensor()
    return state.clone() if isinstance(state, Tensor) else state


def result(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return whole({"model": module.state_dict(), "optimizer": optimizer_state_dict(module, optimizer)})


def run(rank: int, kind: str, name: str, saved_after: int, path: str | None, **options: Any) -> dict[str, Any]:
    """Four steps, on the way a checkpoint; everything at the end."""
    module, optimizer = make(kind, name, **options)
    for number in range(4):
        if path is not None and number == saved_after:
            state = {"model": module.state_dict(), "optimizer": optimizer_state_dict(module, optimizer)}
            dcp.save(state, checkpoint_id=path, no_dist=not dist.is_initialized())
        step(module, optimizer, number)
    return result(module, optimizer)


def run_in_pairs(rank: int, kind: str, name: str, saved_after: int, path: str) -> dict[str, Any]:
    """The same of two replicas, of two ranks each."""
    mesh = ParallelMesh(dp=2, tp=2)
    return run(rank, kind, name, saved_after, path, group=mesh.group("tp"))


def sharded_again(rank: int) -> tuple[str, str]:
    """What state_dict and optimizer_state_dict say of it."""
    module, optimizer = make("column", "plain")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    optimizer = OPTIMIZERS["plain"](module.parameters())
    errors = []
    for state in (module.state_dict, lambda: optimizer_state_dict(module, optimizer)):
        try:
            state()
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
    return tuple(errors)


def resume(rank: int, kind: str, name: str, saved_after: int, path: str, steps_before: int = 0) -> dict[str, Any]:
    """The rest of ``run`` from its checkpoint, by a model of other values whose optimizer may have stepped."""
    module, optimizer = make(kind, name, seed=1)
    for group in optimizer.param_groups:
        group["lr"] = 0.7
    for number in range(steps_before):
        step(module, optimizer, 10 + number)
    state = {"model": module.state_dict(), "optimizer": optimizer_state_dict(module, optimizer)}
    dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    module.load_state_dict(state["model"])
    load_optimizer_state_dict(module, optimizer, state["optimizer"])
    for number in range(saved_after, 4):
        step(module, optimizer, number)
    return result(module, optimizer)


def load_whole(rank: int, kind: str, name: str, state: dict[str, Any]) -> dict[str, Any]:
    """Everything, after whole tensors were loaded."""
    module, optimizer = make(kind, name, seed=1)
    module.load_state_dict(state["model"])
    load_optimizer_state_dict(module, optimizer, state["optimizer"])
    return result(module, optimizer)


def kinds(rank: int, kind: str, name: str) -> dict[str, dict[str, tuple[str, list[int], list[int]]]]:
    """Of every state tensor its type, its shape, and the shape of what is here."""
    module, optimizer = make(kind, name)
    step(module, optimizer, 3)
    state = optimizer_state_dict(module, optimizer)["state"]
    return {
        parameter: {
            key: (type(t).__name__, list(t.shape), list((t.to_local() if isinstance(t, DTensor) else t).shape))
            for key, t in own.items()
        }
        for parameter, own in state.items()
    }


def adafactor(rank: int) -> None:
    module, optimizer = make("layer", "adafactor")
    step(module, optimizer, 0)
    optimizer_state_dict(module, optimizer)


def another_layout(rank: int, change: str) -> tuple[str, bool]:
    """(the error, whether the optimizer is as it was)"""
    module, optimizer = make("llama", "adamw")
    step(module, optimizer, 0)
    before = result(module, optimizer)
    state = whole(before["optimizer"])
    moments = state["state"]["mlp.up.weight"]
    if change == "transposed":
        moments["exp_avg"] = moments["exp_avg"].transpose(0, 1)
    if change == "another":
        moments["exp_avg"] = optimizer_state_dict(module, optimizer)["state"]["mlp.out.weight"]["exp_avg"]
    if change == "rows":
        moments["exp_avg"] = torch.zeros(3)
    try:
        load_optimizer_state_dict(module, optimizer, state)
    except ValueError as error:
        return str(error), not differing(result(module, optimizer), before)
    raise AssertionError("nothing was raised")


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    """What is in nested dictionaries and lists, by where it is."""
    if not isinstance(state, dict | list):
        return {path: state}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {where: leaf for key, value in items for where, leaf in leaves(value, f"{path}/{key}").items()}


def differing(got: Any, want: Any) -> list[str]:
    """Where two states are not the same, tensors bit for bit."""
    got, want = leaves(got), leaves(want)
    return [
        path
        for path in got.keys() | want.keys()
        if not (path in got and path in want and _equal(got[path], want[path]))
    ]


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) and a.dtype is b.dtype if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
