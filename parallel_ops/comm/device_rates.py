"""Rates that analytic choices assume of a device and of the links of a group, by data sheets."""

import functools
import os
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Rates:
    """Assumed rates of a device and its links.

    Attributes:
        flops: of large matmuls, per second.
        bandwidth: bytes per second that one rank sends.
        latency: seconds of a message.
        inside: bytes per second to ranks of the same node; ``None`` if that is ``bandwidth``.
    """

    flops: float
    bandwidth: float
    latency: float = 10e-6
    inside: float | None = None


# Of A100, H100 and B200, by major compute capability: dense 16-bit FLOP/s and NVLink one way, bytes per second.
_SHEETS = {8: (312e12, 300e9), 9: (989.5e12, 450e9), 10: (2250e12, 900e9)}

# What large matmuls and messages reach of data sheets; assumed.
_FLOPS_SHARE, _LINK_SHARE = 0.66, 0.8

# How much slower than in 16 bits matmuls are.
_SLOWDOWN = {torch.float32: 15.0, torch.float64: 15.0}

# One 400 Gbit/s network card for each GPU, where a group has ranks on several nodes.
_NETWORK = 45e9


def rates_of_sheet(flops: float, link: float) -> Rates:
    """Rates by a data sheet: dense FLOP/s of matmuls, and bytes per second of the link one way."""
    return Rates(_FLOPS_SHARE * flops, _LINK_SHARE * link)


@functools.cache
def _device_rates(index: int) -> Rates | None:
    major = torch.cuda.get_device_properties(index).major
    return rates_of_sheet(*_SHEETS[major]) if major in _SHEETS else None


def rates_of(device: torch.device, dtype: torch.dtype, group: ProcessGroup) -> Rates | None:
    """The rates to assume; ``None`` for an unknown device and for CPUs."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    rates = _device_rates(index)
    if rates is None:
        return None
    rates = replace(rates, flops=rates.flops / _SLOWDOWN.get(dtype, 1.0))
    return replace(rates, bandwidth=_NETWORK, inside=rates.bandwidth) if _spans_nodes(group) else rates


def _spans_nodes(group: ProcessGroup) -> bool:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return len({rank // local for rank in dist.get_process_group_ranks(group)}) > 1
