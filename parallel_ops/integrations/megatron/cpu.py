"""Megatron-core on a machine without a GPU, for development and tests."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor

from parallel_ops.integrations.megatron._rebind import MISSING, Binding, Replaced

_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron-core runs on the CPU within the block, over gloo: its models, data parallelism and pipeline schedules.

    It asks CUDA for the current device, for generators and for streams, and names the device ``"cuda"`` where it makes
    tensors. Within the block these give the CPU, its one generator (so dropout draws something else than on a GPU), and
    nothing to wait for. Transformer Engine, Apex and CUDA graphs stay out of reach.
    """
    generator = {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,
    }
    tracker = {
        "_get_cuda_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
    }
    nothing = {name: lambda *args, **kwargs: None for name in ("synchronize", "set_device", "empty_cache")}
    streams = {name: lambda *args, **kwargs: _Stream() for name in ("current_stream", "default_stream")}
    device = {"current_device": lambda: torch.device("cpu")}
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    owners: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, {**generator, **nothing, **streams, **device}),
        (random, tracker),
        (torch, factories),
        (Tensor, {"cuda": _stays}),
        (torch.nn.Module, {"cuda": _stays}),
    ]
    bindings = [
        Binding(owner, name, vars(owner).get(name, MISSING), new)
        for owner, names in owners
        for name, new in names.items()
    ]
    # It warns when a block that draws from a generator of CUDA draws from that of the CPU.
    log = logging.getLogger(random.__name__)
    disabled, log.disabled = log.disabled, True
    try:
        with Replaced("torch", bindings):
            yield
    finally:
        log.disabled = disabled


def _stays(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


class _Stream:
    def wait_stream(self, other: object) -> None:
        pass
