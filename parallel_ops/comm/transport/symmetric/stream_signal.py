"""Flags in device memory, set and waited for in stream order: no kernel, no multiprocessor, no host."""

import torch
from torch import Tensor

_REASONS = {
    0: None,
    1: "the CUDA driver (libcuda.so.1) is not installed",
    2: "the CUDA driver lacks stream memory operations; it is older than CUDA 12",
}


def why_not() -> str | None:
    """The reason why streams cannot signal here, or ``None``. Needs the driver, but no GPU."""
    return _REASONS[torch.ops.parallel_ops.stream_signal_status()]


def stream_write_value(flags: Tensor, index: int, value: int, stream: torch.cuda.Stream) -> None:
    """``flags[index] = value`` once everything earlier in ``stream`` is done and visible to all devices.

    ``flags`` is int32, contiguous, in the memory of this device or of a peer that it can reach.
    """
    address = _address("stream_write_value", flags, index)
    torch.ops.parallel_ops.stream_write_value(stream.device_index, stream.cuda_stream, address, value)


def stream_wait_value(flags: Tensor, index: int, value: int, stream: torch.cuda.Stream) -> None:
    """Blocks ``stream`` until ``flags[index]`` has reached ``value``, counting modulo 2**32."""
    address = _address("stream_wait_value", flags, index)
    torch.ops.parallel_ops.stream_wait_value(stream.device_index, stream.cuda_stream, address, value)


def _address(op: str, flags: Tensor, index: int) -> int:
    if flags.dtype is not torch.int32 or flags.dim() != 1 or not flags.is_contiguous():
        raise ValueError(f"{op}: flags must be a contiguous int32 vector, got {flags.dtype} of {list(flags.shape)}")
    if flags.device.type != "cuda":
        raise ValueError(f"{op}: flags must be on a CUDA device, got {flags.device}")
    if not 0 <= index < flags.numel():
        raise ValueError(f"{op}: index must be in [0, {flags.numel()}), got {index}")
    return flags.data_ptr() + 4 * index
