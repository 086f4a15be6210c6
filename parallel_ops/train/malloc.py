"""Host memory that a step frees stays with the process, for the next step.

By default glibc gives a large tensor's pages back to the system as it is freed, and the next one of that size faults
fresh pages in, zeroed and cold: on a CPU that takes as long as a memory-bound op's arithmetic, and several times as
long on virtual machines whose host takes free pages away. A training step frees and asks for the same sizes again and
again, so what it once had is enough for all steps.
"""

import ctypes

# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = -1


def keep_freed_memory() -> None:
    """For this process, from now on; the resident memory stays at its peak. Without glibc nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
