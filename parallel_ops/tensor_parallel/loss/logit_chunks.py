"""Logits of a linear, one chunk of rows at a time, and the gradients of its inputs."""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.compat import all_gather_single, reduce_scatter_single
from parallel_ops._internal.gradients.weight_gradients import add_product
from parallel_ops.ops.cross_entropy.kernels import accumulation_dtype


class ChunkOptions(NamedTuple):
    """How an op cuts its logits into chunks, in the order of the ops' schemas."""

    group: str | None
    parts: int  # number of ranks over which the rows are sharded
    chunk_bytes: int
    needs: list[bool]  # whether hidden, weight and bias need a gradient

    @property
    def same(self) -> tuple[object, ...]:
        """What ranks compare, hashable: a call that is checked once is remembered by it."""
        return self.parts, self.chunk_bytes, *self.needs


def _max_rows(options: ChunkOptions, widest: int, weight: Tensor) -> int:
    """Largest number of rows of hidden in a chunk, if the widest rank has ``widest`` columns."""
    return max(1, options.chunk_bytes // max(1, widest * weight.itemsize * options.parts))


def weight_gradient_dtype(options: ChunkOptions, rows: int, weight: Tensor) -> torch.dtype:
    """The dtype in which the gradient of ``weight`` is summed over the chunks of ``rows`` rows of hidden.

    On a CPU the matmul of each chunk is rounded to bfloat16 (see ``add_product``), so one chunk needs no wider sum.
    """
    rounded = weight.dtype is torch.bfloat16 and weight.device.type == "cpu"
    if rounded and options.group is None and rows <= _max_rows(options, weight.shape[0], weight):
        return weight.dtype
    return accumulation_dtype(weight.dtype)


def blocks_of(z: Tensor) -> list[slice]:
    """Quarters of the rows of a chunk of logits, for arithmetic that needs room in fp32."""
    step = max(1, -(-z.shape[0] // 4))
    return [slice(first, first + step) for first in range(0, z.shape[0], step)]


class Chunks:
    """The chunks of one call. They share one buffer for logits; gradients are accumulated over them."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: ChunkOptions, widest: int,
        rows: int | None = None, temperature: float = 1.0,
    ) -> None:  # fmt: skip
        self._shape = hidden.shape
        self.weight, self.bias, self.options, self._scale = weight, bias, options, 1.0 / temperature
        self.hidden = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
        self.local_rows = self.hidden.shape[0]
        most = _max_rows(options, widest, weight) if rows is None else rows
        self.count = max(1, -(-self.local_rows // most))
        self.rows = max(1, -(-self.local_rows // self.count))
        self._buffer: Tensor | None = None
        # Allocated at the first chunk in their full shape; the last two in the dtype of their sum.
        self._dweight_dtype = weight_gradient_dtype(options, self.local_rows, weight)
        self._dhidden: Tensor | None = None
        self._dweight: Tensor | None = None
        self._dbias: Tensor | None = None

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of hidden, weight and bias, empty if not needed; the last two in the dtype of their sum."""
        accumulate = accumulation_dtype(self.weight.dtype)
        return (
            self.weight.new_empty(0) if self._dhidden is None else self._dhidden.view(self._shape),
            self.weight.new_empty(0, dtype=self._dweight_dtype) if self._dweight is None else self._dweight,
            self.weight.new_empty(0, dtype=accumulate) if self._dbias is None else self._dbias,
        )

    def split(self, t: Tensor, leading: int = 0) -> list[Tensor]:
        """Values of the rows of all ranks as one view for each chunk: ``[*leading, parts, rows of the chunk]``."""
        whole = t.reshape(*t.shape[:leading], self.options.parts, self.local_rows)
        return [whole[..., i * self.rows : (i + 1) * self.rows] for i in range(self.count)]

    def logits(self, i: int, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Rows of hidden in chunk ``i``, gathered over the ranks that share them, and their logits, in the buffer.

        The logits are divided by the temperature.
        """
        h = self.hidden if self.count == 1 else self.hidden[i * self.rows : (i + 1) * self.rows]
        if self.options.parts > 1:
            gathered = h.new_empty((self.options.parts * h.shape[0], h.shape[1]))
            all_gather_single(gathered, h.contiguous(), group=group)
            h = gathered
        if self.count == 1:
            z = F.linear(h, self.weight, self.bias)
        else:
            if self._buffer is None:
                self._buffer = self.weight.new_empty((self.rows * self.options.parts, self.weight.shape[0]))
            z = self._buffer[: h.shape[0]]
            if self.bias is None:
                torch.mm(h, self.weight.t(), out=z)
            else:
                torch.addmm(self.bias, h, self.weight.t(), out=z)
        return h, z if self._scale == 1.0 else z.mul_(self._scale)

    def add_gradients(self, i: int, h: Tensor, dz: Tensor, group: ProcessGroup | None) -> None:
        """Adds the gradients of chunk ``i``: rows of hidden ``h``, gradient of their logits ``dz``."""
        needs_hidden, needs_weight, needs_bias = self.options.needs
        accumulate = accumulation_dtype(dz.dtype)
        if needs_hidden:
            dh = self._sum_over_ranks(dz @ self.weight, group)
            if self.count == 1:
                self._dhidden = dh if dh.dtype is self.hidden.dtype else dh.to(self.hidden.dtype)
            else:
                if self._dhidden is None:
                    self._dhidden = torch.empty_like(self.hidden, memory_format=torch.contiguous_format)
                self._dhidden[i * self.rows : (i + 1) * self.rows] = dh
        if needs_weight:
            if self._dweight is None and dz.dtype is self._dweight_dtype:
                self._dweight = dz.t() @ h
            else:
                if self._dweight is None:
                    self._dweight = self.weight.new_zeros(self.weight.shape, dtype=self._dweight_dtype)
                add_product(self._dweight, dz, h, rounded=True)  # once a chunk; the chunks are summed in fp32
        if needs_bias:
            db = dz.sum(0, dtype=accumulate)
            self._dbias = db if self._dbias is None else self._dbias.add_(db)

    def _sum_over_ranks(self, dh: Tensor, group: ProcessGroup | None) -> Tensor:
        if group is None:
            return dh
        dh = dh.to(accumulation_dtype(dh.dtype))
        if self.options.parts == 1:
            dist.all_reduce(dh, group=group)
            return dh
        mine = dh.new_empty((dh.shape[0] // self.options.parts, dh.shape[1]))
        reduce_scatter_single(mine, dh, group=group)
        return mine
