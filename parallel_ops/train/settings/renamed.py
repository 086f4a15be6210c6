"""Keys and values of settings that had other names: an error in a file, read silently from earlier checkpoints."""

import json
from typing import Any

# Old key: new key. Both as ``section.key``.
KEYS = {"model.reduction": "model.grad_reduce", "precision.fp8": "precision.linears"}
# New key: {old value: new value}.
VALUES: dict[str, dict[Any, Any]] = {
    "model.grad_reduce": {"exact": "fp32"},
    "parallel.cp_kind": {"all-to-all": "all_to_all"},
    "parallel.cuda_graph": {"true": "full", "false": "none"},
    "precision.linears": {"none": "bf16", "current": "fp8_rowwise"},
}


def hint(name: str, given: Any) -> str | None:
    """The error of an old key, with its value by its name of today; ``None`` for all other keys."""
    if (new := KEYS.get(name)) is None:
        return None
    value = VALUES.get(new, {}).get(given, given) if isinstance(given, str) else given
    return f"{name} is now {new}: {new.partition('.')[2]} = {json.dumps(value, default=str)}"


def current(sections: dict[str, Any]) -> dict[str, Any]:
    """Sections of settings that an earlier version has written, by the names of this one."""
    found: dict[str, Any] = {}
    for section, keys in sections.items():
        if not isinstance(keys, dict):
            found[section] = keys
            continue
        found[section] = {}
        for key, value in keys.items():
            new = KEYS.get(f"{section}.{key}", f"{section}.{key}")
            values = VALUES.get(new, {})
            found[section][new.partition(".")[2]] = values.get(value, value) if isinstance(value, str) else value
    return found


def current_plan(text: str) -> str:
    """``Plan.text`` of an earlier version, by the names of this one."""
    given = dict(field.split("=", 1) for field in text.split(",") if "=" in field)
    return ",".join(f"{key}={value}" for key, value in current({"parallel": given})["parallel"].items())
