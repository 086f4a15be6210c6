"""The collectives as torch ops without a gradient: tensors and a group's name in, a new tensor out.

Sums in fp32 are exact in their order: every partial is sent once, as it is, and its owner adds the partials in rank
order in fp32 and rounds once. So the result depends neither on the backend's algorithm nor on timing, and an
all-reduce gives every rank the same bits. A reduce-scatter costs as many bytes as a ring's; it needs room for the
partials of all ranks.
"""

import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.compat import all_gather_single, reduce_scatter_single, resolve_group
from parallel_ops.comm.consistency import CallSignature, check_consistency, communicates, shared_error
from parallel_ops.comm.errors import translate_backend_errors
from parallel_ops.comm.sum_partials import sum_partials

# Below this an all-reduce gathers everything and every rank adds for itself: one message instead of two. The bits are
# the same.
_GATHER_BYTES = 64 << 10

# What every backend sends as it is. The rest goes as bytes: gloo refuses float8, bool and complex.
_SENT_AS_IS = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}


def _sendable(t: Tensor) -> Tensor:
    """``t``, contiguous and flat, in a dtype that every backend sends."""
    flat = t.reshape(-1).contiguous()  # of an expanded gradient a reshape is a view
    return flat if t.dtype in _SENT_AS_IS else flat.view(torch.uint8)


def gathered(op: str, x: Tensor, group: ProcessGroup, shape: Sequence[int] | None = None) -> Tensor:
    """``[P, *x.shape]``, or the same elements as ``shape``: ``x`` of every rank, of the same shape."""
    out = x.new_empty((group.size(), *x.shape) if shape is None else shape)
    with translate_backend_errors(op, group):
        all_gather_single(_sendable(out), _sendable(x.contiguous()), group=group)
    return out


def exchanged(op: str, pieces: Sequence[Tensor], receive: Sequence[Sequence[int]], group: ProcessGroup) -> list[Tensor]:
    """Sends ``pieces[j]`` to rank j; returns what rank i sent here, of shape ``receive[i]``, for every i."""
    counts = [math.prod(shape) for shape in receive]
    sent = torch.cat([p.reshape(-1) for p in pieces])
    out = _exchange(op, sent, [p.numel() for p in pieces], counts, group)
    return [t.view(tuple(shape)) for t, shape in zip(out.split(counts), receive, strict=True)]


def _exchange(op: str, sent: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup) -> Tensor:
    """Sends ``send[j]`` elements of flat ``sent`` to rank j; returns ``receive[i]`` elements of every rank i, flat."""
    out = sent.new_empty(sum(receive))
    scale = 1 if sent.dtype in _SENT_AS_IS else sent.itemsize
    with translate_backend_errors(op, group):
        dist.all_to_all_single(
            _sendable(out),
            _sendable(sent),
            output_split_sizes=[n * scale for n in receive],
            input_split_sizes=[n * scale for n in send],
            group=group,
        )
    return out


def _partials(op: str, x: Tensor, dim: int, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """``[P, ...]``: of every rank's ``x`` the part that is this rank's."""
    shape = (*x.shape[:dim], sizes[group.rank()], *x.shape[dim + 1 :])
    pieces = x.split(list(sizes), dim=dim)
    flat = x.reshape(-1) if dim == 0 else torch.cat([p.reshape(-1) for p in pieces])
    own = math.prod(shape)
    return _exchange(op, flat, [p.numel() for p in pieces], [own] * len(sizes), group).view(len(sizes), *shape)


@torch.library.custom_op("parallel_ops::comm_all_gather", mutates_args=())
@communicates
def all_gather(x: Tensor, dim: int, sizes: Sequence[int], group: str, op: str) -> Tensor:
    process_group = resolve_group(group)
    rest = (*x.shape[:dim], *x.shape[dim + 1 :])
    _agree(op, x, process_group, (rest, dim, *sizes), f"dim={dim}, sizes={list(sizes)}")
    if len(set(sizes)) == 1:
        if dim == 0:  # autograd lets nobody write to a view that a function returns
            return gathered(op, x, process_group, (sum(sizes), *x.shape[1:]))
        return torch.cat(gathered(op, x, process_group).unbind(), dim=dim)
    # No backend gathers uneven shards in one call, so they travel padded to the largest.
    padded = x.new_zeros((*x.shape[:dim], max(sizes), *x.shape[dim + 1 :]))
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    shards = gathered(op, padded, process_group)
    return torch.cat([s.narrow(dim, 0, n) for s, n in zip(shards, sizes, strict=True)], dim=dim)


@all_gather.register_fake
def _(x: Tensor, dim: int, sizes: Sequence[int], group: str, op: str) -> Tensor:
    return x.new_empty((*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]))


@torch.library.custom_op("parallel_ops::comm_scatter", mutates_args=())
def scatter(x: Tensor, dim: int, sizes: Sequence[int], group: str) -> Tensor:
    """This rank's shard. Nothing is sent; an op, because a graph cannot read the rank of a group."""
    return x.split(list(sizes), dim=dim)[resolve_group(group).rank()].clone(memory_format=torch.contiguous_format)


