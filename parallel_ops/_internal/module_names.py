"""Names of modules and parameters: by a pattern, and in a message."""

import fnmatch
from collections.abc import Iterable, Sequence


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


def some_of(names: Sequence[str], most: int = 4) -> str:
    """The first ``most`` names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")
