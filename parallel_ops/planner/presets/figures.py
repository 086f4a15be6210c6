"""The JSON files of the package: presets, constants, published tables."""

import functools
import json
from importlib.resources import files
from typing import Any


@functools.cache
def figures(name: str) -> dict[str, Any]:
    """The content of ``name``, such as ``"presets/gpus"``."""
    text = files("parallel_ops.planner").joinpath(f"{name}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
