"""Results as data: one CSV file a device, one row a measurement, kept in git."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

# The providers, in the order in which tables and charts show them.
PROVIDERS = ("parallel_ops", "inplace", "eager", "compile", "torch", "liger", "cce", "clone")


@dataclass(frozen=True)
class Row:
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
    device: str
    driver: str
    threads: int
    torch: str
    triton: str
    version: str
    commit: str
    date: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.op, self.direction, self.shape, self.dtype, self.provider


_PARSERS: dict[str, Callable[[str], float | int]] = {
    **dict.fromkeys(
        ("ms_median", "ms_p25", "ms_p75", "gb_per_s", "percent_of_clone", "peak_mib", "overhead_us"), float
    ),
    **dict.fromkeys(("bytes", "threads"), int),
}


def read(path: Path) -> list[Row]:
    """The rows of a file; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [_row(row) for row in csv.DictReader(file)]


def merge(path: Path, rows: Sequence[Row]) -> list[Row]:
    """Writes ``rows`` into the file, in the place of older rows of the same key, and returns all that it holds."""
    merged = {row.key: row for row in [*read(path), *rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in merged.values():
            writer.writerow({name: _format(value) for name, value in asdict(row).items()})
    return list(merged.values())


def _format(value: object) -> object:
    return f"{value:.5g}" if isinstance(value, float) else "" if value is None else value


def _row(texts: dict[str, str]) -> Row:
    values: dict[str, Any] = dict(texts)
    for name, parse in _PARSERS.items():
        values[name] = parse(texts[name]) if texts[name] else None
    return Row(**values)
