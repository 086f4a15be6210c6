"""Parameters that are one rank's part of a whole: how they are drawn, saved and loaded.

Drawn: the whole parameter from PyTorch's default generator, of which each rank keeps its part. Ranks seeded alike so
have parts of one model, which is the model that a single process would have drawn, whatever the size of the group. It
needs room for one whole parameter at a time.

Saved: ``state_dict`` holds each part as a DTensor, which knows where in the whole it lies and shares the parameter's
memory, so ``torch.distributed.checkpoint`` saves every part once and loads into another number of ranks. On one rank
the state dict holds plain tensors, of the same shapes.

Loaded: ``load_state_dict`` takes such a DTensor, the whole tensor (and keeps this rank's part of it), or the part.

An optimizer knows nothing of this: ``optimizer_state.py`` does the same for its state.
"""

import copy
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parallel_ops.comm._group import group_rank, group_size

Init = Callable[[Tensor], object]


@dataclass(frozen=True)
class Sharding:
    """A parameter as a part of a whole.

    Attributes:
        shape: of the whole.
        dim: along which it is split, into the parts of ``torch.chunk``, as DTensor splits.
    """

    shape: tuple[int, ...]
    dim: int

    def span(self, rank: int, size: int) -> tuple[int, int]:
        """Where the rank's part starts and stops along ``dim``."""
        length = self.shape[self.dim]
        part = -(-length // size)
        return min(rank * part, length), min((rank + 1) * part, length)

    def part_of(self, whole: Tensor, rank: int, size: int) -> Tensor:
        start, stop = self.span(rank, size)
        return whole.view(self.shape).narrow(self.dim, start, stop - start)

    def part_shape(self, rank: int, size: int) -> tuple[int, ...]:
        start, stop = self.span(rank, size)
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])


class ShardedModule(nn.Module):
    """A module some of whose parameters are parts of a whole."""

    def __init__(self, group: ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.shardings: dict[str, Sharding] = {}
        self.register_state_dict_post_hook(_save)
        self.register_load_state_dict_pre_hook(_load)

    def add_part(
        self,
        name: str,
        sharding: Sharding,
        shape: tuple[int, ...],
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Registers a parameter of ``shape``: this rank's part, as the module's products want it."""
        self.shardings[name] = sharding
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    @torch.no_grad()
    def draw(self, name: str, init: Init, shape: tuple[int, ...] | None = None) -> None:
        """Fills a parameter with this rank's part of a whole that ``init`` fills; ``shape`` is what it should see."""
        parameter, sharding = self.get_parameter(name), self.shardings[name]
        whole = torch.empty(shape or sharding.shape, device=parameter.device, dtype=parameter.dtype)
        init(whole)
        part = sharding.part_of(whole, group_rank(self.group), group_size(self.group))
        parameter.copy_(part.reshape(parameter.shape))

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedModule":
        """As of any module; the copy talks over the same group."""
        if self.group is not None:
            memo[id(self.group)] = self.group
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return copied


def check_divides(layer: str, name: str, value: int, group: ProcessGroup | None) -> int:
    """``value`` divided by the size of the group, which must go evenly."""
    size = group_size(group)
    if value < 1:
        raise ValueError(f"{layer}: {name} must be positive, got {value}")
    if value % size:
        fitting = ", ".join(str(n) for n in range(1, max(8, 2 * size) + 1) if value % n == 0)
        raise ValueError(
            f"{layer}: {name} must be a multiple of the size of the group, got {value} for {size} ranks; groups that "
            f"fit have {fitting} ranks"
        )
    return value // size


def sharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of ``module`` and its children that are parts of a whole, each once."""
    parts = {
        id(p): p
        for child in module.modules()
        if isinstance(child, ShardedModule)
        for p in (child.get_parameter(name) for name in child.shardings)
    }
    return list(parts.values())


def linear_init(weight: Tensor) -> None:
    """As ``torch.nn.Linear`` draws its weight."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def bias_init(fan_in: int) -> Init:
    """As ``torch.nn.Linear`` draws its bias."""
    bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
    return functools.partial(nn.init.uniform_, a=-bound, b=bound)


_meshes: weakref.WeakKeyDictionary[ProcessGroup, dict[str, DeviceMesh]] = weakref.WeakKeyDictionary()


def _mesh(group: ProcessGroup, device: torch.device) -> DeviceMesh:
    """The group for DTensors on a kind of device: an optimizer may keep its state on another than the model's."""
    meshes = _meshes.setdefault(group, {})
    if device.type not in meshes:
        meshes[device.type] = DeviceMesh.from_group(group, device.type)
    return meshes[device.type]


def as_whole(part: Tensor, sharding: Sharding, group: ProcessGroup | None) -> Tensor:
    """This rank's part as a DTensor of the whole that shares its memory; on one rank as a plain tensor."""
    part = part.view(sharding.part_shape(group_rank(group), group_size(group)))
    if group is None or group.size() == 1:
        return part
    # What torch would compute from the parts, were they not told: they are not all of one size.
    stride = torch.empty(sharding.shape, device="meta").stride()
    return DTensor.from_local(
        part,
        _mesh(group, part.device),
        [Shard(sharding.dim)],
        run_check=False,
        shape=torch.Size(sharding.shape),
        stride=stride,
    )


def as_part(value: Tensor, sharding: Sharding, group: ProcessGroup | None, shape: Sequence[int]) -> Tensor:
    """This rank's part of a DTensor or a whole tensor, or the part itself, as a parameter of ``shape`` has it.

    What is none of these comes back in a shape that is not the parameter's, for the caller to refuse.
    """
    rank, size = group_rank(group), group_size(group)
    if isinstance(value, DTensor):
        if tuple(value.shape) == tuple(sharding.shape) and tuple(value.placements) == (Shard(sharding.dim),):
            value = value.to_local()
    elif size > 1 and tuple(value.shape) in _forms(sharding.shape, len(shape)):
        value = sharding.part_of(value.contiguous(), rank, size)
    # Never by the number of elements alone: a transposed weight has as many.
    if tuple(value.shape) in _forms(sharding.part_shape(rank, size), len(shape)):
        value = value.reshape(shape)
    return value


def _save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    assert isinstance(module, ShardedModule)
    for name, sharding in module.shardings.items():
        key = prefix + name
        if key not in state:
            continue
        if not isinstance(state[key], DTensor):
            state[key] = as_whole(state[key], sharding, module.group)
        elif group_size(module.group) > 1:
            # It would be saved as the whole.
            raise RuntimeError(
                f"{key} is one rank's part of a whole, which something else has sharded again as a DTensor; "
                "state_dict cannot say where such a part lies"
            )


def _load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(module, ShardedModule)
    for name, sharding in module.shardings.items():
        key = prefix + name
        if isinstance(state.get(key), Tensor):  # of another shape: torch names it in its error
            state[key] = as_part(state[key], sharding, module.group, module.get_parameter(name).shape)


def _forms(shape: Sequence[int], dims: int) -> set[tuple[int, ...]]:
    """A shape, and the same with its first dimensions as one, as a parameter of ``dims`` dimensions has it."""
    merged = len(shape) - dims + 1
    return {tuple(shape), (math.prod(shape[:merged]), *shape[merged:])}
