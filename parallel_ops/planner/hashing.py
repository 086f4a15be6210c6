"""Hashes of frozen dataclasses, computed once per object."""

from collections.abc import Callable
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


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
