"""Results as data: one CSV file a device, one row a measurement, kept in git."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, get_args, get_type_hints

from benchmarks.harness.environment import Environment

# The providers, in the order in which tables show them.
PROVIDERS = (
    *("parallel_ops", "replay", "inplace", "triton", "eager", "compile", "torch", "liger", "cce"),
    *("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math", "flex", "window", "documents", "clone"),
)


@dataclass(frozen=True, kw_only=True)
class Row(Environment):
    """Times in milliseconds per call; ``None`` where a column does not apply.

    ``gb_per_s`` counts the bytes that the op must move, for every provider, however many it does move; for clone,
    those that it moves. ``percent_of_clone`` is the ratio of the two. ``peak_mib`` is measured for "full" alone and
    ``overhead_us`` for "overhead" alone.
    """

    op: str
    direction: str
    shape: str
    dtype: str
    provider: str
    ms_median: float
    ms_p25: float
    ms_p75: float
    gb_per_s: float | None
    percent_of_clone: float | None
    peak_mib: float | None
    overhead_us: float | None
    bytes: int | None

    @property
    def key(self) -> tuple[str, ...]:
        return self.op, self.direction, self.shape, self.dtype, self.provider


R = TypeVar("R", bound="Keyed")


class Keyed(Protocol):
    """A row of a table: a dataclass of texts and numbers, where some tell which measurement it is."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> tuple[str, ...]: ...


def read(path: Path) -> list[Row]:
    """The rows of a file; none if there is no such file."""
    return read_as(Row, path)


def read_as(kind: type[R], path: Path) -> list[R]:
    """The rows of a file, of another kind than ``Row``; none if there is no such file."""
    if not path.exists():
        return []
    parsers = {name: _parser(hint) for name, hint in get_type_hints(kind).items()}
    with path.open(newline="") as file:
        return [
            kind(**{name: parsers[name](text) if text else _empty(parsers[name]) for name, text in row.items()})
            for row in csv.DictReader(file)
        ]


def merge(path: Path, rows: Sequence[R]) -> list[R]:
    """Writes ``rows``, all of one kind, into the file, in the place of older rows of the same key; returns all rows."""
    kind = type(rows[0])
    merged = {row.key: row for row in [*read_as(kind, path), *rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns(kind), lineterminator="\n")
        writer.writeheader()
        for row in merged.values():
            writer.writerow({name: _format(getattr(row, name)) for name in columns(kind)})
    return list(merged.values())


def columns(kind: type[Keyed]) -> list[str]:
    """The columns of a table: what was measured first, then where and with what."""
    where = [f.name for f in fields(Environment)]
    return [f.name for f in fields(kind) if f.name not in where] + where


def _parser(hint: Any) -> Callable[[str], Any]:
    """``float`` for ``float | None``, and so on."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    parser: Callable[[str], Any] = kinds[0]
    return parser


def _empty(parser: Callable[[str], Any]) -> str | None:
    return "" if parser is str else None


def _format(value: object) -> object:
    return f"{value:.5g}" if isinstance(value, float) else "" if value is None else value
