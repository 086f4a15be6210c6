"""The rows as a page of Markdown, with what was measured beside what is expected."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu_model.cases import Row
from benchmarks.gpu_model.devices import CLONE, L2_LATENCY, LATENCY, LAUNCH_GAP, Device
from benchmarks.gpu_model.prediction import OVERLAP
from benchmarks.harness import results

_HEAD = """# What the GPU kernels should reach

{measurements} This is what the compiled code needs, set against what GPUs offer: made by
`python -m benchmarks.gpu_model --json FILE --table docs/gpu/model.md`, which takes a quarter of an hour of one core and
no GPU. The PTX of every launch runs in the executor of the tests (a sample of its programs), which counts trips of
loops, bytes, sectors and barriers; registers and machine instructions are those of ptxas for the GPU. What the kernels
may need at most is held by `tests/benchmarks/test_gpu_model.py`. Attention is bound by its matmuls: at the end stands
how full its launches keep a GPU. The linear loss is a matmul of torch's and is not here.

- **Share**, below each GPU: the expected speed against `torch.clone` moving the least bytes that the op must move, and
  what limits it: bytes; issue (of instructions); special (functions: exponentials, reciprocals); L2 (what is asked of
  it); latency (loads that wait for each other with too few programs beside them); waves (multiprocessors without work).
- **Bytes**: moved by memory against the least. **Instructions**: machine instructions an element, loops weighted by
  trips; **issue**: the share of an {device}'s issue slots that they take at the speed of a clone.
- **Registers, programs, waves, busy, barriers** are of the launch that takes longest: registers a thread, programs a
  multiprocessor, rounds of them, the share of that time in which multiprocessors have work (on an {device}), and
  barriers an iteration of the main loop. **Sectors**: moved per warp against the least that could hold its bytes.
  **Narrow**: share of the bytes that moves in less than 128 bits a thread.
- **Lost to**, where an op is below {enough:.0%} of a clone: what takes the largest part of the difference. Bytes beyond
  the least; what runs beside them and does not hide (issue, special, L2, latency); multiprocessors without work
  (waves); sums of columns that the last programs of a launch add; gaps between an op's own launches.

Assumed: a clone reaches {clone:.1%} of the specified bandwidth (measured for an H100 by quack); a load takes
{latency:.0f} ns under load, {l2_latency:.0f} from L2; between an op's launches lie {gap:.0f} us; all programs of a
launch take as long. Memory and multiprocessors do not hide each other wholly: a launch takes the root {overlap:.0f} of
the sum of the powers {overlap:.0f} of the two times, which fits what an H100 measured best: 20 shares of forwards and
backwards are off by 3 points on average (there, backwards with column sums took a second launch still). What the GPUs
offer, with sources: `benchmarks/gpu_model/devices.json`. What a clone is limited by itself, as the host's launch is, is
not in a share.
"""
_NOT_MEASURED = "**Nothing on this page was measured on a GPU.**"
_MEASURED = "**Nothing on this page was measured on a GPU but what says so.**"
# Below this share of a clone a row says why.
ENOUGH = 0.85
_LIFTS = {
    "bytes": "rows that stay on chip between their two uses",
    "issue": "fewer instructions an element",
    "special": "exponentials by multiply-add",
    "L2": "operands that are asked for once",
    "latency": "more loads under way: smaller programs, or copies that run ahead",
    "waves": "programs that divide evenly among multiprocessors: it is the last round that is not full",
    "sums": "larger tensors: it takes as long whatever their size",
    "launches": "one launch",
}
# Reasons of a case beside its largest loss.
_WIDE_SUMS = "sums of 65,536 columns leave no room for a row: two passes; no model has such rows"
_WIDE_ROWS = "rows of 65,536 in bf16, twice 128 KiB, are read twice"
_REASONS: dict[tuple[str, ...], str] = {
    ("route", "forward"): "it moves 5 MB: in a clone's time fit some 18 instructions a logit, and softmax, sigmoid and "
    "sums alone take 30; before threads sorted their keys it took 158, now 91 (256 experts), or 121, now 77",
    ("route", "backward"): "scattered stores of 8 elements a token; as small beside its layer",
    ("layer_norm", "backward", "512x1x65536"): _WIDE_SUMS,
    ("rms_norm", "backward", "512x1x65536"): _WIDE_SUMS,
    ("scaled_causal_softmax", "backward", "1x4x2048x65536"): _WIDE_ROWS,
    ("scaled_masked_softmax", "forward", "1x4x2048x65536"): "the mask beside rows of 128 KiB: one program fits",
    ("scaled_masked_softmax", "backward", "1x4x2048x65536"): _WIDE_ROWS,
}
_COLUMNS = (
    "bytes", "instructions", "issue", "registers", "programs", "waves", "busy", "barriers", "sectors", "narrow",
)  # fmt: skip


def _rows_measured(folder: Path) -> Iterator[results.Row]:
    """The measurements of ops in a folder, where tables of other benchmarks lie, too."""
    for path in sorted(folder.glob("*.csv")):
        with path.open() as file:
            if "percent_of_clone" in file.readline():
                yield from results.read(path)


def measured(folder: Path) -> dict[tuple[str, ...], float]:
    """Share of clone of each measurement on a GPU of the model, by the key of its row."""
    found: dict[tuple[str, ...], float] = {}
    for row in _rows_measured(folder):
        device = _device_of(row.device)
        if row.percent_of_clone is not None and device is not None:
            op = row.op if row.provider == "parallel_ops" else f"{row.op}.{row.provider}"
            found[op, row.direction, row.shape, row.dtype, device] = row.percent_of_clone / 100
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
    measurements = {key: share for key, share in measurements.items() if key in {row.key for row in rows}}
    said = _MEASURED if measurements else _NOT_MEASURED
    text = [
        _HEAD.format(
            measurements=said, clone=CLONE, latency=1e9 * LATENCY, l2_latency=1e9 * L2_LATENCY, gap=1e6 * LAUNCH_GAP,
            overlap=OVERLAP, device=main, enough=ENOUGH,
        )
    ]  # fmt: skip
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
    """A line for each case: what it loses, and what would lift it."""
    lines = ["| case | share | lost to, in shares of its time | what would lift it |", "|---|---|---|---|"]
    for row in rows:
        if row.share < ENOUGH:
            causes = sorted(row.lost.items(), key=lambda cause: -cause[1])
            lost = ", ".join(f"{name} {share:.0%}" for name, share in causes if share >= 0.02)
            reason = _REASONS.get((row.op, row.direction, row.shape)) or _REASONS.get((row.op, row.direction))
            lift = _LIFTS[causes[0][0]] + (f". {reason[0].upper()}{reason[1:]}" if reason else "")
            lines.append(f"| {row.op} {row.direction} {_size(row)} | {row.share:.0%} | {lost} | {lift} |")
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
