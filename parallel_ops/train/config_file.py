"""Reads settings from a TOML file and changes to it, and formats their errors."""

import difflib
import json
import sys
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from parallel_ops._internal.files import read_toml
from parallel_ops.ops.float8_recipes import RECIPES
from parallel_ops.planner.field_text import parse_fields
from parallel_ops.planner.plan import PLAN_FIELDS
from parallel_ops.train.config import Settings
from parallel_ops.train.data.settings import SourceSettings
from parallel_ops.train.launch.settings import RunSettings
from parallel_ops.train.settings import renamed
from parallel_ops.train.settings.parallel import with_plan_in_sections
from parallel_ops.train.settings.section import Section
from parallel_ops.train.step.settings import GroupSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


# Keys that are lists of tables.
_TABLES: dict[tuple[str, ...], type[Section]] = {
    ("data", "sources"): SourceSettings,
    ("optimizer", "groups"): GroupSettings,
}


def read_settings(path: Path | str, changes: Iterable[str] = ()) -> Settings:
    """The settings of a TOML file.

    Args:
        changes: Changes of keys, such as ``"parallel.tp=2"``; see ``set_key``.

    Raises:
        OSError: From the file system. ValueError: The file and every invalid key, in one line.
    """
    return settings_of(with_changes(read_toml(path), changes), str(path))


def with_changes(data: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """A copy of nested mappings with changed values; see ``set_key``."""
    for change in changes:
        data = set_key(data, change)
    return dict(data)


def with_steps(data: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """A copy of nested mappings with another ``run.steps``; a shorter run keeps the schedule of the longer one."""
    run, optimizer = data.get("run", {}), data.get("optimizer", {})
    before = run.get("steps", RunSettings().steps) if isinstance(run, Mapping) else None
    data = set_key(data, f"run.steps={steps}")
    given = not isinstance(optimizer, Mapping) or optimizer.get("schedule_steps", "none") != "none"
    if not isinstance(before, int) or before <= steps or given:
        return data
    return set_key(data, f"optimizer.schedule_steps={before}")


def settings_of(data: Mapping[str, Any], name: str = "Settings") -> Settings:
    """The settings of nested mappings; messages begin with ``name``.

    Raises:
        ValueError: Every invalid key, in one line.
    """
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{name}: {describe_errors(error)}") from None


def set_key(data: Mapping[str, Any], change: str) -> dict[str, Any]:
    """A copy of nested mappings with ``section.key=value``; ``parallel=dp=2,tp=2`` sets a whole section.

    The value is parsed as TOML, otherwise taken as a string, so ``checkpoint.dir=runs/a`` needs no quotes.

    Raises:
        ValueError: ``change`` has another form.
    """
    place, equals, text = change.partition("=")
    names = [name.strip() for name in place.split(".")]
    if not equals or not all(names) or len(names) > 2 or (len(names) == 1 and names != ["parallel"]):
        raise ValueError(f"--set takes section.key=value, got {change!r}")
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except ValueError:  # no TOML, or the lines of several keys
        value = text.strip()
    if len(names) == 2:
        return _with_key(data, names[0], names[1], value)
    plan = parse_fields(value, "parallel", PLAN_FIELDS) if isinstance(value, str) else value
    if not isinstance(plan, Mapping):
        return {**data, "parallel": plan}  # no section, which is an error later on
    data = {**data, "parallel": {}}
    for key, own in plan.items():
        data = _with_key(data, "parallel", key, own)
    return data


def _with_key(data: Mapping[str, Any], section: str, key: str, value: Any) -> dict[str, Any]:
    """A copy of nested mappings with another value of a key, in the place of any that the plan has of it."""
    if section in ("parallel", "precision", "recompute"):
        try:
            data = with_plan_in_sections(data)
        except ValidationError as error:
            raise ValueError(describe_errors(error)) from None
    if section == "parallel" and key == "dtype":  # that of matmuls
        is_float8 = isinstance(value, str) and value in RECIPES
        data = _with_key(data, "precision", "linears", value if is_float8 else "bf16")
        section, value = "precision", "bf16" if is_float8 else value
    if section == "parallel" and key == "recompute":
        section, key = "recompute", "kind"
    own = data.get(section, {})
    if not isinstance(own, Mapping):
        raise ValueError(f"--set: {section} is no section, but {own!r}")
    return {**data, section: {**own, key: value}}


def describe_errors(error: ValidationError) -> str:
    """The errors of all keys in one line."""
    return "; ".join(dict.fromkeys(_describe(found) for found in error.errors(include_url=False)))


def _describe(found: Any) -> str:
    place = [str(part) for part in found["loc"] if part != "function-after"]
    name = ".".join(place)
    if (error := renamed.hint(name, found["input"])) is not None:
        return error
    if found["type"] == "extra_forbidden":
        known = _known(place[:-1])
        near = difflib.get_close_matches(place[-1].lower(), known, n=3, cutoff=0.5)
        hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known)}"
        return f"unknown key {name}; {hint}"
    if found["type"] == "missing":
        return f"{name} is missing"
    message = found["msg"]
    if found["type"] == "parallel_ops":
        return f"{name} {message}" if len(place) > 1 else str(message)
    if found["type"] == "tuple_type":
        return f"{name}: must be a list: {place[-1]} = {json.dumps([found['input']], default=str)}"
    given = "" if isinstance(found["input"], dict) else f", got {found['input']!r}"
    return f"{name}: {message[:1].lower()}{message[1:]}{given}"


def _known(place: list[str]) -> list[str]:
    """The keys of a section, or the sections."""
    if not place:
        return list(Settings.model_fields)
    if tuple(place[:2]) in _TABLES:
        return list(_TABLES[tuple(place[:2])].model_fields)
    annotation = Settings.model_fields[place[0]].annotation
    kinds = typing.get_args(annotation) or (annotation,)  # [lora] may be left out
    known = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
    names = [] if known is None else list(known.model_fields)
    return [*names, "dtype", "recompute"] if place[0] == "parallel" else names
