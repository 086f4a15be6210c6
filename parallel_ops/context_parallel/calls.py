"""Checks of a call of ring attention: its placement on ranks, and that all ranks make the same call."""

import zlib
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.compat import resolve_group
from parallel_ops._internal.distributed.groups import group_rank, group_size
from parallel_ops.comm.consistency import CallSignature, check_consistency, shared_error
from parallel_ops.comm.transport.base import Transport, in_flight
from parallel_ops.context_parallel.batch_layout import layout_for
from parallel_ops.context_parallel.cost import Algorithm
from parallel_ops.context_parallel.schedule.ulysses import NAME, Placement
from parallel_ops.context_parallel.token_ranges import documents_error, layout_name, lengths
from parallel_ops.ops.attention.cache import once
from parallel_ops.ops.attention.options import AttentionOptions

AlgorithmName = Literal["auto", "ring", "all_to_all", "hybrid", "all_gather"]
_ALGORITHMS: tuple[str, ...] = get_args(AlgorithmName)


def check_placement(
    q: Tensor, group: ProcessGroup | None, cp_layout: str, algorithm: str, length: int | None,
    ulysses_degree: int | None,
) -> None:  # fmt: skip
    """Raises for arguments that are wrong on this rank alone; also in a group of one rank."""
    kind = layout_name(cp_layout, NAME)
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"{NAME}: algorithm must be one of {', '.join(_ALGORITHMS)}, got {algorithm!r}")
    if ulysses_degree is not None:
        if not isinstance(ulysses_degree, int) or isinstance(ulysses_degree, bool):
            raise TypeError(f"{NAME}: ulysses_degree must be an int or None, got {type(ulysses_degree).__name__}")
        if algorithm != "hybrid":
            raise ValueError(
                f'{NAME}: ulysses_degree is for algorithm="hybrid", got {ulysses_degree} with {algorithm!r}'
            )
    if length is None or torch.compiler.is_compiling():
        return
    if not isinstance(length, int) or isinstance(length, bool):
        raise TypeError(f"{NAME}: length must be an int or None, got {type(length).__name__}")
    if length < 0:
        raise ValueError(f"{NAME}: length must not be negative, got {length}")
    size, rank = group_size(group), group_rank(group)
    own = lengths(cp_layout, length, size)[rank]
    if q.shape[0] != own:
        raise ValueError(
            f"{NAME}: rank {rank} of {size} has {own} of length={length} tokens in {kind} layout, but q has "
            f"{q.shape[0]}; split them with split_sequence or SequenceLayout"
        )


def balanced_for(options: AttentionOptions, length: int, size: int) -> str:
    """The layout that balances the area of a call's own mask."""
    if torch.compiler.is_compiling():
        raise ValueError(
            f'{NAME}: cp_layout="balanced" reads the mask, which compiled code cannot; give a SequenceLayout'
        )
    cuts = ((options.left, options.right, 1),)
    documents, ranges = options.cu_seqlens, options.key_ranges
    return layout_for(length, size, "balanced", cuts, cu_seqlens=documents, key_ranges=ranges, op=NAME).cp_layout


def check_calls(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, placement: Placement, transport: Transport, nodes: int,
    gradients: bool,
) -> None:  # fmt: skip
    """Raises on all ranks unless all make the same call; ``nodes``: ranks of each node."""
    group, size = resolve_group(placement.group), transport.size
    # Only on a CPU can values be read without waiting for a device.
    cu_seqlens, ranges, seed = (
        None if t is None or t.is_cuda else t for t in (options.cu_seqlens, options.key_ranges, options.dropout_seed)
    )
    documents = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
    chunks = zlib.crc32(placement.cp_layout.encode())
    digests = () if ranges is None else (once(ranges, "digest", lambda: zlib.crc32(ranges.numpy().tobytes())),)
    drawn = None if seed is None else seed.item()
    s, *rest = q.shape
    tensors = [t is None for t in (options.sink, options.cu_seqlens, options.key_ranges)]
    same = (
        *rest,
        k.shape[2],
        v.shape[3],
        *options[4:],
        *placement._replace(cp_layout=placement.layout)[1:],
        *tensors,
        gradients,
        options.known_on_host,
        nodes,
    )  # no name of the group
    of_values = "" if v.shape[3] == q.shape[3] else f" with values of {v.shape[3]}"
    window = tuple(-1 if n is None else n for n in (options.left, options.right))
    algorithm = Algorithm(placement.ulysses_degree, placement.all_gather).name(size)
    algorithm += f" with {nodes} ranks a node" if nodes > 1 else ""
    # The message is cut off at a maximal length, so the arguments that differ most often come first.
    text = (
        f"{algorithm} in {placement.layout} over {transport.capabilities.name}, "
        f"q of {[s, *rest]} {q.dtype}, {k.shape[2]} kv heads{of_values}, length={placement.length}, "
        f"causal={options.causal}, window_size={window}, requires_grad={gradients}, "
        f"dropout_p={options.dropout_p:.4g}, dropout_seed={drawn}, documents={documents}, "
        f"key_ranges={ranges is not None}, sink={options.sink is not None}, softcap={options.softcap:.4g}, "
        f"softmax_scale={options.softmax_scale:.4g}, backend={options.backend}"
    )
    signature = (q.dtype, *same, documents, len(digests), drawn, transport.capabilities.name, in_flight(transport))
    answer = check_consistency(group, CallSignature(NAME, signature, text, (s, chunks, *digests)), q.device)
    have = [s] if answer is None else [n for n, *_ in answer]
    want = lengths(placement.cp_layout, placement.length, size)
    if answer is not None and have != list(want):
        raise shared_error(
            group,
            f"{NAME}: the ranks have {have} tokens, but length={placement.length} in {placement.layout} layout "
            f"gives them {list(want)}",
        )
    if answer is not None and ranges is not None and len({of_rank[2] for of_rank in answer}) > 1:
        raise shared_error(group, _differing_rows(group, ranges))
    if answer is not None and len({of_rank[1] for of_rank in answer}) > 1:
        raise shared_error(
            group, f"{NAME}: cp_layout must have the same chunks on every rank; make it of the same masks"
        )
    if documents is not None and (wrong := documents_error(documents, placement.length)):
        raise shared_error(group, f"{NAME}: {wrong}")


def _differing_rows(group: ProcessGroup, ranges: Tensor) -> str:
    """The first row that differs between ranks, all of which call this."""
    given = [torch.empty_like(ranges) for _ in range(group.size())]
    torch.distributed.all_gather(given, ranges.contiguous(), group=group)
    rank = next(rank for rank, other in enumerate(given) if not torch.equal(other, given[0]))
    row = int((given[rank] != given[0]).any(0).int().argmax())
    first, other = given[0][:, row].tolist(), given[rank][:, row].tolist()
    return (
        f"{NAME}: key_ranges must be the same on every rank, but in row {row} rank 0 of the group has keys {first[0]} "
        f"to {first[1]}, rank {rank} {other[0]} to {other[1]}"
    )
