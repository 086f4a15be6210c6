"""One owner for each matrix that several ranks share: the parts of the matrix go to it, and parts of the result return.

    for each mesh dimension that shards:            all-to-all of the parts, along that dimension, to the owner's place
    owner:                                          the whole result of the whole matrix
    for each mesh dimension, the other way round:   all-to-all of the parts of the result, to all that hold one

Owners are all ranks that share a matrix, by balanced cost: the dearest matrix first, each to the rank with the least so
far (Graham's rule). A rank sends and receives about as much as in an all-gather of its shards over the ranks, in each
direction, and computes 1 / P of the matrices.

The matrices go in rounds, each of about the same cost on every owner. While a round is computed, the next one is
gathered and the last one is scattered. Along the dimensions of the mesh, since those have process groups already.

Sources: Megatron-LM's and torchtitan's distributed Muon; Dion (Ahn et al., arXiv:2504.05295), whose Muon exchanges
matrices of one shape, as many as there are ranks, by one all-to-all.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from parallel_ops._internal.distributed.shards import Box, cuts_of, local_box, shard_box

# Of whole matrices in bfloat16 that an owner has in a round; up to 2 * dimensions + 1 rounds are in flight.
_ROUND_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class Matrix:
    """A parameter, or an expert of a stacked one, and the mesh coordinate of its owner.

    Attributes:
        index: Place of the expert among those that the rank holds; ``None`` for a parameter that is a matrix.
    """

    parameter: Tensor
    index: int | None
    owner: tuple[int, ...]

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape[-2:]


@dataclass(frozen=True)
class _Way:
    """Mesh dimensions along which parts of a matrix come together, in this order; ``sharded``: those with parts."""

    mesh: DeviceMesh | None
    dims: tuple[int, ...]
    sharded: tuple[bool, ...]

    @property
    def coordinate(self) -> tuple[int, ...]:
        return tuple(self.mesh.get_coordinate() or ()) if self.mesh is not None else ()


Round = tuple[_Way, list[Matrix]]


def rounds_of(parameters: Sequence[Tensor], cost: Callable[[Tensor], float]) -> list[Round]:
    """Assigns an owner to each matrix of which this rank has a part. All ranks of the parameters' meshes call it.

    Args:
        parameters: ``[rows, columns]`` or stacks ``[experts, rows, columns]`` of them; on all ranks of a mesh the same.
        cost: Arithmetic of a parameter's matrix, or of one of its stack.
    """
    by_way: dict[_Way, list[Tensor]] = {}
    for parameter in parameters:
        by_way.setdefault(_way_of(parameter), []).append(parameter)
    loads: dict[tuple[int, ...], list[float]] = {}
    return [(way, some) for way, each in by_way.items() for some in _rounds(way, each, cost, loads)]


def _way_of(parameter: Tensor) -> _Way:
    local_box(parameter)  # raises where a rank's part is not what the placements say
    if not isinstance(parameter, DTensor):
        return _Way(None, (), ())
    mesh, placements, stacked = parameter.device_mesh, parameter.placements, parameter.dim() > 2
    # Experts stay where they are.
    dims = [
        at for at, placed in enumerate(placements)
        if mesh.size(at) > 1 and not (stacked and getattr(placed, "dim", None) == 0)
    ]  # fmt: skip
    cuts = [cuts_of(dim, tuple(mesh.shape), placements) or [] for dim in range(int(stacked), parameter.dim())]
    # What was cut last comes together first.
    undone = [[at for at in reversed(cut) if at in dims] for cut in cuts]
    if any(some != sorted(some) for some in undone):
        parts = list(itertools.chain(*undone))
        dims = parts + [at for at in dims if at not in parts]
    return _Way(mesh, tuple(dims), tuple(not isinstance(placements[at], Replicate) for at in dims))


def _rounds(
    way: _Way, parameters: Sequence[Tensor], cost: Callable[[Tensor], float], loads: dict[tuple[int, ...], list[float]]
) -> list[list[Matrix]]:
    """The matrices of each round. ``loads``: for ranks that share matrices, what each has to compute so far."""
    here = way.coordinate
    places = list(itertools.product(*(range(way.mesh.size(dim)) for dim in way.dims))) if way.mesh else [()]
    owners = [_moved(here, dict(zip(way.dims, place, strict=True))) for place in places]
    ranks = tuple(int(way.mesh.mesh[owner]) for owner in owners) if way.mesh else ()
    load = loads.setdefault(tuple(sorted(ranks)), [0.0] * len(owners))
    order = sorted(range(len(owners)), key=lambda at: ranks[at]) if ranks else [0]
    every = [(parameter, index) for parameter in parameters for index in _indices(parameter)]
    every.sort(key=lambda pair: -cost(pair[0]))
    own: list[list[Matrix]] = [[] for _ in owners]
    for parameter, index in every:
        least = min(range(len(load)), key=load.__getitem__)
        load[least] += cost(parameter)
        own[least].append(Matrix(parameter, index, owners[order[least]]))
    size = max((sum(2 * m.shape.numel() for m in some) for some in own), default=0)
    count = min(max(1, -(-size // _ROUND_BYTES)), max(map(len, own)))
    most = max(sum(cost(m.parameter) for m in some) for some in own)
    found: list[list[Matrix]] = [[] for _ in range(count)]
    for some in own:
        before = 0.0
        for matrix in some:
            found[min(count - 1, int(before * count / most)) if most else 0].append(matrix)
            before += cost(matrix.parameter)
    return found


def _indices(parameter: Tensor) -> Iterable[int | None]:
    """The experts of a stack of which this rank holds a part, by their place there; ``None`` for a matrix."""
    return (None,) if parameter.dim() == 2 else range(local_box(parameter)[1][0])


def _moved(coordinate: Sequence[int], to: dict[int, int]) -> tuple[int, ...]:
    return tuple(to.get(dim, place) for dim, place in enumerate(coordinate))


@functools.lru_cache(maxsize=4096)
def _shard(
    shape: torch.Size, mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> Box:
    box = shard_box(shape, mesh, coordinate, placements)
    if box is None:
        raise RuntimeError(f"cannot compute which part of {list(shape)} a rank holds with {placements} over {mesh}")
    return box


def _box(parameter: Tensor, coordinate: tuple[int, ...], gathered: tuple[int, ...]) -> Box:
    """Start and shape of what a rank has of a parameter after the mesh dimensions ``gathered`` have come together."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim(), tuple(parameter.shape)
    placements = tuple(Replicate() if at in gathered else p for at, p in enumerate(parameter.placements))
    return _shard(parameter.shape, tuple(parameter.device_mesh.shape), coordinate, placements)


