"""Two things that make searches fast: hashes that are computed once per object, and no garbage collection meanwhile."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)
# With fewer young objects, walking over them once takes no longer than counting those of a process that froze many.
_MANY = 50_000


def hashed_once(cls: _Class) -> _Class:
    """Decorates a frozen dataclass so that an object computes its hash once.

    Models and clusters are part of the keys of caches that a search reads a million times, and have thirty fields.
    """
    compute: Callable[[Any], int] = vars(cls)["__hash__"]

    def __hash__(self: Any) -> int:
        try:
            found: int = self._hash
        except AttributeError:
            found = self.__dict__["_hash"] = compute(self)
        return found

    def __getstate__(self: Any) -> dict[str, Any]:
        # Hashes of strings differ between processes.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    # setattr, since mypy accepts no assignment to these of a class.
    setattr(cls, "__hash__", __hash__)  # noqa: B010
    setattr(cls, "__getstate__", __getstate__)  # noqa: B010
    return cls


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
