"""What analytic models believe of a device and of the links of a group, by data sheets."""

import functools
import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_ops._internal.overlap_model import Rates, rates_of_sheet

# Of A100, H100 and B200, by major compute capability: dense 16-bit FLOP/s, NVLink one way and memory, bytes per second.
_SHEETS = {8: (312e12, 300e9, 2.039e12), 9: (989.5e12, 450e9, 3.35e12), 10: (2250e12, 900e9, 8e12)}


@functools.cache
def _device_rates(index: int) -> Rates | None:
    properties = torch.cuda.get_device_properties(index)
    if properties.major not in _SHEETS:
        return None
    flops, link, memory_bandwidth = _SHEETS[properties.major]
    return rates_of_sheet(flops, properties.multi_processor_count, link, memory_bandwidth)


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
