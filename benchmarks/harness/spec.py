"""The declaration of an op's benchmark, and the shapes that several of them share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DIRECTIONS = ("forward", "backward", "full")
OVERHEAD = "overhead"

Shape = tuple[int, ...]
Inputs = tuple[Any, ...]
Provider = Callable[..., Tensor]

_MIB = 1 << 20
# CPU tensors of 32 MiB: past the private caches, small enough for a laptop.
_CPU_BYTES = {False: 32 * _MIB, True: 8 * _MIB}


@dataclass(frozen=True)
class Traffic:
    """The bytes that the op must move: each input read once, each output written once, nothing in between."""

    forward: int
    backward: int

    def of(self, direction: str) -> int:
        return {"forward": self.forward, "backward": self.backward, "full": self.forward + self.backward}[direction]


@dataclass(frozen=True)
class Peer:
    """Another implementation to measure beside the op, or the op itself called in another way.

    Args:
        load: Imports and returns it; ImportError where it is not installed.
        devices: The device types that it runs on.
        directions: The directions that can be measured apart.
        compiles: True if torch.compile makes it; left out with the composites.
    """

    load: Callable[[], Provider]
    devices: tuple[str, ...] = ("cuda",)
    directions: tuple[str, ...] = (*DIRECTIONS, OVERHEAD)
    compiles: bool = False


@dataclass(frozen=True)
class Benchmark:
    """One op. Every provider is called with what ``build`` returns; tensors that require a gradient get one.

    Args:
        op: The public name.
        build: (shape, dtype, device) to inputs.
        ours, eager: The op, and the PyTorch composite as a user writes it, which is also compiled.
        traffic: (shape, dtype) to the bytes that it must move.
        shapes: (device type, dtype, quick) to the shapes to measure.
        tiny: A shape so small that only the cost of calling is left.
        flops: (shape, direction) to the floating-point operations of an op that computes longer than it moves.
        directions: Measured apart; an op that does the work of its backward in forward has "full" alone.
        peers: By their name in the results, which is one of ``results.PROVIDERS``.
        index_values: Shape to the values of inputs that are indices, by argument: the static model has tensors without
            memory, and follows these.
    """

    op: str
    build: Callable[[Shape, torch.dtype, torch.device], Inputs]
    ours: Provider
    eager: Provider
    traffic: Callable[[Shape, torch.dtype], Traffic]
    shapes: Callable[[str, torch.dtype, bool], list[Shape]]
    tiny: Shape
    directions: tuple[str, ...] = DIRECTIONS
    peers: Mapping[str, Peer] = field(default_factory=dict)
    flops: Callable[[Shape, str], float] | None = None
    index_values: Callable[[Shape], Mapping[int, Tensor]] | None = None


def randn(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal values that require a gradient. Never zeros: a GPU runs faster on those than on real data."""
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_()


def hidden_shapes(device: str, dtype: torch.dtype, quick: bool) -> list[Shape]:
    """Activations ``[s, b, h]``."""
    if device == "cuda":
        return [(2048, 4, h) for h in ((4096,) if quick else (4096, 8192, 12288))]
    return [(_CPU_BYTES[quick] // (4 * 4096 * dtype.itemsize), 4, 4096)]


def score_shapes(device: str, dtype: torch.dtype, quick: bool) -> list[Shape]:
    """Attention scores ``[b, np, sq, sk]``."""
    if device == "cuda":
        return [(1, 32, 2048, 2048)] if quick else [(4, 32, 2048, 2048), (1, 8, 2048, 16384)]
    return [(max(1, _CPU_BYTES[quick] // (4 * 1024 * 1024 * dtype.itemsize)), 4, 1024, 1024)]
