"""Keeps host memory that a step frees for the next step.

By default glibc returns a large tensor's pages to the system when it is freed, and the next tensor of that size faults
in fresh pages, zeroed and cold. On a CPU that takes as long as a memory-bound op's arithmetic, and several times as
long on virtual machines whose host reclaims free pages. A training step allocates the same sizes again and again, so
the memory of the first step suffices for all.
"""

import ctypes

# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = -1


def keep_freed_memory() -> None:
    """Keeps freed memory in this process from now on, so resident memory stays at its peak. No effect without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
