"""Planners of torch.distributed.checkpoint that know which part of a DTensor a rank holds.

torch's own plan is wrong for a parameter under tensor parallelism and ``fully_shard`` whose first cut is uneven, such
as a vocabulary of 257 over 2 x 4 ranks (see ``_internal.distributed.shards``): saving ends with
"Failed to validate global plan".
Everything else is left to the default planners.
"""

import dataclasses
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from parallel_ops._internal.distributed.shards import local_box


class SavePlanner(DefaultSavePlanner):
    """torch's default planner, right for uneven shards too.

    ``torch.distributed.checkpoint.save(state, checkpoint_id=folder, planner=SavePlanner())``. The checkpoint is an
    ordinary one.
    """

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        held = _misplaced(self.state_dict)
        return dataclasses.replace(plan, items=[_moved(item, held) for item in plan.items])


class LoadPlanner(DefaultLoadPlanner):
    """torch's default planner, right for uneven shards too; see ``SavePlanner``."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        held = _misplaced(self.state_dict)
        items = [item for item in plan.items if item.dest_index.fqn not in held]
        for name, chunk in held.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if isinstance(stored, TensorStorageMetadata):
                items += create_read_items_for_chunk_list(name, stored, [chunk])
        return dataclasses.replace(plan, items=items)


def _misplaced(state: dict[str, Any]) -> dict[str, ChunkStorageMetadata]:
    """This rank's part of each DTensor for which torch computes another part."""
    found = {}
    for name, t in state.items():
        if not isinstance(t, DTensor) or t.device_mesh.get_coordinate() is None:
            continue
        if hasattr(t._local_tensor, "__create_chunk_list__"):  # a tensor that describes itself
            continue
        starts, sizes = local_box(t)
        chunk = ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes))
        if t.__create_chunk_list__() != [chunk]:
            found[name] = chunk
    return found


def _moved(item: WriteItem, held: dict[str, ChunkStorageMetadata]) -> WriteItem:
    """The item, or that of the part which this rank holds."""
    chunk = held.get(item.index.fqn)
    if chunk is None or item.tensor_data is None:
        return item
    index = dataclasses.replace(item.index, offset=chunk.offsets)
    return dataclasses.replace(item, index=index, tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk))
