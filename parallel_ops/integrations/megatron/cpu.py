"""Megatron-core on a machine without a GPU, for development and tests."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor

from parallel_ops.integrations.megatron._rebind import MISSING, Binding, Replaced

_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Within the block Megatron-core runs on the CPU over gloo: models, data parallelism and pipeline schedules.

    Megatron reads the current device, generators and streams from ``torch.cuda``, and creates tensors on ``"cuda"``.
    Within the block these are the CPU, its one generator (so dropout masks differ from those on a GPU), and streams
    that do nothing. Transformer Engine, Apex and CUDA graphs are not supported.
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
    streams: dict[str, Any] = {name: lambda *args, **kwargs: _STREAM for name in ("current_stream", "default_stream")}
    streams |= {"Stream": lambda *args, **kwargs: _STREAM, "stream": lambda stream: contextlib.nullcontext()}
    device = {"current_device": lambda: torch.device("cpu")}
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    owners: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, {**generator, **nothing, **streams, **device}),
        (random, tracker),
        (torch, factories),
        (Tensor, {"cuda": _unmoved}),
        (torch.nn.Module, {"cuda": _unmoved}),
        (multi_latent_attention, {"HAVE_TE": False}),  # which 0.16 says without Transformer Engine too, and then fails
        (token_dispatcher, {"maybe_move_tensor_to_cpu": _moved_already}),
    ]
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16's router reads it without Transformer Engine too
        owners.append((moe_utils, {"te_general_gemm": None}))
    bindings = [
        Binding(owner, name, vars(owner).get(name, MISSING), new)
        for owner, names in owners
        for name, new in names.items()
    ]
    # Megatron warns if a block that should use a CUDA generator uses the CPU's.
    log = logging.getLogger(random.__name__)
    disabled, log.disabled = log.disabled, True
    try:
        with Replaced("torch", bindings):
            yield
    finally:
        log.disabled = disabled


def _unmoved(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _moved_already(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's leaves tensors of a CPU as they are, but all-to-all takes no tensors as sizes."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


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
    """The one stream of a CPU, and its events."""

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        pass


_STREAM = _Stream()
