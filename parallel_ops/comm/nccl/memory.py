"""Symmetric memory of NCCL: device memory from its allocator, and windows on it that every rank registers.

On a window, collectives can use kernels that reduce in the switch or in fp32, and copy engines in place of
multiprocessors (``CtaPolicy.ZERO``).
"""

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from parallel_ops import _nccl
from parallel_ops.comm.nccl.communicator import Communicator
from parallel_ops.comm.nccl.library import load_nccl

# What NCCL demands of a window's address (NCCL_WIN_REQUIRED_ALIGNMENT).
_ALIGNMENT = 4096
_SYMMETRIC = 1


class _Buffer:
    """Memory as torch takes it over, without copying; torch keeps this object as long as the tensor."""

    def __init__(self, memory: _nccl.Memory, device: torch.device) -> None:
        self._memory = memory
        # At the end of the process the driver frees it; what other exit handlers still use must not go before.
        weakref.finalize(self, _release, memory, device).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._memory.size,), "typestr": "|u1", "data": (self._memory.data, False), "version": 3}


# Dropped by torch, and not yet known to be unused.
_dropped: set[tuple[_nccl.Memory, torch.device]] = set()


def _release(memory: _nccl.Memory, device: torch.device) -> None:
    """Frees the memory once no kernel can use it any more, which NCCL does not look after."""
    _dropped.add((memory, device))
    unused = {dropped for dropped in _dropped if dropped[1] == device}
    torch.cuda.synchronize(
        device
    )  # if this fails, for example during a capture, the memory stays until the next is dropped
    _dropped.difference_update(unused)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | int | None = None) -> Tensor:
    """An uninitialised tensor in memory of ``ncclMemAlloc``. From NCCL 2.19.

    Freed with the tensor, after waiting for the device: do not drop it while a CUDA graph is being captured.

    Raises:
        ValueError: a size is negative or there are no elements.
        NotSupported: there is no NCCL, or it is too old.
        NcclError: there is not enough memory, or no CUDA driver.
    """
    elements = math.prod(shape)
    if elements <= 0 or min(shape, default=1) < 0:
        raise ValueError(f"allocate: shape must have at least one element, got {tuple(shape)}")
    library = load_nccl()
    with torch.cuda.device(device):
        place = torch.device("cuda", torch.cuda.current_device())
        memory = _nccl.Memory(library, elements * dtype.itemsize)
        raw = torch.as_tensor(_Buffer(memory, place), device=place)
    return raw.view(dtype).view(shape)


class Window:
    """``tensor``, registered with ``communicator`` by every rank. Collective. From NCCL 2.27.

    The communicator keeps the tensor until the window is closed, or else until its own end.

    Args:
        communicator: on the tensor's device.
        tensor: contiguous, from :func:`allocate`; the window covers exactly its elements, as many on every rank.
        symmetric: every rank registers it at the same place of its own allocation, which the fast kernels need.

    Raises:
        TypeError, ValueError: the tensor of this rank cannot be a window.
        NotSupported: NCCL is too old, or the tensor of another rank cannot be a window.
        NcclError: NCCL failed, or a rank did not register in time.
    """

    def __init__(self, communicator: Communicator, tensor: Tensor, *, symmetric: bool = True) -> None:
        communicator.check_consistency("Window", _why_no_window(communicator, tensor))
        self.tensor = tensor
        self._communicator = communicator
        self._handle = communicator.register_window(tensor, _SYMMETRIC if symmetric else 0)

    def close(self) -> None:
        """Deregisters it, once the work that uses it is done. Collective; the tensor stays."""
        handle, self._handle = self._handle, 0
        if handle:
            self._communicator.deregister_window(handle)


def _why_no_window(communicator: Communicator, tensor: Tensor) -> Exception | None:
    if not isinstance(tensor, Tensor):
        return TypeError(f"Window: tensor must be a tensor, got {type(tensor).__name__}")
    if tensor.device != communicator.device:
        return ValueError(f"Window: tensor is on {tensor.device}, the communicator on {communicator.device}")
    if not tensor.is_contiguous() or tensor.numel() == 0 or tensor.data_ptr() % _ALIGNMENT:
        return ValueError(
            f"Window: tensor must be contiguous, not empty and aligned to {_ALIGNMENT} bytes, got shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()} at address {tensor.data_ptr():#x}"
        )
    return None
