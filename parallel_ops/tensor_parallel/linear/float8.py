"""Rows that ranks share, quantized where they are: what an all-gather before a float8 matmul sends.

    forward          q(x_r), rows with their scales           y = q(X) q(W)^T
    weight gradient  q(x_r^T), columns with their scales      dW = q(dY^T) q(X^T)^T
    input gradient   dx = reduce_scatter(q(dY) q(W^T)^T)      sums, in 16 bits

The bits are those of X gathered in 16 bits and then quantized, for half the bytes: scales of rows and of blocks along
them need no other rank's rows, those of blocks of columns neither if blocks divide the rows of every rank. A scale of a
whole column is found by a gather of one maximum a column and rank. As in ``all_gather_linear``, x alone is saved, and
gathered again for the gradient of weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.groups import GradReduce, check_sizes, is_fp32
from parallel_ops.comm import primitives
from parallel_ops.ops.float8_recipes import E4M3, RECIPES, Float8Recipe, Quantized, Recipe, quantize
from parallel_ops.tensor_parallel.linear.call import rows_of

_NAME = "float8_linear"


@dataclass(frozen=True)
class GatheredRows:
    """The ``shared`` of ``float8_linear``: x is sharded along its first dimension.

    Attributes:
        group: Name of the ranks' group. sizes: Of every rank's x along that dimension. rows: Of its matrix.
        fp32: How the gradient of x is summed; ``grad_reduce`` of ``comm.collectives``.
    """

    group: str
    sizes: tuple[int, ...]
    rows: tuple[int, ...]
    fp32: bool

    @classmethod
    def of(
        cls, x: Tensor, recipe: Float8Recipe, *, group: ProcessGroup, sizes: Sequence[int] | None,
        grad_reduce: GradReduce,
    ) -> "GatheredRows | None":  # fmt: skip
        """``None`` if blocks of columns would reach over ranks."""
        each = check_sizes(_NAME, "sizes", sizes, group, 0, shard=x)
        rows = rows_of(each, x)
        if any(n % max(1, RECIPES[recipe].block) for n in rows):
            return None
        return cls(group.group_name, tuple(each), tuple(rows), is_fp32(_NAME, grad_reduce))

    def by_row(self, x: Tensor, recipe: Recipe) -> Quantized:
        """All rows, ``[sum of rows, H]``, of this rank's ``[rows, H]``."""
        return self._gathered(quantize(x, E4M3, recipe), 0, 1, recipe)

    def by_column(self, x: Tensor, recipe: Recipe) -> Quantized:
        """Their transpose, ``[H, sum of rows]``."""
        return self._gathered(quantize(x.t(), E4M3, recipe, largest=self._largest), 1, max(1, recipe.block), recipe)

    def scattered(self, dx: Tensor) -> Tensor:
        """This rank's part of the sum of all ranks' ``dx``."""
        found: Tensor = primitives.reduce_scatter(dx, 0, self.sizes, self.fp32, self.group, f"backward of {_NAME}")
        return found

    def _largest(self, own: Tensor) -> Tensor:
        ranks = len(self.rows)
        return primitives.all_gather(own[None], 0, [1] * ranks, self.group, f"scales of {_NAME}").amax(0)

    def _gathered(self, own: Quantized, dim: int, block: int, recipe: Recipe) -> Quantized:
        whole = dim == 1 and not recipe.block
        scales = own.scales
        if not whole:
            kept = scales.to(torch.float8_e8m0fnu).view(torch.uint8) if recipe.name == "mxfp8" else scales
            blocks = [n // block for n in self.rows]
            scales = primitives.all_gather(kept, dim, blocks, self.group, f"scales of {_NAME}")
            scales = scales.view(torch.float8_e8m0fnu).float() if recipe.name == "mxfp8" else scales
        values = primitives.all_gather(own.values.view(torch.uint8), dim, self.rows, self.group, _NAME)
        return Quantized(values.view(E4M3), scales)
