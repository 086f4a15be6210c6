"""The algorithm of an attention over a sequence that ranks share: the one named, or the fastest by ``cost``."""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.groups import group_size
from parallel_ops.comm.device_rates import rates_of
from parallel_ops.context_parallel.calls import check_placement
from parallel_ops.context_parallel.cost import Algorithm, Link
from parallel_ops.context_parallel.counts import AttentionShape
from parallel_ops.context_parallel.layouts import Layout
from parallel_ops.context_parallel.schedule.ulysses import NAME
from parallel_ops.context_parallel.selection import Selection, select
from parallel_ops.context_parallel.token_ranges import LAYOUTS, ranks_on_nodes
from parallel_ops.ops.attention.cache import known_on_host, once
from parallel_ops.ops.attention.options import AttentionOptions

# The share of the rate of large GEMMs that attention kernels reach, assumed.
_GEMM_SHARE = 0.75
# Tokens per rank for which an algorithm is selected while a graph is compiled.
_COMPILED_TOKENS = 8192


def ring_attention_algorithm(
    q: Tensor,
    k: Tensor,
    *,
    group: ProcessGroup | None,
    cp_layout: Layout = "zigzag",
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Tensor | None = None,
    length: int | None = None,
) -> Selection:
    """The algorithm of ``ring_attention`` for these arguments and ``algorithm="auto"``. Nothing is sent.

    Returns:
        The ``algorithm`` and the ``reason``: all algorithms with their bytes and, on a GPU, their times.
    """
    check_placement(q, group, cp_layout, "auto", length, None)
    shape = _shape(q, k, group, cp_layout, causal, window_size, _documents(cu_seqlens, q, group, length), length)
    return select(shape, link_of(q.device, q.dtype, group))


def ranks_per_node(group: ProcessGroup) -> int:
    """Ranks of the group on each node, by ``LOCAL_WORLD_SIZE`` of torchrun; 1 if they are not as many adjacent ones on
    every node, or all on one."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdecimal() or not int(local):
        return 1
    return ranks_on_nodes(dist.get_process_group_ranks(group), int(local))


def _shape(
    q: Tensor, k: Tensor, group: ProcessGroup | None, cp_layout: str, causal: bool, window_size: tuple[int, int],
    documents: tuple[int, ...] | bool, length: int | None,
) -> AttentionShape:  # fmt: skip
    s, batch, heads, head_dim = q.shape
    size = group_size(group)
    return AttentionShape(
        length=s * size if length is None else length,
        ranks=size,
        batch=batch,
        heads=heads,
        kv_heads=k.shape[2],
        head_dim=head_dim,
        itemsize=q.element_size(),
        # Where ranges are not counted, a balanced layout stands for itself by the one of a single causal sequence.
        cp_layout=cp_layout if documents is not True or cp_layout in LAYOUTS else "zigzag",
        causal=causal,
        window_size=window_size,
        documents=documents,
        ranks_per_node=1 if group is None else ranks_per_node(group),
    )


def _documents(
    cu_seqlens: Tensor | None, q: Tensor, group: ProcessGroup | None, length: int | None
) -> tuple[int, ...] | bool:
    """Lengths of documents, if they can be read without waiting for a device; else whether there are any."""
    host = None if cu_seqlens is None or torch.compiler.is_compiling() else known_on_host(cu_seqlens)
    if host is None:
        return cu_seqlens is not None
    whole = q.shape[0] * group_size(group) if length is None else length

    def read() -> tuple[int, ...] | bool:
        found = tuple(host.diff().tolist())
        # Ranks find out together that documents are no such lengths.
        return found if sum(found) == whole and min(found, default=0) >= 0 else True

    return once(host, ("lengths", whole), read)


def link_of(device: torch.device, dtype: torch.dtype, group: ProcessGroup | None) -> Link | None:
    """The assumed rates of the device and the group's links; ``None`` on a CPU."""
    rates = None if group is None else rates_of(device, dtype, group)
    if rates is None:
        return None
    return Link(_GEMM_SHARE * rates.flops, rates.bandwidth, rates.latency, rates.inside)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compiled_ulysses_degree(ranks: int, heads: int, kv_heads: int, causal: bool, window_size: tuple[int, int]) -> int:
    """The ``ulysses_degree`` that sends the fewest bytes. A compiled graph has the length as a symbol, so the algorithm
    must not depend on it."""
    shape = AttentionShape(
        length=ranks * _COMPILED_TOKENS, ranks=ranks, batch=1, heads=heads, kv_heads=kv_heads, head_dim=64, itemsize=2,
        causal=causal, window_size=window_size,
    )  # fmt: skip
    return select(shape, None).algorithm.ulysses_degree


def select_algorithm(
    q: Tensor, k: Tensor, group: ProcessGroup, cp_layout: str, algorithm: str, options: AttentionOptions,
    length: int | None, ulysses_degree: int | None,
) -> Algorithm:  # fmt: skip
    """The algorithm that ``algorithm`` and ``ulysses_degree`` name.

    Raises:
        ValueError: the heads or ranks do not allow it.
    """
    size, heads = group.size(), k.shape[2]
    if algorithm == "auto":
        left, right = (-1 if n is None else n for n in (options.left, options.right))
        mask = options.causal, (left, -1 if options.causal else right)
        if torch.compiler.is_compiling():
            counts = [len(range(n)) for n in (q.shape[2], heads)]  # ints, where dynamic=True has a symbol for each size
            return Algorithm(_compiled_ulysses_degree(size, *counts, *mask), False)
        documents = _documents(options.cu_seqlens, q, group, length) or options.packed
        shape = _shape(q, k, group, cp_layout, *mask, documents, length)
        return select(shape, link_of(q.device, q.dtype, group)).algorithm
    if algorithm in ("ring", "all_gather"):
        return Algorithm(1, algorithm == "all_gather")
    if algorithm == "all_to_all":
        ulysses_degree = min(size, heads)
        if size % ulysses_degree or heads % ulysses_degree:
            raise ValueError(
                f"{NAME}: all_to_all needs kv heads that are a multiple or a divisor of the {size} ranks, got {heads}; "
                'use algorithm="hybrid", "ring" or "all_gather"'
            )
        return Algorithm(ulysses_degree, False)
    if ulysses_degree is None:
        found = [n for n in range(2, size) if size % n == 0 and heads % n == 0]
        if not found:
            raise ValueError(
                f"{NAME}: hybrid needs a ulysses_degree between 1 and {size} that divides {size} ranks and {heads} kv "
                'heads, and there are none; use algorithm="ring", "all_to_all" or "all_gather"'
            )
        return Algorithm(found[-1], False)
    if ulysses_degree < 1 or size % ulysses_degree or heads % ulysses_degree:
        raise ValueError(
            f"{NAME}: ulysses_degree must divide the {size} ranks of the group and the {heads} kv heads, "
            f"got {ulysses_degree}"
        )
    return Algorithm(ulysses_degree, False)
