"""The rows as tables of Markdown, with what was measured beside what is expected."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_model.cases import Row
from benchmarks.gpu_model.devices import Device
from benchmarks.harness import results

# Below this share of a clone a row says why.
ENOUGH = 0.85
_COLUMNS = (
    "bytes", "instructions", "issue", "registers", "programs", "waves", "busy", "barriers", "sectors", "narrow",
)  # fmt: skip


def measured(folder: Path) -> dict[tuple[str, ...], float]:
    """Share of clone of each measurement on a GPU of the model, by the key of its row."""
    found: dict[tuple[str, ...], float] = {}
    # Tables of other benchmarks lie there, too.
    paths = [path for path in sorted(folder.glob("*.csv")) if "percent_of_clone" in path.read_text().partition("\n")[0]]
    for row in [row for path in paths for row in results.read(path)]:
        device = _device_of(row.device)
        if row.provider == "parallel_ops" and row.percent_of_clone is not None and device is not None:
            found[row.op, row.direction, row.shape, row.dtype, device] = row.percent_of_clone / 100
    return found


def _device_of(name: str) -> str | None:
    """The GPU of the model that calls itself ``name``, in lower case with dashes."""
    for part, device in (("a100", "A100"), ("h200", "H200"), ("b200", "B200"), ("h100-pcie", "H100 PCIe")):
        if part in name:
            return device
    return "H100 SXM" if "h100" in name else None


def page(rows: Sequence[Row], devices: Sequence[Device], measurements: dict[tuple[str, ...], float]) -> str:
    names = [d.name for d in devices]
    main = "H200" if "H200" in names else names[0]
    text: list[str] = []
    on_main = [row for row in rows if row.device == main]
    text += [f"\n## What limits each op on an {main}\n", *_summary(on_main)]
    text += [f"\n## Below {ENOUGH:.0%} of a clone on an {main}\n", *_below(on_main)]
    cases: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.key[:-1], {})[row.device] = row
    for op in dict.fromkeys(row.op for row in rows):
        columns = ["", *names, *_COLUMNS]
        text += [f"\n## {op}\n", "| " + " | ".join(columns) + " |", "|---|" + "---|" * (len(columns) - 1)]
        text += [_line(key, by_device, names, main, measurements) for key, by_device in cases.items() if key[0] == op]
    return "\n".join(text) + "\n"


def _summary(rows: Sequence[Row]) -> list[str]:
    """A line for each op and direction: what limits it at how many of the sizes, with the shares there."""
    lines = ["| op | direction | share | limited by |", "|---|---|---|---|"]
    for op, direction in dict.fromkeys((row.op, row.direction) for row in rows):
        some = [row for row in rows if (row.op, row.direction) == (op, direction)]
        limits = {limit: [row for row in some if row.limit == limit] for limit in dict.fromkeys(r.limit for r in some)}
        said = [
            limit if len(limits) == 1 else f"{limit}: {', '.join(_size(row) for row in by)}"
            for limit, by in limits.items()
        ]
        lines.append(f"| {op} | {direction} | {_range([row.share for row in some])} | {'; '.join(said)} |")
    return lines


def _below(rows: Sequence[Row]) -> list[str]:
    """A line for each case: what it loses."""
    lines = ["| case | share | lost to, in shares of its time |", "|---|---|---|"]
    for row in rows:
        if row.share < ENOUGH:
            causes = sorted(row.lost.items(), key=lambda cause: -cause[1])
            lost = ", ".join(f"{name} {share:.0%}" for name, share in causes if share >= 0.02)
            lines.append(f"| {row.op} {row.direction} {_size(row)} | {row.share:.0%} | {lost} |")
    return lines


def _size(row: Row) -> str:
    return row.shape if row.dtype == "bfloat16" else f"{row.shape} {row.dtype}"


def _range(shares: Sequence[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low} to {high}"


def _line(
    key: tuple[str, ...],
    by_device: dict[str, Row],
    names: Sequence[str],
    main: str,
    measurements: dict[tuple[str, ...], float],
) -> str:
    row = by_device.get(main) or next(iter(by_device.values()))
    shares = [_share(by_device.get(name), measurements) for name in names]
    facts = [
        f"{row.bytes_to_least:.2f}", f"{row.instructions:.1f}", f"{row.issue_share:.0%}", f"{row.registers}",
        f"{row.resident}", f"{row.waves:.1f}", f"{row.wave_efficiency:.0%}", f"{row.barriers:.0f}",
        f"{row.sectors_to_least:.2f}", f"{row.narrow:.0%}",
    ]  # fmt: skip
    return "| " + " | ".join([f"{key[1]} {key[2]} {key[3]}", *shares, *facts]) + " |"


def _share(row: Row | None, measurements: dict[tuple[str, ...], float]) -> str:
    if row is None:
        return ""
    real = measurements.get(row.key)
    lost = "" if row.share >= ENOUGH else f", lost to {max(row.lost, key=row.lost.__getitem__)}"
    return f"{row.share:.0%} {row.limit}{lost}" + (f", measured {real:.0%}" if real is not None else "")
