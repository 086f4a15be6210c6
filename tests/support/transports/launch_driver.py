"""A stand-in for Triton's CUDA driver that notes launches: kernels are compiled for sm_90, and nothing runs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


@dataclasses.dataclass(frozen=True)
class Launch:
    """What reached the driver. ``arguments``: what the compiled code takes, tensors as their address."""

    function: int
    grid: tuple[int, int, int]
    stream: int
    arguments: tuple[Any, ...]
    by_triton: bool  # it passes its hooks, empty as they may be


class Driver:
    """``device`` and ``stream`` are the current ones. No device has index 0, whose kernels may be in use."""

    def __init__(self) -> None:
        self.device, self.stream = 70, 7
        self.launches: list[Launch] = []
        self.unloaded: set[int] = set()
        self.utils, self.failure, self.functions = self, None, 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        assert device == self.device
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        self.functions += 1
        return self.functions, self.functions, 32, 0, 1024

    def unload_module(self, module: int) -> None:
        """Since Triton 3.8, once nothing refers to the compiled kernel."""
        self.unloaded.add(module)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        kinds = list(source.signature.values())

        def run(x: int, y: int, z: int, stream: int, function: int, packed: Any, of_launch: Any, *rest: Any) -> None:
            enter, leave, *arguments = rest
            if self.failure is not None:
                raise self.failure
            assert function not in self.unloaded
            for hook in filter(None, (enter, leave)):
                hook(of_launch)
            taken = [
                a.data_ptr() if isinstance(a, torch.Tensor) else a
                for a, kind in zip(arguments, kinds, strict=True)
                if kind != "constexpr"
            ]
            self.launches.append(Launch(function, (x, y, z), stream, tuple(taken), enter is not None))

        return run

    def noted(self) -> Launch:
        """The one launch since the last call."""
        (launch,) = self.launches
        self.launches.clear()
        return launch


@contextlib.contextmanager
def active() -> Iterator[Driver]:
    """Triton uses a stand-in within the block."""
    former, stand_in = driver._active, Driver()
    driver.set_active(stand_in)
    try:
        yield stand_in
    finally:
        driver._active = former
