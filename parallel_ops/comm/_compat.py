"""Names that torch changed between 2.11 and 2.15, and the few that it keeps to itself. Nothing else knows versions."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_process_group_store, _resolve_process_group  # type: ignore[attr-defined]

# 2.13 renamed the two and warns at every call of the old names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def resolve_group(name: Any) -> ProcessGroup:
    """The process group of this name: ops carry the name, since schemas have no type for a group."""
    return _resolve_process_group(name)


def group_store(group: ProcessGroup) -> dist.Store:  # type: ignore[name-defined]
    """The key-value store through which the ranks of a group met."""
    return _get_process_group_store(group)