@scatter.register_fake
def _(x: Tensor, dim: int, sizes: Sequence[int], group: str) -> Tensor:
    return x.new_empty((*x.shape[:dim], sizes[resolve_group(group).rank()], *x.shape[dim + 1 :]))


def _way(fp32: bool) -> str:
    return f"grad_reduce={'fp32' if fp32 else 'backend'!r}"


@torch.library.custom_op("parallel_ops::comm_reduce_scatter", mutates_args=())
@communicates
def reduce_scatter(x: Tensor, dim: int, sizes: Sequence[int], fp32: bool, group: str, op: str) -> Tensor:
    process_group = resolve_group(group)
    same = (*x.shape, dim, *sizes, fp32)
    _agree(op, x, process_group, same, f"dim={dim}, sizes={list(sizes)}, {_way(fp32)}")
    rank = process_group.rank()
    shape = (*x.shape[:dim], sizes[rank], *x.shape[dim + 1 :])
    if fp32 or len(set(sizes)) > 1:
        return sum_partials(_partials(op, x, dim, sizes, process_group))
    pieces = x if dim == 0 else torch.cat([p.flatten() for p in x.split(list(sizes), dim=dim)])
    out = x.new_empty(shape)
    with translate_backend_errors(op, process_group):
        reduce_scatter_single(out.view(-1), pieces.contiguous().view(-1), group=process_group)
    return out


@reduce_scatter.register_fake
def _(x: Tensor, dim: int, sizes: Sequence[int], fp32: bool, group: str, op: str) -> Tensor:
    return x.new_empty((*x.shape[:dim], sizes[resolve_group(group).rank()], *x.shape[dim + 1 :]))


@torch.library.custom_op("parallel_ops::comm_all_reduce", mutates_args=())
@communicates
def all_reduce(x: Tensor, fp32: bool, group: str, op: str) -> Tensor:
    process_group = resolve_group(group)
    _agree(op, x, process_group, (*x.shape, fp32), _way(fp32))
    if not fp32:
        out = x.clone(memory_format=torch.contiguous_format)
        with translate_backend_errors(op, process_group):
            dist.all_reduce(out, group=process_group)
        return out
    if x.nbytes <= _GATHER_BYTES:
        return sum_partials(gathered(op, x, process_group))
    size = process_group.size()
    shard = -(-x.numel() // size)
    flat = torch.nn.functional.pad(x.reshape(-1), (0, shard * size - x.numel()))
    own = sum_partials(_partials(op, flat, 0, [shard] * size, process_group))
    return gathered(op, own, process_group).view(-1)[: x.numel()].view(x.shape).clone()


@all_reduce.register_fake
def _(x: Tensor, fp32: bool, group: str, op: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("parallel_ops::comm_all_to_all", mutates_args=())
@communicates
def all_to_all(
    x: Tensor,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: str,
    op: str,
) -> Tensor:
    process_group = resolve_group(group)
    text = (
        f"split_dim={split_dim}, concat_dim={concat_dim}, split_sizes={list(split_sizes)}, "
        f"concat_sizes={list(concat_sizes)}"
    )
    rest = tuple(n for d, n in enumerate(x.shape) if d not in (split_dim, concat_dim))
    if split_dim != concat_dim:
        _agree(op, x, process_group, (rest, split_dim, concat_dim, *split_sizes, *concat_sizes), text)
    else:
        rows = _agree(op, x, process_group, (rest, split_dim), text, (*split_sizes, *concat_sizes))
        _check_pairs(op, split_dim, rows or [], process_group)
    own = list(x.shape)
    own[split_dim] = split_sizes[process_group.rank()]
    receive = [[n if d == concat_dim else own[d] for d in range(x.dim())] for n in concat_sizes]
    return torch.cat(exchanged(op, x.split(list(split_sizes), dim=split_dim), receive, process_group), dim=concat_dim)


@all_to_all.register_fake
def _(
    x: Tensor,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: str,
    op: str,
) -> Tensor:
    shape = list(x.shape)
    shape[split_dim] = split_sizes[resolve_group(group).rank()]
    shape[concat_dim] = sum(concat_sizes)
    return x.new_empty(shape)


def _agree(
    op: str, x: Tensor, group: ProcessGroup, same: tuple[object, ...], text: str, own: tuple[int, ...] = ()
) -> list[list[int]] | None:
    call = CallSignature(op, (x.dtype, x.dim(), *same), f"x of {list(x.shape)} {x.dtype}, {text}", own)
    return check_consistency(group, call, x.device)


def _check_pairs(op: str, dim: int, rows: Sequence[Sequence[int]], group: ProcessGroup) -> None:
    """Raises unless each rank expects what the others send: ``rows`` has both of each rank, none if checked before."""
    for i, j in itertools.product(range(len(rows)), repeat=2):
        sends, expects = rows[i][j], rows[j][len(rows) + i]
        if sends != expects:
            where = f"rank {i} sends {sends} entries of dimension {dim} to rank {j}"
            raise shared_error(group, f"{op}: {where}, which expects {expects}")
