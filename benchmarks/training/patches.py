"""A patch of another package, in force for a part of a program only.

Such patches rebind names of the package that they are for, for good and for every model. Beside a stock model that is
wrong, so what one changes is found by comparing, and bound for a while.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

_MISSING = object()


class Patch:
    """Names that ``apply()`` rebinds in the modules of ``package`` and in their classes, undone outside of ``with``.

    Modules that hold a replaced function or class under another name get the new one too, as if they had been loaded
    after the patch.
    """

    def __init__(self, package: str, apply: Callable[[], object]) -> None:
        before = [(owner, dict(vars(owner))) for owner in _owners(package)]
        apply()
        changes = [
            (owner, name, names.get(name, _MISSING), new)
            for owner, names in before
            for name, new in list(vars(owner).items())
            if callable(new) and names.get(name, _MISSING) is not new
        ]
        replaced = {id(old): new for _, _, old, new in changes if callable(old)}
        changes += [
            (owner, name, old, replaced[id(old)])
            for owner, names in before
            for name, old in names.items()
            if id(old) in replaced and vars(owner).get(name) is old
        ]
        self._changes = changes
        self.__exit__()

    def names(self) -> list[str]:
        return sorted(f"{getattr(owner, '__qualname__', owner.__name__)}.{name}" for owner, name, *_ in self._changes)

    def __enter__(self) -> "Patch":
        for owner, name, _, new in self._changes:
            setattr(owner, name, new)
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, old, _new in reversed(self._changes):
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def _owners(package: str) -> Iterator[Any]:
    """The loaded modules of a package and the classes that they define."""
    for name, module in list(sys.modules.items()):
        if module is not None and (name == package or name.startswith(f"{package}.")):
            yield module
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    yield value