def _part(matrix: Matrix, coordinate: tuple[int, ...], gathered: tuple[int, ...]) -> Box:
    starts, sizes = _box(matrix.parameter, coordinate, gathered)
    return starts[-2:], sizes[-2:]


def _within(part: Box, whole: Box) -> tuple[slice, ...]:
    (starts, sizes), (origin, _) = part, whole
    # An empty part starts at the end of its dimension.
    return tuple(slice(s - o, s - o + n) if n else slice(0, 0) for s, o, n in zip(starts, origin, sizes, strict=True))


def exchange(
    round: Round,
    take: Callable[[Matrix], Tensor],
    compute: Callable[[list[Matrix], list[Tensor]], list[Tensor]],
    put: Callable[[Matrix, Tensor], None],
) -> Iterator[None]:
    """Computes a round; yields where messages are under way. Ranks must interleave rounds alike.

    Args:
        take: This rank's part of a matrix, ``[rows, columns]``. compute: Results of the whole matrices that this rank
            owns, alike in shape. put: Takes this rank's part of a result.
    """
    way, matrices = round
    here, dims = way.coordinate, way.dims

    def active(matrix: Matrix, gathered: tuple[int, ...]) -> bool:
        return all(here[dim] == matrix.owner[dim] for dim in gathered)

    held = {matrix: take(matrix) for matrix in matrices}
    device = next(iter(held.values())).device
    for at, dim in enumerate(dims):
        before, after = dims[:at], dims[: at + 1]
        if not way.sharded[at]:
            held = {matrix: t for matrix, t in held.items() if active(matrix, after)}
            continue
        assert way.mesh is not None
        size = way.mesh.size(dim)
        arriving = [m for m in matrices if active(m, after)]
        parts = {m: [_part(m, _moved(here, {dim: k}), before) for k in range(size)] for m in arriving}
        pending, received = _all_to_all(
            [[t for matrix, t in held.items() if matrix.owner[dim] == k] for k in range(size)],
            [[parts[m][k][1] for m in arriving] for k in range(size)], way.mesh.get_group(dim), device,
        )  # fmt: skip
        yield
        pending.wait()
        held = {}
        for number, matrix in enumerate(arriving):
            box = _part(matrix, here, after)
            whole = held[matrix] = received[0][number].new_empty(box[1])
            for k, part in enumerate(parts[matrix]):
                whole[_within(part, box)] = received[k][number]
    owned = list(held)
    held = dict(zip(owned, compute(owned, list(held.values())), strict=True))
    for at, dim in reversed(list(enumerate(dims))):
        before, after = dims[:at], dims[: at + 1]
        assert way.mesh is not None
        size = way.mesh.size(dim)
        sent = [
            [t[_within(_part(m, _moved(here, {dim: k}), before), _part(m, here, after))] for m, t in held.items()]
            for k in range(size)
        ]
        arriving = [m for m in matrices if active(m, before)]
        from_each = [[m for m in arriving if m.owner[dim] == k] for k in range(size)]
        shapes = [[_part(m, here, before)[1] for m in some] for some in from_each]
        pending, received = _all_to_all(sent, shapes, way.mesh.get_group(dim), device)
        yield
        pending.wait()
        got = dict(zip(itertools.chain(*from_each), itertools.chain(*received), strict=True))
        held = {matrix: got[matrix] for matrix in arriving}
    for matrix, result in held.items():
        put(matrix, result)


def _all_to_all(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], group: Any, device: torch.device
) -> tuple[Any, list[list[Tensor]]]:
    """Sends a list of tensors in bfloat16 to each rank; returns a work to wait for, and what each will have sent."""
    flat = [t.reshape(-1) for some in sent for t in some]
    counts = [[torch.Size(shape).numel() for shape in some] for some in shapes]
    given = torch.cat(flat) if flat else torch.empty(0, dtype=torch.bfloat16, device=device)
    taken = given.new_empty(sum(map(sum, counts)))
    work = dist.all_to_all_single(
        taken, given, [sum(some) for some in counts], [sum(t.numel() for t in some) for some in sent],
        group=group, async_op=True,
    )  # fmt: skip
    views = iter(taken.split(list(itertools.chain(*counts))))
    return work, [[next(views).view(shape) for shape in some] for some in shapes]


def interleaved(rounds: Iterable[Iterator[None]]) -> None:
    """Runs rounds so that messages of some are under way while another is computed: of each that has begun, the next
    part, the youngest first. So a round's gather is waited for before the computation of an older one begins, and its
    scatter after the computation of a younger one."""
    running: list[Iterator[None]] = []
    for began in itertools.chain(([each] for each in rounds), itertools.repeat([])):
        running = began + running
        if not running:
            return
        running = [each for each in running if next(each, running) is not running]
