"""What analytic models believe of a device and of the links of a group, by data sheets."""

import functools
import os
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Rates:
    """What the model believes of a device and its links.

    Attributes:
        flops: of one processor, per second. processors: streaming multiprocessors.
        bandwidth: bytes per second that one rank sends. latency: seconds of an exchange. launch: seconds of a product.
    """

    flops: float
    processors: int
    bandwidth: float
    latency: float = 10e-6
    launch: float = 4e-6


@functools.cache
def _device_rates(index: int) -> Rates | None:
    """Data sheets of NVIDIA's A100, H100 and B200: dense 16-bit rate, and NVLink one way. Two thirds of the former and
    four fifths of the latter are what large products and messages reach."""
    properties = torch.cuda.get_device_properties(index)
    sheet = {8: (312e12, 300e9), 9: (989e12, 450e9), 10: (2250e12, 900e9)}.get(properties.major)
    if sheet is None:
        return None
    processors = properties.multi_processor_count
    return Rates(flops=0.66 * sheet[0] / processors, processors=processors, bandwidth=0.8 * sheet[1])


# How much slower than in 16 bits products are.
_SLOWDOWN = {torch.float32: 15.0, torch.float64: 15.0}

# One 400 Gbit/s network card for each GPU, where a group has ranks on several nodes.
_NETWORK = 45e9


def rates_of(device: torch.device, dtype: torch.dtype, group: ProcessGroup) -> Rates | None:
    """The rates that the model assumes; ``None`` for an unknown device and for CPUs."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    rates = _device_rates(index)
    if rates is None:
        return None
    bandwidth = _NETWORK if _spans_nodes(group) else rates.bandwidth
    return replace(rates, flops=rates.flops / _SLOWDOWN.get(dtype, 1.0), bandwidth=bandwidth)


def _spans_nodes(group: ProcessGroup) -> bool:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return len({rank // local for rank in dist.get_process_group_ranks(group)}) > 1
