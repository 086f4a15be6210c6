"""Initialisation of sharded parameters, independent of the mesh.

A weight is initialised in tiles, each with its own seed. A rank computes only the tiles that overlap its shard.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel_ops._internal.distributed.shards import local_box

InitFn = Callable[[Tensor], object]

# Large enough for full speed, small enough that little is computed outside a rank's shard.
_TILE = (64, 1024)


@torch.no_grad()
def init_sharded_(parameter: Tensor, init: InitFn) -> None:
    """Initialises a parameter, or this rank's shard of it, with a seed from PyTorch's default generator.

    Ranks whose generators are in the same state get shards of one weight, the same on any mesh and under FSDP. On the
    meta device only the generator advances.

    Args:
        init: fills a tile of at most 64 x 1,024 elements in place, fp32 (fp64 for fp64 parameters), each element
            independently, from the default generator of the parameter's device.
    """
    seed = int(torch.randint(2**62, (), device="cpu"))
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    if local.is_meta or not local.numel():
        return
    offset, _ = local_box(parameter)
    # A vector is one row; a matrix of more dimensions is a stack, each with seeds of its own.
    first, row, column = (0,) * (3 - len(offset)) + tuple(offset)
    stack = local.view((1,) * (3 - local.dim()) + tuple(local.shape))
    whole = (1, *parameter.shape)[-2:]
    on_gpu = local.device.type == "cuda"
    with torch.random.fork_rng([local.device] if on_gpu else []):
        for number, matrix in enumerate(stack, first):
            seeds = (seed, number) if local.dim() > 2 else (seed,)
            _init_matrix(matrix, init, seeds, row, column, whole)


def _init_matrix(
    matrix: Tensor, init: InitFn, seeds: tuple[int, ...], row: int, column: int, whole: Sequence[int]
) -> None:
    """Initialises the part of a matrix of shape ``whole`` that begins at this row and column."""
    wide = torch.float64 if matrix.dtype is torch.float64 else torch.float32
    on_gpu = matrix.device.type == "cuda"
    generator = torch.cuda.default_generators[matrix.device.index] if on_gpu else torch.default_generator
    for r in range(row // _TILE[0], -(-(row + matrix.shape[0]) // _TILE[0])):
        for c in range(column // _TILE[1], -(-(column + matrix.shape[1]) // _TILE[1])):
            tile = torch.empty(
                min(_TILE[0], whole[0] - r * _TILE[0]), min(_TILE[1], whole[1] - c * _TILE[1]), device=matrix.device,
                dtype=wide,
            )  # fmt: skip
            generator.manual_seed(_seed(*seeds, r, c))
            init(tile)
            top, left = r * _TILE[0] - row, c * _TILE[1] - column
            into = matrix[max(top, 0) : top + tile.shape[0], max(left, 0) : left + tile.shape[1]]
            into.copy_(tile[max(-top, 0) :, max(-left, 0) :][: into.shape[0], : into.shape[1]])


def _seed(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")


def fill_(parameter: Tensor, value: float) -> None:
    """Fills a parameter, or this rank's shard of it, with one value."""
    with torch.no_grad():
        (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).fill_(value)


def uniform(fan_in: int) -> InitFn:
    """The initialisation of ``torch.nn.Linear``: uniform in ``+-1 / sqrt(fan_in)``."""
    bound = fan_in**-0.5 if fan_in > 0 else 0.0
    return lambda tile: tile.uniform_(-bound, bound)
