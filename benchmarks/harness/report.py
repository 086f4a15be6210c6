"""Results for the terminal: a table an op and a summary over ops."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console

from benchmarks.harness import options
from benchmarks.harness.results import PROVIDERS, Row
from benchmarks.harness.spec import Shape

WAYS = ("replay", "inplace", "triton")  # other ways to call the op itself
_RIVALS = tuple(p for p in PROVIDERS if p not in ("parallel_ops", *WAYS, "clone"))

Group = dict[str, Row]  # the providers of one case


def groups(rows: Iterable[Row]) -> Iterator[Group]:
    found: dict[tuple[str, ...], Group] = {}
    for row in rows:
        found.setdefault(row.key[:-1], {})[row.provider] = row
    yield from found.values()


def speedup(group: Group, rival: str) -> float | None:
    """The time of ``rival`` over that of the op."""
    if rival not in group or "parallel_ops" not in group:
        return None
    return group[rival].ms_median / group["parallel_ops"].ms_median


def print_op(console: Console, rows: Sequence[Row], flops: Callable[[Shape, str], float] | None = None) -> None:
    """The table of one op: a section a shape and dtype, a line a direction."""
    present = {row.provider for row in rows}
    rivals = [p for p in _RIVALS if p in present]
    ways = [p for p in WAYS if p in present]
    times = [
        f"{name}\nms"
        for name in ("ours", *(p.replace("_", "\n").replace("inplace", "in\nplace") for p in ways), *rivals, "clone")
    ]
    names = [*times, "ours\nGB/s", "of\nclone", *(f"vs\n{p}" for p in rivals), "ours\nMiB", "eager\nMiB"]
    names += [] if flops is None else ["ours\nTFLOP/s"]
    table = options.table("", *names, title=rows[0].op)
    section = None
    for group in groups(rows):
        any_row = next(iter(group.values()))
        if section != (section := f"{any_row.dtype} {any_row.shape}"):
            table.add_section()
            table.add_row(section, style="bold")
        ours, eager = group.get("parallel_ops"), group.get("eager")
        table.add_row(
            f"  {any_row.direction}",
            *(_time(group.get(p)) for p in ("parallel_ops", *ways, *rivals, "clone")),
            _column(ours, "gb_per_s", ".1f"),
            _column(ours, "percent_of_clone", ".0f", "%"),
            *(_number(speedup(group, p), ".2f", "x") for p in rivals),
            _column(ours, "peak_mib", ".0f"),
            _column(eager, "peak_mib", ".0f"),
            *([] if flops is None else [_teraflops(ours, flops)]),
        )
    console.print(table)


def print_summary(console: Console, rows: Sequence[Row]) -> None:
    """Geometric means over the full direction of all ops, and the case that is farthest from clone."""
    full = [group for group in groups(rows) if next(iter(group.values())).direction == "full"]
    for dtype in dict.fromkeys(row.dtype for row in rows):
        means = []
        for rival in _RIVALS:
            of_dtype = [g for g in full if next(iter(g.values())).dtype == dtype]
            values = [s for g in of_dtype if (s := speedup(g, rival)) is not None]
            if values:
                cases = f"{len(values)} case{'' if len(values) == 1 else 's'}"
                means.append(f"{statistics.geometric_mean(values):.2f}x {rival} ({cases})")
        if means:
            console.print(f"{dtype}: forward and backward, geometric mean: {', '.join(means)}")
    rated = [(row.percent_of_clone, row) for row in rows if row.provider == "parallel_ops" and row.percent_of_clone]
    if rated:
        percent, row = min(rated, key=lambda pair: pair[0])
        console.print(f"farthest from clone: {percent:.0f}% ({row.op}, {row.direction}, {row.dtype}, {row.shape})")


def _time(row: Row | None) -> str:
    if row is None:
        return ""
    if row.overhead_us is not None:
        return f"{row.overhead_us:.0f}µs"
    return f"{row.ms_median:.3f}" if row.ms_median < 10 else f"{row.ms_median:.1f}"


def _teraflops(row: Row | None, flops: Callable[[Shape, str], float]) -> str:
    if row is None or row.bytes is None:
        return ""
    shape = tuple(map(int, row.shape.split("x")))
    return f"{flops(shape, row.direction) / row.ms_median / 1e9:.3g}"


def _column(row: Row | None, name: str, form: str, unit: str = "") -> str:
    return _number(None if row is None else getattr(row, name), form, unit)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
