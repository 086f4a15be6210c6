"""The vocabulary layout of a group, exchanged before the statistics of a vocab-parallel loss are gathered.

A rank needs the start of its shard to find its targets. So the consistency check of the call (rows and options) also
exchanges the sizes of the shards and, on CPU, the target that is furthest outside any vocabulary. On CUDA, where a call
of a known kind is not compared again, the layout is cached by the size of this rank's shard. If a shard changes its
size later on some ranks of the group only, the others do not notice: use another group for it.
"""

import dataclasses
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm.consistency import CallSignature, check_consistency, shared_error


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shard sizes of a group, in rank order, and this rank's place in it.

    Attributes:
        start: first column of this rank's shard. vocab: size of the whole vocabulary.
    """

    sizes: tuple[int, ...]
    rank: int

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.rank])

    @property
    def vocab(self) -> int:
        return sum(self.sizes)


_NONE = (-1, 0)

# By group and size of this rank's shard: a model may have several vocabularies.
_layouts: weakref.WeakKeyDictionary[ProcessGroup, dict[int, Layout]] = weakref.WeakKeyDictionary()


def known_layout(group: ProcessGroup, cols: int) -> Layout:
    """The layout found by the forward for this rank's shard of ``cols`` columns."""
    return _layouts[group][cols]


def agreed_layout(
    op: str, group: ProcessGroup, cols: int, target: Tensor, ignore_index: int, options: tuple[object, ...]
) -> Layout:
    """The layout of the group for this rank's shard of ``cols`` columns.

    Args:
        options: must be the same on every rank, like the number of rows.

    Raises:
        ValueError: on every rank, where they make different calls or, on CPU, a target is outside the vocabulary (on
            CUDA the loss of such a row is NaN instead).
    """
    furthest = _furthest(target, ignore_index) if target.device.type == "cpu" else _NONE
    layouts, same = _layouts.setdefault(group, {}), (target.numel(), ignore_index, *options)
    call = CallSignature(op, same, f"{same[0]} rows, options {same[1:]}", (cols, *furthest))
    answers = check_consistency(group, call, target.device, known=cols in layouts)
    if answers is not None:
        layouts[cols] = layout = Layout(tuple(own[0] for own in answers), group.rank())
        for rank, (_, *of_rank) in enumerate(answers):
            if _outside(of_rank, layout):
                raise shared_error(group, _bad_target(op, of_rank, layout, f" (on rank {rank})"))
    return layouts[cols]


def _furthest(target: Tensor, ignore_index: int) -> Sequence[int]:
    """``(row, target)`` of a negative target, or else of the largest one; ``_NONE`` if all are ignored."""
    flat = target.flatten().long()
    # Negative targets rank above all others.
    size = torch.where(flat < 0, torch.iinfo(torch.int64).max, flat).masked_fill(flat == ignore_index, -1)
    row = int(size.argmax()) if size.numel() else -1
    return _NONE if row < 0 or size[row] < 0 else (row, int(flat[row]))


def _outside(furthest: Sequence[int], layout: Layout) -> bool:
    row, value = furthest
    return row >= 0 and not 0 <= value < layout.vocab


def _bad_target(op: str, furthest: Sequence[int], layout: Layout, where: str) -> str:
    row, value = furthest
    inside = f"the vocabulary [0, {layout.vocab})"
    return f"{op}: target {value} in row {row}{where} is outside {inside} and is not ignore_index"
