"""The logits of a linear, a chunk of rows at a time, and the gradients that go back through it."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm._compat import all_gather_single, reduce_scatter_single
from parallel_ops.ops import _cross_entropy as local
from parallel_ops.tensor_parallel.weight_gradients import add_product


@dataclass(frozen=True)
class LinearCall:
    """The arguments of the op that are not tensors."""

    group: str | None
    label_smoothing: float
    z_loss: float
    softcap: float
    ignore_index: int
    ignore_invalid: bool  # targets outside the vocabulary are ignored
    per_row: bool  # reduction "none"
    parts: int  # ranks that hold a part of the rows each
    chunk_bytes: int
    needs: list[bool]  # of hidden, weight and bias: whether a gradient is wanted


class Chunks:
    """The chunks of one call: rows of hidden in, logits in one buffer, gradients out."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, widest: int, *, gradients: bool
    ) -> None:
        self._shape = hidden.shape
        self.weight, self.bias, self.call = weight, bias, call
        self.hidden = hidden.reshape(-1, hidden.shape[-1])
        self.local_rows = self.hidden.shape[0]
        rows = max(1, call.chunk_bytes // max(1, widest * weight.itemsize * call.parts))
        self.count = max(1, -(-self.local_rows // rows))
        self.rows = max(1, -(-self.local_rows // self.count))
        self._buffer = weight.new_empty((self.rows * call.parts, weight.shape[0]))
        accumulate = local.accumulation_dtype(weight.dtype)
        needs_hidden, needs_weight, needs_bias = (gradients and needed for needed in call.needs)
        self.dhidden = torch.empty_like(self.hidden, memory_format=torch.contiguous_format) if needs_hidden else None
        self.dweight = weight.new_zeros(weight.shape, dtype=accumulate) if needs_weight else None
        self.dbias = weight.new_zeros(weight.shape[:1], dtype=accumulate) if needs_bias else None

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Those of hidden, weight and bias; empty where not wanted. The last two are not rounded to their dtype yet."""
        dhidden = None if self.dhidden is None else self.dhidden.view(self._shape)
        accumulate = local.accumulation_dtype(self.weight.dtype)
        return (
            self.weight.new_empty(0) if dhidden is None else dhidden,
            self.weight.new_empty(0, dtype=accumulate) if self.dweight is None else self.dweight,
            self.weight.new_empty(0, dtype=accumulate) if self.dbias is None else self.dbias,
        )

    def of(self, t: Tensor) -> list[Tensor]:
        """Per-row values of all ranks, as one view for each chunk: ``[parts, rows of the chunk]``."""
        whole = t.reshape(self.call.parts, self.local_rows)
        return [whole[:, i * self.rows : (i + 1) * self.rows] for i in range(self.count)]

    def logits(self, i: int, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """(hidden rows of the chunk, of all ranks that hold a part; logits, in the buffer)."""
        h = self.hidden[i * self.rows : (i + 1) * self.rows]
        if self.call.parts > 1:
            gathered = h.new_empty((self.call.parts * h.shape[0], h.shape[1]))
            all_gather_single(gathered, h.contiguous(), group=group)
            h = gathered
        z = self._buffer[: h.shape[0]]
        if self.bias is None:
            torch.mm(h, self.weight.t(), out=z)
        else:
            torch.addmm(self.bias, h, self.weight.t(), out=z)
        return h, z

    def add_gradients(self, i: int, h: Tensor, dz: Tensor, group: ProcessGroup | None) -> None:
        if self.dhidden is not None:
            self.dhidden[i * self.rows : (i + 1) * self.rows] = self._sum_over_ranks(dz @ self.weight, group)
        if self.dweight is not None:
            add_product(self.dweight, dz, h, rounded=True)  # once a chunk; the chunks are summed in fp32
        if self.dbias is not None:
            self.dbias += dz.sum(0, dtype=self.dbias.dtype)

    def _sum_over_ranks(self, dh: Tensor, group: ProcessGroup | None) -> Tensor:
        if group is None:
            return dh
        dh = dh.to(local.accumulation_dtype(dh.dtype))
        if self.call.parts == 1:
            dist.all_reduce(dh, group=group)
            return dh
        mine = dh.new_empty((dh.shape[0] // self.call.parts, dh.shape[1]))
        reduce_scatter_single(mine, dh, group=group)
        return mine
