"""Communication between ranks: the mesh, collectives with gradients, and transports for overlapped ops."""

import parallel_ops._internal.dispatch.extension  # noqa: F401  (first: it defines the torch ops that the rest registers with)
from parallel_ops.comm.collectives import (
    all_gather,
    all_to_all,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter,
    scatter_to_group,
    shard_sizes,
)
from parallel_ops.comm.consistency import set_consistency_checks
from parallel_ops.comm.errors import PeerError
from parallel_ops.comm.mesh import ParallelMesh
from parallel_ops.comm.transport.registry import use_transport

__all__ = [
    "ParallelMesh",
    "PeerError",
    "all_gather",
    "all_to_all",
    "copy_to_group",
    "gather_from_group",
    "reduce_from_group",
    "reduce_scatter",
    "scatter_to_group",
    "set_consistency_checks",
    "shard_sizes",
    "use_transport",
]
