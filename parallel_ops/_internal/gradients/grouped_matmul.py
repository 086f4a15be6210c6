"""Matmuls of groups of rows, each with a matrix of its own: the linears of a mixture of experts.

    multiply:          y[rows of g] = x[rows of g] W[g] + b[g]       [r, K], [n, K, N] to [r, N]
    outer_products:    G[g] = dz[rows of g]^T h[rows of g]           [r, N], [r, K] to [n, N, K]
    sums:              s[g] = sum of dz[rows of g]                   [r, N] to [n, N]

The rows of group g end at ``offs[g]`` and start where those of group g - 1 end. Rows past the last end belong to no
group: what is computed of them is 0.

On a CPU each group is one matmul of torch's. A batched matmul is at most a tenth faster (2026-11, EPYC, 64 groups of
64 rows by 512 x 1,024: bfloat16 34 and 32 ms, float32 67 and 60 ms), and needs groups of one size. On a GPU
``torch.nn.functional.grouped_mm`` computes all groups and the host never waits for ``offs``, where torch has a kernel:
for bfloat16 on compute capabilities 9 and 10. Elsewhere the host waits for ``offs`` once and starts a matmul a group.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_ops._internal.memory import empty_output

# torch's kernel takes one thread a group to prepare the matmuls.
MAX_GROUPS = 1023
_CAPABILITIES = (9, 10)
# There the kernel leaves what was in memory as the matmuls of groups without rows (pytorch/pytorch#172439).
_WITHOUT_EMPTY_GROUPS = 10


def multiply(x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[r, N]``, contiguous: each group of rows of x, ``[r, K]``, times its matrix of ``weight``, ``[n, K, N]``."""
    if _has_kernel(x, weight, offs):
        y = F.grouped_mm(_operand(x.contiguous()), _operand(weight), offs=offs.int())
        rows = torch.arange(len(y), dtype=offs.dtype, device=y.device)
        if bias is not None:
            y += bias[torch.searchsorted(offs, rows, right=True).clamp_(max=len(offs) - 1)]
        return y.masked_fill_((rows >= offs[-1])[:, None], 0)
    y, end = empty_output(x, (x.shape[0], weight.shape[2])), 0
    for group, start, end in groups(offs):
        if bias is None:
            torch.mm(x[start:end], weight[group], out=y[start:end])
        else:
            torch.addmm(bias[group], x[start:end], weight[group], out=y[start:end])
    y[end:].zero_()
    return y


def outer_products(dz: Tensor, h: Tensor, offs: Tensor) -> Tensor:
    """``[n, N, K]``: for each group its rows of ``dz``, ``[r, N]``, transposed, times those of ``h``, ``[r, K]``."""
    if _has_kernel(dz, h, offs):
        products = F.grouped_mm(_operand(dz.contiguous()).t(), _operand(h.contiguous()), offs=offs.int())
        if torch.cuda.get_device_capability(dz.device)[0] == _WITHOUT_EMPTY_GROUPS:
            products.masked_fill_((offs.diff(prepend=offs.new_zeros(1)) == 0)[:, None, None], 0)
        return products
    out, last = empty_output(dz, (len(offs), dz.shape[1], h.shape[1])), 0
    for group, start, end in groups(offs):
        out[last:group].zero_()
        torch.mm(dz[start:end].t(), h[start:end], out=out[group])
        last = group + 1
    out[last:].zero_()
    return out


def add_outer_products(
    total: Tensor, dz: Tensor, h: Tensor, offs: Tensor, add: Callable[[Tensor, Tensor, Tensor], object]
) -> None:
    """Adds ``outer_products`` to ``total``, ``[n, N, K]``; ``add`` adds the product of one group to its matrix.

    torch's kernel for GPUs rounds matmuls to the dtype of the factors before they are added.
    """
    if _has_kernel(dz, h, offs):
        total += outer_products(dz, h, offs)
        return
    for group, start, end in groups(offs):
        add(total[group], dz[start:end], h[start:end])


def sums(dz: Tensor, offs: Tensor) -> Tensor:
    """``[n, N]``: the sum of the rows of each group."""
    if _has_kernel(dz, dz, offs):  # a matmul with ones: sums in fp32 in a fixed order
        return outer_products(dz, dz.new_ones(dz.shape[0], 8), offs)[:, :, 0].contiguous()
    out = dz.new_zeros(len(offs), dz.shape[1])
    for group, start, end in groups(offs):
        torch.sum(dz[start:end], 0, out=out[group])
    return out


def check_ends(op: str, offs: Tensor, rows: int) -> None:
    """Raises ValueError unless ``offs``, on a CPU, ascend from 0 or more to ``rows`` or less."""
    before = 0
    for group, end in enumerate(offs.tolist()):
        if not before <= end <= rows:
            raise ValueError(
                f"{op}: offs must ascend and lie between 0 and the {rows} rows of x, but offs[{group}] is {end} after "
                f"{before}"
            )
        before = end


def one_kernel_for(device: torch.device, dtype: torch.dtype, sizes: Iterable[int], groups: int) -> bool:
    """Whether torch computes groups of a GPU in one kernel; where it does not, the host waits for ``offs``.

    Args:
        sizes: of rows and matrices, but for the number of rows. The kernel reads rows that start at multiples of 16
            bytes.
    """
    return (
        dtype is torch.bfloat16
        and torch.cuda.get_device_capability(device)[0] in _CAPABILITIES
        and groups <= MAX_GROUPS
        and all(size % 8 == 0 for size in sizes)
    )


def groups(offs: Tensor) -> Iterator[tuple[int, int, int]]:
    """(group, start, end) of the groups that have rows. On a GPU the host waits for ``offs``."""
    start = 0
    for group, end in enumerate(offs.tolist()):
        if end > start:
            yield group, start, end
            start = end


def _has_kernel(rows: Tensor, other: Tensor, offs: Tensor) -> bool:
    """Whether torch's grouped matmul runs on the GPU alone."""
    return (
        rows.is_cuda
        and min(rows.numel(), other.numel()) > 0
        and one_kernel_for(rows.device, rows.dtype, (rows.shape[1], *other.shape[1:]), len(offs))
    )


def _operand(t: Tensor) -> Tensor:
    """``t``, or a copy of it that torch's grouped matmul takes."""
    if t.data_ptr() % 16 == 0 and (t.is_contiguous() or t.mT.is_contiguous()):
        return t
    return t.clone(memory_format=torch.contiguous_format)
