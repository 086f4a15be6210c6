"""The order of tokens by expert: a stable counting sort of the slots (token, choice) by the expert that they chose.

A slot is token * k + choice. The rows of expert e are rows[offs[e - 1]:offs[e]], its slots in token order; then come
rows of padding, which hold -1. places is the inverse: the row of each slot. The number of rows follows from the shapes,
so that a GPU need not be waited for: without a capacity it is t * k + n * (multiple - 1), rounded down to the multiple,
the most that any choice can need; what is left past the last expert's end is padding. With a capacity c each expert has
rows e * c to (e + 1) * c, and its slots past c, in token order, are dropped, as in Lepikhin et al., arXiv:2006.16668.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.registration import register

_MOST = 2**31 - 1  # rows and slots are int32, as the offsets of torch._grouped_mm are


class ExpertOrder(NamedTuple):
    """What ``sort_by_expert`` returns, for ``t`` tokens of ``k`` choices, ``n`` experts and ``r`` rows.

    Attributes:
        rows: ``[r]`` int32: the slot (token * k + choice) that a row comes from, -1 for padding.
        places: ``[t, k]`` int32: the row of each slot, -1 where it was dropped or has no expert.
        offs: ``[n]`` int32: the end of each expert's rows, padding included, as the offs of torch._grouped_mm.

    Examples:
        >>> import torch
        >>> from parallel_ops import sort_by_expert
        >>> sort_by_expert(torch.tensor([[2], [0], [2]]), num_experts=3).offs  # one row for expert 0, two for expert 2
        tensor([1, 1, 3], dtype=torch.int32)
    """

    rows: Tensor
    places: Tensor
    offs: Tensor


def sort_by_expert(experts: Tensor, num_experts: int, *, capacity: int | None = None, multiple: int = 1) -> ExpertOrder:
    """The order in which tokens lie by expert, for ``permute``, ``unpermute`` and grouped matmuls.

    Args:
        experts: ``[t, k]``, int64 or int32, any strides: the experts that each token chose; -1 is no expert, and the
            slot is dropped. On CUDA every other id out of range is dropped too, since checking would wait for the GPU.
        num_experts: n.
        capacity: the rows of every expert; slots beyond them are dropped in token order. 0 drops all.
        multiple: each expert's rows are padded to a multiple of it, which a capacity must be.

    Returns:
        ``ExpertOrder`` with ``n * capacity`` rows, or ``(t * k + n * (multiple - 1)) // multiple * multiple`` without a
        capacity: t * k for a multiple of 1. Rows past ``offs[-1]`` are padding.

    Raises:
        TypeError: experts or options that are no integers. ValueError: wrong shapes, options out of range, 2^31 rows or
            more; on the CPU ids below -1 or from n on.

    Sharding: the order is that of the tokens that the rank holds.

    Examples:
        >>> import torch
        >>> from parallel_ops import sort_by_expert
        >>> order = sort_by_expert(torch.tensor([[1], [0], [1]]), num_experts=2)
        >>> order.rows.tolist(), order.offs.tolist()  # token 1, then tokens 0 and 2; where the rows of each expert end
        ([1, 0, 2], [1, 3])
    """
    arguments = experts, num_experts, capacity, multiple
    try:
        return ExpertOrder(*_sort.checked(lambda: _check(*arguments), *arguments))
    except RuntimeError:
        if experts.device.type == "cpu":
            _check_ids(experts, num_experts)
        raise


def sort_by_expert_reference(
    experts: Tensor, num_experts: int, *, capacity: int | None = None, multiple: int = 1
) -> ExpertOrder:
    """The same in plain PyTorch."""
    t, k = experts.shape
    ids = experts.flatten().long()
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    sorted_ids, slots = ids.sort(stable=True)
    # Without bincount and boolean indices, for which the host would wait on a GPU.
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device).scatter_add_(
        0, ids, torch.ones_like(ids)
    )
    first = counts.cumsum(0) - counts
    if capacity is None:
        padded = (counts[:num_experts] + multiple - 1) // multiple * multiple
        total = row_count(t * k, num_experts, capacity, multiple)
    else:
        padded = torch.full_like(counts[:num_experts], capacity)
        total = num_experts * capacity
    offs = padded.cumsum(0)
    starts = torch.cat([offs - padded, offs[-1:]])
    rank = torch.arange(t * k, device=ids.device) - first[sorted_ids]
    kept = sorted_ids < num_experts
    if capacity is not None:
        kept &= rank < capacity
    place = torch.where(kept, starts[sorted_ids] + rank, -1)
    rows = torch.full((total + 1,), -1, dtype=torch.int32, device=ids.device)
    rows.scatter_(0, torch.where(kept, place, total), slots.int())  # slots that are left out share the last row
    places = torch.empty(t * k, dtype=torch.int32, device=ids.device)
    places[slots] = place.int()
    return ExpertOrder(rows[:-1], places.view(t, k), offs.int())


def row_count(slots: int, num_experts: int, capacity: int | None, multiple: int) -> int:
    """The rows of an order of so many slots."""
    if capacity is not None:
        return num_experts * capacity
    return (slots + num_experts * (multiple - 1)) // multiple * multiple


def _check(experts: Tensor, num_experts: int, capacity: int | None, multiple: int) -> None:
    if not isinstance(experts, Tensor):
        raise TypeError(f"sort_by_expert: experts must be a tensor, got {type(experts).__name__}")
    if experts.dtype not in (torch.int64, torch.int32) or experts.layout is not torch.strided:
        raise TypeError(f"sort_by_expert: experts must be a dense int64 or int32 tensor, got {experts.dtype}")
    if experts.dim() != 2 or experts.shape[1] == 0:
        raise ValueError(f"sort_by_expert: experts must be [t, k] with at least one choice, got {list(experts.shape)}")
    for name, value, least in (("num_experts", num_experts, 1), ("capacity", capacity, 0), ("multiple", multiple, 1)):
        if value is None and name == "capacity":
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"sort_by_expert: {name} must be an int, got {type(value).__name__}")
        if not least <= value <= _MOST:
            raise ValueError(f"sort_by_expert: {name} must be from {least} to {_MOST}, got {value}")
    if capacity is not None and capacity % multiple:
        raise ValueError(f"sort_by_expert: capacity must be a multiple of {multiple}, got {capacity}")
    slots = experts.numel()
    if max(slots, row_count(slots, num_experts, capacity, multiple)) > _MOST:
        raise ValueError(f"sort_by_expert: {slots} slots of {num_experts} experts need more than {_MOST} rows")


def _check_ids(experts: Tensor, num_experts: int) -> None:
    wrong = experts[(experts < -1) | (experts >= num_experts)]
    if wrong.numel():
        raise ValueError(
            f"sort_by_expert: experts must hold ids from 0 to {num_experts - 1}, or -1 for none, got {wrong[0].item()}"
        )


def outputs(experts: Tensor, num_experts: int, capacity: int | None, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = row_count(experts.shape[0] * experts.shape[1], num_experts, capacity, multiple)
    return (
        experts.new_empty(rows, dtype=torch.int32),
        experts.new_empty(experts.shape, dtype=torch.int32),
        experts.new_empty(num_experts, dtype=torch.int32),
    )


def launch(
    out: tuple[Tensor, Tensor, Tensor], experts: Tensor, num_experts: int, capacity: int | None, multiple: int
) -> None:
    from parallel_ops.triton_kernels.experts import order as kernels

    kernels.sort(experts, *out, capacity=capacity, multiple=multiple)


_sort = register("sort_by_expert", outputs=outputs, launch=launch)
