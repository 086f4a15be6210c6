"""Models, GPUs and clusters by name. The JSON files in this folder have the figures, each with its source."""

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parallel_ops.planner.checks import unknown
from parallel_ops.planner.cluster import GPU, Cluster, Interconnect, Part, weakest
from parallel_ops.planner.model import TABLES, Model
from parallel_ops.planner.presets.figures import figures


def _figures(kind: str, name: str) -> dict[str, Any]:
    presets = figures(f"presets/{kind}s")["presets"]
    if name.lower() not in presets:
        raise unknown(kind, name, presets)
    return {field: entry["value"] for field, entry in presets[name.lower()].items()}


def gpus() -> tuple[str, ...]:
    """Names of all GPU presets."""
    return tuple(figures("presets/gpus")["presets"])


def models() -> tuple[str, ...]:
    """Names of all model presets."""
    return tuple(figures("presets/models")["presets"])


def clusters() -> tuple[str, ...]:
    """Names of all cluster presets: systems (a number of GPUs may follow, ``h100x512``) and whole clusters."""
    return tuple(figures("presets/clusters")["presets"])


def sources(kind: str, name: str) -> Mapping[str, str]:
    """The source of each figure of a preset; ``kind`` is ``"gpu"``, ``"model"`` or ``"cluster"``."""
    if kind not in ("gpu", "model", "cluster"):
        raise ValueError(f"sources: kind must be 'gpu', 'model' or 'cluster', got {kind!r}")
    _figures(kind, name)
    data = figures(f"presets/{kind}s")
    return {field: data["sources"][entry["source"]] for field, entry in data["presets"][name.lower()].items()}


@functools.cache
def gpu(name: str) -> GPU:
    """The GPU of this name.

    Raises:
        ValueError: unknown, with the nearest names.
    """
    return GPU(name=name.lower(), **_figures("gpu", name))


@functools.cache
def model(name: str) -> Model:
    """The model of this name, at its training sequence length.

    Raises:
        ValueError: unknown, with the nearest names.
    """
    found = _figures("model", name)
    tables = {field: kind(**found[field]) for field, kind in TABLES.items() if field in found}
    return Model(name=name.lower(), **{**found, **tables})


@functools.cache
def cluster(name: str) -> Cluster:
    """The cluster of this name: ``selene``, ``h100x512``, ``a100-80x64+h100x64`` (pipeline stages in that order).

    A system without a number of GPUs, such as ``h100``, is one node of it. A cluster of several kinds has the slowest
    link and the smallest node.

    Raises:
        ValueError: unknown, with the nearest names, or a number of GPUs that does not fill nodes.
    """
    kinds = [_one_kind(part.strip()) for part in name.split("+")]
    if len(kinds) == 1:
        return kinds[0]

    return replace(
        kinds[0],
        name=name.lower(),
        gpu=weakest([kind.gpu for kind in kinds]),
        gpus=sum(kind.gpus for kind in kinds),
        gpus_per_node=min(kind.gpus_per_node for kind in kinds),
        parts=tuple(Part(gpu=kind.gpu, gpus=kind.gpus) for kind in kinds),
        intra=min((kind.intra for kind in kinds), key=lambda link: link.bandwidth),
        inter=min((kind.inter for kind in kinds), key=lambda link: link.bandwidth),
    )


def _one_kind(name: str) -> Cluster:
    counted = re.fullmatch(r"(.+)x(\d+)", name)
    known = figures("presets/clusters")["presets"]
    system, count = (name, None) if name.lower() in known or counted is None else counted.groups()
    found = _figures("cluster", system)

    def link(side: str) -> Interconnect:
        return Interconnect(**{field: found.pop(f"{side}_{field}") for field in ("name", "latency", "bandwidth")})

    intra, inter = link("intra"), link("inter")
    found["gpus"] = int(count) if count else found.get("gpus", found["gpus_per_node"])
    # Jobs take as many of an NVLink domain's GPUs as are a power of two, or all.
    domain = found.pop("domain", 0)
    if domain and found["gpus"] % found["gpus_per_node"] and not found["gpus"] % domain:
        found["gpus_per_node"] = domain
    return Cluster(name=name.lower(), gpu=gpu(found.pop("gpu")), intra=intra, inter=inter, **found)
