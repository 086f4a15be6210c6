"""Checks of fields, shared by the planner's dataclasses. Messages name class, field, value and what would be valid."""

import difflib
import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any


def check_count(owner: str, name: str, value: Any, at_least: int = 1) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless ``value`` is an integer of at least ``at_least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}: {name} must be an integer, got {value!r}")
    if value < at_least:
        raise ValueError(f"{owner}: {name} must be at least {at_least}, got {value}")


def check_counts(owner: Any, names: Iterable[str], at_least: int = 1) -> None:
    """``check_count`` of each named field."""
    for name in names:
        check_count(type(owner).__name__, name, getattr(owner, name), at_least)


def check_figures(owner: Any, names: Iterable[str], *, zero: bool = False) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless each named field is finite and positive (or 0 if ``zero``)."""
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{type(owner).__name__}: {name} must be a number, got {value!r}")
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            sign = "zero or more" if zero else "positive"
            raise ValueError(f"{type(owner).__name__}: {name} must be finite and {sign}, got {value}")


def check_flags(owner: Any) -> None:
    """Raises ``TypeError`` unless each field with a default of true or false is one of them: "false" counts as true."""
    for field in fields(owner):
        if isinstance(field.default, bool) and not isinstance(value := getattr(owner, field.name), bool):
            raise TypeError(f"{type(owner).__name__}: {field.name} must be true or false, got {value!r}")


def check_texts(owner: Any, names: Iterable[str]) -> None:
    """Raises ``TypeError`` unless each named field is a string."""
    for name in names:
        if not isinstance(value := getattr(owner, name), str):
            raise TypeError(f"{type(owner).__name__}: {name} must be a string, got {value!r}")


def check_choice(owner: Any, name: str, choices: Iterable[Any]) -> None:
    """Raises ``ValueError`` unless the field is one of ``choices``."""
    choices = tuple(choices)
    value = getattr(owner, name)
    if value not in choices:
        known = ", ".join(map(repr, choices))
        names = [choice for choice in choices if isinstance(choice, str)] if isinstance(value, str) else []
        near = difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.6) if names else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{type(owner).__name__}: {name} must be one of {known}, got {value!r}{hint}")


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a ``name`` that is not in ``known``, with the nearest ones."""
    known = sorted(known)
    part = [each for each in known if len(name) > 2 and name.lower() in each]
    near = list(dict.fromkeys([*part, *difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)]))[:3]
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known)}"
    return ValueError(f"unknown {kind} {name!r}; {hint}")
