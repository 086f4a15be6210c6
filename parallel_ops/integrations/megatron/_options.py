"""Options that a newer version of Megatron-core gives."""

from collections.abc import Collection
from typing import Any


def given(options: dict[str, Any], known: Collection[str] = ()) -> bool:
    """Whether any of a newer version's options is set: those that are not ``known``."""
    return any(v is not None and v is not False for name, v in options.items() if name not in known)
