"""A pause of the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# With fewer young objects, walking over them once takes no longer than counting those of a process that froze many.
_MANY = 50_000


@contextmanager
def without_collection() -> Iterator[None]:
    """Pauses the garbage collector, as a context or a decorator.

    Searches and schedules make hundreds of thousands of objects that they keep, and no cycles. The collector would walk
    over them again and again: a fifth of the time of a search, a third of that of a schedule. At the end they count as
    old, else the first allocation after it would walk over them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # A process that has frozen its objects keeps them so.
            if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
