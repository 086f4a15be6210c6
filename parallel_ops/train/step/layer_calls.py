"""Calls of layers in a step, as they are recorded for CUDA graphs."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec


class Unit:
    """A method of a layer that is captured.

    Args:
        owner, name: The method. modules: Those whose parameters it reads.
        managed: FSDP2 gathers the parameters.
    """

    def __init__(self, owner: nn.Module, name: str, modules: Sequence[nn.Module], managed: bool) -> None:
        self.owner, self.name, self.managed = owner, name, managed
        self.forward: Callable[..., Tensor] = getattr(owner, name)
        self._places = [
            (module, key)
            for each in modules
            for module in each.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    def parameters(self) -> list[Tensor]:
        """The parameters as they are now: whole in a forward and a backward, else shards."""
        return [module._parameters[key] for module, key in self._places]  # type: ignore[misc]

    @contextlib.contextmanager
    def reading(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """The method reads other parameters in the block."""
        before = self.parameters()
        self._set(parameters)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, parameters: Sequence[Any]) -> None:
        for (module, key), parameter in zip(self._places, parameters, strict=True):
            module._parameters[key] = parameter


class Like(NamedTuple):
    """A tensor but for its values."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(eq=False, kw_only=True)
class Call:
    """A forward of a unit in a step, with its backward.

    Attributes:
        spec, leaves: The arguments; tensors by what they are like.
        autocast: Whether autocast is on, and its dtype.
        parameters: What the unit read.
        before, read: The call whose result is an argument, and which.
        lent: By argument, the call that has had the same tensor first. sources: Its tensors, by argument.
        y: The result. slot: Number of the call among those of the unit whose backward is due.
    """

    unit: Unit
    spec: TreeSpec
    leaves: list[Any]
    autocast: tuple[bool, torch.dtype]
    parameters: list[Tensor]
    before: "Call | None" = None
    read: int = -1
    lent: "dict[int, Call]" = field(default_factory=dict)
    sources: dict[int, Tensor] = field(default_factory=dict)
    y: Like | None = None
    slot: int = 0

    def follow(self, leaves: list[Any], before: "Call", y: Tensor, had: list[Any]) -> None:
        """Finds the arguments that are the result ``y`` of the call before, or that it had in the same micro-batch."""
        for at, (t, like) in enumerate(zip(leaves, self.leaves, strict=True)):
            if not isinstance(t, Tensor) or not t.numel():
                continue
            if like == before.y and t.data_ptr() == y.data_ptr() and self.before is None:
                self.before, self.read = before, at
            elif (
                self.before is not None and self.spec == before.spec
                and before.leaves[at] == like and not like.requires_grad
                and t.data_ptr() == had[at].data_ptr()
            ):  # fmt: skip
                self.lent[at] = owner = before.lent.get(at, before)
                owner.sources[at] = t

    def key(self, places: "dict[Call, int]") -> Any:
        """Equal for calls that can have the same graphs, in two lists of calls."""
        before = None if self.before is None else (places[self.before], self.read)
        lent = {at: places[call] for at, call in self.lent.items()}
        return self.unit, self.slot, self.spec, self.leaves, self.autocast, before, lent

    def fits(self, unit: Unit, leaves: list[Any], spec: TreeSpec, device: torch.device) -> bool:
        """Whether a replay computes what the unit would compute of these arguments."""
        return (
            (self.unit, self.spec, self.leaves, self.autocast) == (unit, spec, described(leaves), autocast_on(device))
            and all(leaves[at].data_ptr() == call.sources[at].data_ptr() for at, call in self.lent.items())
        )  # fmt: skip


def described(leaves: Sequence[Any]) -> list[Any]:
    return [Like(t.shape, t.dtype, t.requires_grad) if isinstance(t, Tensor) else t for t in leaves]


def autocast_on(device: torch.device) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
