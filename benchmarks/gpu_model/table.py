"""The rows as a page of Markdown, with what was measured beside what is expected."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks import results
from benchmarks.gpu_model.cases import Row
from benchmarks.gpu_model.devices import CLONE, LATENCY, Device

_HEAD = """# What the GPU kernels should reach

{measurements} This is what the compiled code needs, set against what GPUs offer: made by
`python -m benchmarks.gpu_model --json FILE --table docs/gpu_model.md`, which takes a quarter of an hour of one core and
no GPU. The PTX of every launch runs in the executor of the tests (a sample of its programs), which counts trips of
loops, bytes, sectors and barriers; registers and machine instructions are those of ptxas for the GPU. What the kernels
may need at most is held by `tests/benchmarks/test_gpu_model.py`. `flash_attention` and the linear loss are not among
the ops, being bound by products: how full the former keeps a GPU stands at the end, and
`tests/kernels/attention/test_flash_attention.py` holds its instructions a score.

- **Share**, below each GPU: the expected speed against `torch.clone` moving the least bytes that the op must move, and
  what limits it: bytes; issue (of instructions); special (functions: exponentials, reciprocals); L2 (what is asked of
  it); latency (loads that wait for each other with too few programs beside them); waves (multiprocessors without work).
- **Bytes**: moved by memory against the least. **Instructions**: machine instructions an element, loops weighted by
  trips; **issue**: the share of an {device}'s issue slots that they take at the speed of a clone.
- **Registers, programs, waves, busy, barriers** are of the launch that takes longest: registers a thread, programs a
  multiprocessor, rounds of them, the share of that time in which multiprocessors have work (on an {device}), and
  barriers an iteration of the main loop. **Sectors**: moved per warp against the least that could hold its bytes.
  **Narrow**: share of the bytes that moves in less than 128 bits a thread.
- `full` is forward and backward together: `in_forward` is the loss that makes its gradient in the forward, which moves
  two thirds of what the two apart must.

Assumed: a clone reaches {clone:.1%} of the specified bandwidth (measured for an H100 by quack), a load takes
{latency:.0f} ns under load, all programs of a launch take as long. What the GPUs offer, with sources:
`benchmarks/gpu_model/devices.json`. What a clone is limited by itself, as launching is, is not in a share.
"""
_NOT_MEASURED = "**Nothing on this page was measured on a GPU.**"
_MEASURED = "**Nothing on this page was measured on a GPU but what says so.**"
_COLUMNS = (
    "bytes", "instructions", "issue", "registers", "programs", "waves", "busy", "barriers", "sectors", "narrow",
)  # fmt: skip


def measured(folder: Path) -> dict[tuple[str, ...], float]:
    """Share of clone of each measurement on a GPU of the model, by the key of its row."""
    found: dict[tuple[str, ...], float] = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open() as file:
            if "percent_of_clone" not in file.readline():  # tables of other benchmarks stand beside
                continue
        for row in results.read(path):
            device = _device(row.device)
            if row.percent_of_clone is not None and device is not None:
                op = row.op if row.provider == "parallel_ops" else f"{row.op}.{row.provider}"
                found[op, row.direction, row.shape, row.dtype, device] = row.percent_of_clone / 100
    return found


def _device(name: str) -> str | None:
    """The GPU of the model that calls itself ``name``, in lower case with dashes."""
    for part, device in (("a100", "A100"), ("h200", "H200"), ("b200", "B200"), ("h100-pcie", "H100 PCIe")):
        if part in name:
            return device
    return "H100 SXM" if "h100" in name else None


def page(rows: Sequence[Row], devices: Sequence[Device], measurements: dict[tuple[str, ...], float]) -> str:
    names = [d.name for d in devices]
    main = "H200" if "H200" in names else names[0]
    measurements = {key: share for key, share in measurements.items() if key in {row.key for row in rows}}
    said = _MEASURED if measurements else _NOT_MEASURED
    text = [_HEAD.format(measurements=said, clone=CLONE, latency=1e9 * LATENCY, device=main)]
    text += [f"\n## What limits each op on an {main}\n", *_summary([row for row in rows if row.device == main])]
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
    return f"{row.share:.0%} {row.limit}" + (f", measured {real:.0%}" if real is not None else "")
