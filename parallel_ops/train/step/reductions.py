"""The parts of a step that concern all ranks: random seed, number of targets, results."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm import ParallelMesh
from parallel_ops.models.context import IGNORE_INDEX
from parallel_ops.train.checkpoint.description import CheckpointError
from parallel_ops.train.data.batches import Batch
from parallel_ops.train.launch.signals import SIGNALS

T = TypeVar("T")


def micro_batch_seed(seed: int, step: int, micro_batch: int, row: int) -> int:
    """The seed of dropout in a micro-batch: equal on ranks with the same data, another for each ``row`` of a step."""
    key = np.random.SeedSequence([seed, step, row, micro_batch])
    return int(key.generate_state(1, np.uint64)[0] >> 1)


def count_targets(
    batches: list[Batch], mesh: ParallelMesh, device: torch.device, *, ignores: bool
) -> tuple[list[int], int | Tensor, int | Tensor]:
    """The number of targets in each micro-batch, in the step over all ranks, and the latter or 1, to divide by.

    Args:
        ignores: Targets may be -100. Otherwise all count, and ranks need not add their numbers.
    """
    if not ignores:
        counts = [batch.targets.numel() for batch in batches]
        everything = sum(counts) * mesh.size("dp")
        return counts, everything, everything
    counts = [int((batch.targets != IGNORE_INDEX).sum()) for batch in batches]
    if batches[0].cp_ranks is not None:
        whole = sum(batch.targets_of_all for batch in batches)
        return counts, whole, max(1, whole)
    group = mesh.group("dp")
    if group is None:
        return counts, sum(counts), max(1, sum(counts))
    total = torch.tensor(float(sum(counts)), device=device)
    dist.all_reduce(total, group=group)
    return counts, total, total.clamp(min=1)


def reduce_results(
    loss: Tensor, norm: Tensor, targets: int | Tensor, stop_signal: str | None, failed: bool, mesh: ParallelMesh,
    further: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The mean loss, the gradient norm, whether there was no target, a stop signal, whether a save failed.

    One reduction and one synchronisation.

    Args:
        loss: This rank's share of the loss, a scalar. norm: The norm over all ranks, a scalar.
        targets: Targets of all ranks, as ``count_targets`` returns them.
        stop_signal: The stop signal of this rank, if any. failed: The save beside the steps has failed on this rank.
        further: Values of all ranks, returned behind the others.
    """
    flags = [*(stop_signal == name for name in SIGNALS), failed]
    values = torch.cat([loss[None], loss.new_tensor(flags)])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    counted = targets if isinstance(targets, Tensor) else torch.full_like(loss, targets)
    parts = [values, *(value.to(values)[None] for value in (norm, counted))]
    parts += [] if further is None else [further.to(values)]
    mean, *rest = torch.cat(parts).tolist()
    (*came, unsaved), (grad_norm, any_target, *others) = rest[: len(flags)], rest[len(flags) :]
    stop = next((name for name, ranks in zip(SIGNALS, came, strict=True) if ranks), None)
    # Tensor- and context-parallel ranks have the same loss.
    return mean / (mesh.size("tp") * mesh.size("cp")), grad_norm, not any_target, stop, unsaved > 0, *others


def of_first_rank(compute: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """Computes on rank 0 and returns the result on every rank; all ranks call it.

    Args:
        group: All ranks, for messages of its own.

    Raises:
        ValueError, OSError, ImportError, CheckpointError: Rank 0 raised it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return compute()
    given: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            given = [compute(), None]
        except (ValueError, OSError, ImportError, CheckpointError) as error:
            given = [None, error]
    dist.broadcast_object_list(given, group=group)
    found, problem = given
    if problem is not None:
        raise problem
    return found
