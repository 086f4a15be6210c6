"""Where a rank's shard of a DTensor lies in the whole tensor.

A dimension that several mesh dimensions shard is cut by one after the other, each time as ``torch.chunk`` cuts. FSDP2
cuts what tensor parallelism has cut before, so the mesh dimension on the right comes first; the placement on the left
has the number of parts that there were then, its ``split_factor``. ``DTensor.full_tensor`` puts shards together by that
order. ``compute_local_shape_and_global_offset`` of torch 2.11 to 2.14 does not: it cuts from left to right, which gives
the same shards only where the first cut is even (pytorch issue 161368). torch.distributed.checkpoint uses it; see
``train.checkpoint.planners``.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

Box = tuple[tuple[int, ...], tuple[int, ...]]


def local_box(tensor: Tensor) -> Box:
    """Where this rank's part of a tensor starts in the whole, and its shape.

    Raises:
        RuntimeError: The rank's part has another shape than its placements say.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    mesh, held = tensor.device_mesh, tuple(tensor._local_tensor.shape)
    coordinate = mesh.get_coordinate()
    box = None if coordinate is None else shard_box(tensor.shape, tuple(mesh.shape), coordinate, tensor.placements)
    if box is None or box[1] != held:
        raise RuntimeError(
            f"cannot compute which part of {list(tensor.shape)} a rank holds with {tensor.placements} over {mesh}: it "
            f"has {list(held)}" + ("" if box is None else f", not {list(box[1])}")
        )
    return box


def shard_box(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Box | None:
    """Start and shape of the shard at a coordinate of a mesh; ``None`` where no order of cuts gives the placements.

    An empty shard starts at the end of the dimension, as in torch: its start must differ from those of all others.
    """
    starts, sizes = [0] * len(shape), list(shape)
    for dim, whole in enumerate(shape):
        order = cuts_of(dim, mesh_shape, placements)
        if order is None:
            return None
        for at in order:
            part = -(-sizes[dim] // mesh_shape[at])
            first = min(coordinate[at] * part, sizes[dim])
            starts[dim], sizes[dim] = starts[dim] + first, min(part, sizes[dim] - first)
        if not sizes[dim]:
            starts[dim] = whole
    return tuple(starts), tuple(sizes)


def cuts_of(dim: int, mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[int] | None:
    """The mesh dimensions that shard a dimension of a tensor, in the order of their cuts."""
    order: list[int] = []
    for at in reversed(range(len(placements))):
        if getattr(placements[at], "dim", None) != dim:
            continue
        # Of a cut, the parts that dimensions on its right have made before; ``Shard`` has no such number.
        before, parts, place = getattr(placements[at], "split_factor", 1), 1, 0
        while parts != before and place < len(order):
            parts *= mesh_shape[order[place]]
            place += 1
        if parts != before:
            return None
        order.insert(place, at)
    return order
