"""A link of set bandwidth on one GPU: a stream that is held up for as long as a transfer would take.

Two kernels of one thread block around whatever the stream does in between: the first notes the time, the second ends
when enough of it has passed. They occupy one multiprocessor's slot for one block, and no memory bandwidth.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


@triton.jit
def _note_time_kernel(start_ptr):
    tl.store(start_ptr, globaltimer())


# Not specialised: every length of chunk would otherwise compile anew.
@triton.jit(do_not_specialize=["nanoseconds"])
def _hold_kernel(start_ptr, nanoseconds: tl.int64):
    end = tl.load(start_ptr) + nanoseconds
    now = globaltimer()
    while now < end:
        now = globaltimer()


def note_time(start: Tensor) -> None:
    """``start``: int64, one element; nanoseconds of the GPU's clock."""
    _note_time_kernel[(1,)](start, num_warps=1)


def hold(start: Tensor, nanoseconds: int) -> None:
    """Ends ``nanoseconds`` after ``start``, or at once if they have passed."""
    _hold_kernel[(1,)](start, nanoseconds, num_warps=1)
