"""Training software of several years: what it overlaps, how good its kernels are, what its host does.

An era is the software of one system at one time. Eras share parts: a set of kernels (``kernels``), and what a runtime
overlaps and costs on the host (``runtimes``), so that a constant belongs to what causes it and not to one published
table. The figures and their sources are in ``presets/software.json``; constants that neither part has are those of the
GPU's generation (``presets/efficiency.json``).
"""

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from parallel_ops.planner.checks import unknown
from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.efficiency import Efficiency, generation_constants
from parallel_ops.planner.presets.figures import figures

Parts = dict[str, dict[str, dict[str, float]]]

# The fewest published tables that carry a constant; with fewer it is a range, and so are the estimates that use it.
FEWEST_TABLES = 3
# The default: what runs today.
CURRENT = "megatron-bridge-2026"


@dataclass(frozen=True, kw_only=True)
class Software:
    """One era.

    Attributes:
        name: ``"megatron-bridge-2025"``.
        about: what it stands for, in one line.
        kernels, runtime: names of its parts; a runtime may be several joined by ``+``, of which later ones have what
            differs.
    """

    name: str
    about: str
    kernels: str
    runtime: str

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all parts, in the order in which their constants apply."""
        return (self.kernels, *self.runtime.split("+"))


def eras() -> tuple[str, ...]:
    """Names of all eras."""
    return tuple(figures("presets/software")["eras"])


def era(name: str) -> Software:
    """The era of this name.

    Raises:
        ValueError: unknown, with the nearest names.
    """
    known = figures("presets/software")["eras"]
    if name not in known:
        raise unknown("software", name, known)
    return Software(name=name, **known[name])


@functools.cache
def efficiency(generation: str, software: str = CURRENT, gpu: str = "") -> Efficiency:
    """The constants of a GPU generation, and of the GPU of that name, with the software of an era.

    A generation without measured constants gets those of the nearest one, with a warning.

    Raises:
        ValueError: ``software`` is unknown, with the nearest names.
    """
    return with_parts(generation, era(software), parts(), gpu=gpu)


@functools.cache
def constants_of(cluster: Cluster, software: str = CURRENT) -> Efficiency:
    """The constants of a cluster: those that were measured on it, and of the others those of its GPU's generation with
    the software of an era.

    Raises:
        ValueError, TypeError: a measured constant is unknown or out of range, or ``software`` is unknown.
    """
    if not cluster.constants:
        return efficiency(cluster.gpu.generation, software, cluster.gpu.name)
    known = {field.name for field in fields(Efficiency)}
    for name, _ in cluster.constants:
        if name not in known:
            raise unknown("constant of Cluster", name, known)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a generation without constants
        found = efficiency.__wrapped__(cluster.gpu.generation, software, cluster.gpu.name)
    return replace(found, **dict(cluster.constants))


def parts() -> Parts:
    """Values of the constants of each part by generation or GPU ("all" for every one)."""
    data = figures("presets/software")
    return {
        name: {generation: {key: entry["value"] for key, entry in found.items()} for generation, found in part.items()}
        for kind in ("kernels", "runtimes")
        for name, part in data[kind].items()
    }


class Fitted(NamedTuple):
    """A fitted constant.

    Attributes:
        name: ``"transformer-engine/hopper/fp8"``.
        value: as shipped.
        low, high: its values in fits that leave out one table each; at least 10 % around a value of few tables.
        tables: the tables whose errors it moves, of those that it was fitted to.
        effect: the change of a step by a change of the constant, both relative, of the row that it moves most.
    """

    name: str
    value: float
    low: float
    high: float
    tables: tuple[str, ...]
    effect: float

    @property
    def half_width(self) -> float:
        """Relative half-width of a step over its range if fewer tables than ``FEWEST_TABLES`` carry it, else 0."""
        if len(self.tables) >= FEWEST_TABLES:
            return 0.0
        return self.effect * (self.high - self.low) / (self.high + self.low)


@functools.cache
def fitted_constants() -> tuple[Fitted, ...]:
    """All constants of software that were fitted to published runs."""
    data = figures("presets/software")
    return tuple(
        Fitted(
            name=f"{part}/{key}/{name}",
            value=entry["value"],
            low=min(entry["range"]),
            high=max(entry["range"]),
            tables=tuple(entry["tables"]),
            effect=entry["effect"],
        )
        for kind in ("kernels", "runtimes")
        for part, keys in data[kind].items()
        for key, entries in keys.items()
        for name, entry in entries.items()
        if entry["source"] == "fit"
    )


@functools.cache
def uncertainty(generation: str, gpu: str, software: str) -> float:
    """The largest relative half-width of a step over the ranges of the constants that few tables carry."""
    used = {f"{part}/{key}" for part in era(software).parts for key in ("all", generation, gpu)}
    found = (each.half_width for each in fitted_constants() if each.name.rpartition("/")[0] in used)
    return max(found, default=0.0)


@functools.cache
def measured_kernels(kernels: str, generation: str) -> str:
    """``kernels`` if it has constants for a GPU generation, else ``"eager"``, whose constants are then used."""
    found = figures("presets/software")["kernels"][kernels]
    return kernels if generation in found or "all" in found else "eager"


def with_parts(
    generation: str, software: Software, values: Parts, changed: Mapping[str, float] | None = None, *, gpu: str = ""
) -> Efficiency:
    """``efficiency`` with given values of the parts. ``changed``: constants of the generation that differ."""
    known, near = generation_constants(generation)
    found = {**known, **(changed or {})}
    for part in software.parts:
        for key in ("all", near, generation, gpu):
            found.update(values[part].get(key, {}))
    if near != generation and not {generation, "all"} & set(values[software.kernels]):
        warnings.warn(
            f"no measured efficiencies of {generation} GPUs: those of {near} are used, step times may be far off",
            stacklevel=3,
        )
    return Efficiency(**found)
