"""Fields that a user gives as text, ``tp=8,zero=1``, converted to their types."""

import re
from collections.abc import Mapping
from typing import Any

from parallel_ops.planner.checks import unknown


def parse_fields(text: str, where: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a text such as ``tp=8,zero=1,layers_per_chunk=11:12``, converted to their types.

    Args:
        text: fields separated by commas.
        where: prefix of error messages.
        known: the allowed fields and their defaults, whose types values have.

    Raises:
        ValueError: a field is unknown (with the nearest names), is given twice, or has a value of the wrong type.
    """
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, value = parse_field(part, where, known)
        if name in found:
            raise ValueError(f"{where}: {name} is given twice")
        found[name] = value
    return found


def parse_field(part: str, where: str, known: Mapping[str, Any]) -> tuple[str, Any]:
    """``tp=8`` as a name and a value, converted to the field's type. Arguments and errors: see ``parse_fields``."""
    name, equals, value = (piece.strip() for piece in part.partition("="))
    if not equals:
        raise ValueError(f"{where} takes fields as name=value, separated by commas; got {part.strip()!r}")
    if name not in known:
        raise unknown(f"field of {where}", name, known)
    default = known[name]
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{where}: {name} must be true or false, got {value!r}")
        return name, value.lower() == "true"
    if isinstance(default, int):
        if not re.fullmatch(r"-?\d+", value):
            raise ValueError(f"{where}: {name} must be an integer, got {value!r}")
        return name, int(value)
    if isinstance(default, float):
        try:
            return name, float(value)
        except ValueError:
            raise ValueError(f"{where}: {name} must be a number, got {value!r}") from None
    if isinstance(default, tuple):
        if not re.fullmatch(r"\d+(:\d+)*", value):
            raise ValueError(f"{where}: {name} must be numbers separated by colons, got {value!r}")
        return name, tuple(map(int, value.split(":")))
    return name, value
