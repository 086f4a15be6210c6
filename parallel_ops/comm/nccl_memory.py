"""Symmetric memory of NCCL: device memory from its allocator, and windows on it that every rank registers.

On a window, collectives can use kernels that reduce in the switch or in fp32, and copy engines in place of
multiprocessors (``CtaPolicy.ZERO``).
"""

import math
from typing import Any

import torch
from torch import Tensor

from parallel_ops import _nccl
from parallel_ops.comm.nccl import Communicator
from parallel_ops.comm.nccl_library import load_nccl

# What NCCL demands of a window's address (NCCL_WIN_REQUIRED_ALIGNMENT).
_ALIGNMENT = 4096
_SYMMETRIC = 1


class _Buffer:
    """Memory as torch takes it over, without copying; torch keeps this object as long as the tensor."""

    def __init__(self, memory: _nccl.Memory) -> None:
        self._memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._memory.size,), "typestr": "|u1", "data": (self._memory.data, False), "version": 3}


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | int | None = None) -> Tensor:
    """An uninitialised tensor in memory of ``ncclMemAlloc``, freed with the tensor. From NCCL 2.19.

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
        memory = _nccl.Memory(library, elements * dtype.itemsize)
        raw = torch.as_tensor(_Buffer(memory), device=f"cuda:{torch.cuda.current_device()}")
    return raw.view(dtype).view(shape)


class Window:
    """``tensor``, registered with ``communicator`` by every rank. Collective. From NCCL 2.27.

    Args:
        communicator: on the tensor's device.
        tensor: contiguous, from :func:`allocate`; the window covers exactly its elements, as many on every rank.
        symmetric: every rank registers it at the same place of its own allocation, which the fast kernels need.

    Raises:
        ValueError: the tensor cannot be a window.
        NotSupported: NCCL is too old.
        NcclError: NCCL failed, or a rank did not register in time.
    """

    def __init__(self, communicator: Communicator, tensor: Tensor, *, symmetric: bool = True) -> None:
        if tensor.device != communicator.device:
            raise ValueError(f"Window: tensor is on {tensor.device}, the communicator on {communicator.device}")
        if not tensor.is_contiguous() or tensor.numel() == 0 or tensor.data_ptr() % _ALIGNMENT:
            raise ValueError(
                f"Window: tensor must be contiguous, not empty and aligned to {_ALIGNMENT} bytes, got shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()} at address {tensor.data_ptr():#x}"
            )
        self.tensor = tensor
        self._communicator = communicator
        self._handle = communicator.register_window(tensor, _SYMMETRIC if symmetric else 0)

    def close(self) -> None:
        """Deregisters it. Collective; the tensor stays."""
        handle, self._handle = self._handle, 0
        self._communicator.deregister_window(handle)
