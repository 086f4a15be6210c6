"""What the layers check before data moves, and how an error of one rank reaches the others.

Between two collectives each rank works by itself. What goes wrong there goes wrong on that rank alone, while the others
wait in the next collective for it: so it is announced to them there, and they raise too.
"""

from contextlib import AbstractContextManager

from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm._agreement import announcing_failure
from parallel_ops.comm._group import group_name
from parallel_ops.ops._check import check_floating, check_same_device, check_same_dtype


def before(collective: str, group: ProcessGroup | None, x: object) -> AbstractContextManager[None]:
    """For work of this rank alone on ``x``, after which all ranks of ``group`` call ``collective``."""
    return announcing_failure(collective, group_name(collective, group), x)


def first_collective(sequence_parallel: bool) -> str:
    """Of a column-parallel linear and the row-parallel one after it."""
    return "all_gather_linear" if sequence_parallel else "reduce_from_group"


def last_collective(sequence_parallel: bool) -> str:
    """Of a row-parallel linear."""
    return "linear_reduce_scatter" if sequence_parallel else "reduce_from_group"


def check_input(layer: str, x: Tensor, weight: Tensor, form: str = "[s, ..., {}]") -> None:
    """``x`` is what ``weight``, whose last dimension it shares, can be applied to.

    Args:
        form: of x, for the error, with a place for its last dimension. The number of dimensions counts but for "...".
    """
    check_floating(layer, "x", x)
    width, dims = weight.shape[-1], len(form.split(","))
    if x.dim() == 0 or x.shape[-1] != width or ("..." not in form and x.dim() != dims):
        raise ValueError(f"{layer}: x must be {form.format(width)}, got {list(x.shape)}")
    check_same_device(layer, "x", x, "the weight", weight)
    check_same_dtype(layer, "x", x, "the weight", weight)
