"""Shares of the hardware's peak that are reached, by GPU generation; sources are in ``presets/efficiency.json``."""

from dataclasses import dataclass, fields
from typing import Any

from parallel_ops.planner.checks import check_figures
from parallel_ops.planner.presets.figures import figures
from parallel_ops.planner.speed import hashed_once

# Bytes/s per GPU of an optimizer on the host: DeepSpeed's on a node of eight A800 (presets/software.json) reaches
# 1.8e9, PyTorch's on one of 16 V100 1.4e9 (arXiv:2101.06840, table 4).
HOST_MEMORY = 1.8e9


@hashed_once
@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peak that a GPU generation reaches, and overheads in seconds.

    Attributes:
        matmul: share of the 16-bit peak FLOP/s that large 16-bit matmuls reach.
        fp8: share of the fp8 peak that large fp8 matmuls reach.
        flash_forward, flash_backward: share of the 16-bit peak that FlashAttention reaches; masked blocks do not count.
        memory: share of the memory bandwidth that elementwise ops and the optimizer reach.
        links, network: share of the bandwidth inside and between nodes that collectives reach.
        dispatch: share of the bandwidth between nodes that the all-to-alls of experts reach; 0 for ``network``.
        interference: cost of overlap, as a share of the shorter of communication and computation. Both use the same
            SMs and memory.
        tp_overlap: share of tensor-parallel communication that matmuls hide, if the plan overlaps them.
        grouped: rate of the matmuls of experts with many rows each, relative to others.
        grouped_fp8: the same in low precision, whose scales are computed expert by expert.
        grouped_rows: rows of an expert at which its matmuls reach half of ``grouped``: n rows reach n / (n + this).
        reduce_scatter: bandwidth of data-parallel reduce-scatters, relative to other collectives.
        elementwise: bytes that elementwise ops move, relative to the ops of this package: fused, or unfused without
            ``Plan.fused_ops``.
        host_memory: bytes/s of host memory that the optimizer reaches per GPU, if it is offloaded.
        host: seconds that the host takes to launch the forward pass of one layer; the same for a backward pass.
        serial: seconds of each pass of a layer in which the host works and the device waits for it. On CPUs, where one
            processor does both, all of the host's work.
        collective: seconds of a collective beyond latency and bandwidth, per doubling of the ranks: launch and the wait
            for the last rank.
        gather_copies, reduce_copies: bytes that a rank copies for data-parallel gathers and reductions, into and out of
            their buffers, per byte of the whole tensor. Nothing hides them. Where they are measured, they have all that
            these collectives take besides latency and bandwidth.
        tp_copies: both in plans with tensor parallelism, whose own collectives they delay, relative to others.
        gathered_sums: bytes up to which a tensor-parallel sum is one all-gather, of which every rank adds all.
        expert_host: seconds that the host takes to launch routing, permutation and experts, beyond ``host``.
        expert_sync: share of a sparse layer's launches that the host starts only when it has read how many tokens each
            expert gets, if none are dropped: the GPU waits for these. 0 if the numbers stay on the GPU.

    Raises:
        ValueError, TypeError: naming the field that is wrong.
    """

    matmul: float
    fp8: float
    flash_forward: float
    flash_backward: float
    memory: float
    links: float
    network: float
    interference: float
    dispatch: float = 0.0
    tp_overlap: float = 0.0
    grouped: float = 1.0
    grouped_fp8: float = 1.0
    grouped_rows: float = 0.0
    reduce_scatter: float = 1.0
    elementwise: float = 1.0
    host_memory: float = HOST_MEMORY
    host: float = 0.0
    serial: float = 0.0
    collective: float = 0.0
    gather_copies: float = 0.0
    reduce_copies: float = 0.0
    tp_copies: float = 1.0
    gathered_sums: float = 0.0
    expert_host: float = 0.0
    expert_sync: float = 0.0

    def __post_init__(self) -> None:
        check_figures(self, [name for name in SHARES if name not in OPTIONAL])
        check_figures(self, RATES)
        check_figures(self, (*SECONDS, *OPTIONAL, *SIZES, *COPIES), zero=True)
        for name in SHARES:
            if getattr(self, name) > 1:
                raise ValueError(f"Efficiency: {name} must be at most 1, got {getattr(self, name)}")


OPTIONAL = ("dispatch", "tp_overlap", "expert_sync")  # shares that may be 0
RATES = ("elementwise", "host_memory")
SIZES = ("gathered_sums", "grouped_rows")
COPIES = ("gather_copies", "reduce_copies", "tp_copies")
SECONDS = ("host", "serial", "collective", "expert_host")
SHARES = tuple(f.name for f in fields(Efficiency) if f.name not in (*SECONDS, *RATES, *SIZES, *COPIES))
# Constants that only software has; the others have values for each GPU generation.
SOFTWARE = (*OPTIONAL, *RATES, *SIZES, *COPIES, "grouped", "grouped_fp8", "reduce_scatter", "serial", "expert_host")
# Constants that a machine may have more or less of.
CONSTANTS = (*SHARES, *SECONDS, *RATES)


def table() -> dict[str, dict[str, dict[str, Any]]]:
    """``value`` and ``source`` of each constant, by generation."""
    known: dict[str, dict[str, dict[str, Any]]] = figures("presets/efficiency")["generations"]
    return known


def generation_constants(generation: str) -> tuple[dict[str, float], str]:
    """The constants of a GPU generation without those of its software, and the generation that they were measured on:
    the nearest one, if this one has none."""
    known = table()
    near = generation if generation in known else figures("presets/efficiency")["stand_ins"].get(generation, "ampere")
    return {name: float(entry["value"]) for name, entry in known[near].items()}, near
