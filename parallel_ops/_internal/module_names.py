"""Names of modules by a pattern."""

import fnmatch
from collections.abc import Iterable


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names that match a pattern such as ``"layers.*"``, part by part, in their order."""
    parts = pattern.split(".")
    return [
        name
        for name in names
        if name
        and name.count(".") == len(parts) - 1
        and all(fnmatch.fnmatchcase(own, part) for own, part in zip(name.split("."), parts, strict=True))
    ]
