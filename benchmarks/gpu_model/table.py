"""The rows as a page of Markdown, with what was measured beside what is expected."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks import results
from benchmarks.gpu_model.cases import Row
from benchmarks.gpu_model.devices import CLONE, LATENCY, Device

_HEAD = """# What the GPU kernels should reach

Made by `python -m benchmarks.gpu_model --json FILE --table docs/gpu_model.md` from the compiled code alone; no time in
it was measured unless it says so. The PTX of every launch runs in the executor of the tests (a sample of its programs),
which counts trips of loops, bytes, sectors and barriers; registers and machine instructions are those of ptxas for the
GPU.

- **Share**: the expected speed against `torch.clone` moving the least bytes that the op must move, and what limits it:
  bytes; instruction issue; special functions (exponentials, reciprocals); L2 (what is asked of it); latency (loads that
  wait for each other with too few programs beside them); waves (multiprocessors without work).
- **Bytes**: moved by memory against the least. **Instructions**: machine instructions an element, loops weighted by
  trips.
- **Registers, programs, waves, barriers** (an iteration of the main loop) are of the launch that takes longest;
  programs a multiprocessor and waves on an {device}. **Sectors**: moved per warp against the least that could hold its
  bytes. **Narrow**: share of the bytes that moves in less than 128 bits a thread.

Assumed: a clone reaches {clone:.1%} of the specified bandwidth (measured for an H100 by quack), a load takes
{latency:.0f} ns under load, all programs of a launch take as long. What the GPUs offer, with sources:
`benchmarks/gpu_model/devices.json`.
"""
_COLUMNS = ("bytes", "instructions", "registers", "programs", "waves", "barriers", "sectors", "narrow")


def measured(folder: Path) -> dict[tuple[str, ...], float]:
    """Share of clone of each measurement on a GPU of the model, by the key of its row."""
    found: dict[tuple[str, ...], float] = {}
    for path in sorted(folder.glob("*.csv")):
        if "overlap" in path.name:
            continue
        for row in results.read(path):
            device = _device(row.device)
            if row.provider == "parallel_ops" and row.percent_of_clone is not None and device is not None:
                found[row.op, row.direction, row.shape, row.dtype, device] = row.percent_of_clone / 100
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
    text = [_HEAD.format(clone=CLONE, latency=1e9 * LATENCY, device=main)]
    cases: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.key[:-1], {})[row.device] = row
    for op in dict.fromkeys(row.op for row in rows):
        text.append(f"\n## {op}\n")
        columns = [
            "",
            *names,
            "bytes",
            "instructions",
            "registers",
            "programs",
            "waves",
            "barriers",
            "sectors",
            "narrow",
        ]
        text.append("| " + " | ".join(columns) + " |")
        text.append("|---|" + "---|" * (len(columns) - 1))
        for key, by_device in cases.items():
            if key[0] == op:
                text.append(_line(key, by_device, names, main, measurements))
    return "\n".join(text) + "\n"


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
        f"{row.bytes_to_least:.2f}", f"{row.instructions:.1f}", f"{row.registers}", f"{row.resident}",
        f"{row.waves:.1f}", f"{row.barriers:.0f}", f"{row.sectors_to_least:.2f}", f"{row.narrow:.0%}",
    ]  # fmt: skip
    return "| " + " | ".join([f"{key[1]} {key[2]} {key[3]}", *shares, *facts]) + " |"


def _share(row: Row | None, measurements: dict[tuple[str, ...], float]) -> str:
    if row is None:
        return ""
    real = measurements.get(row.key)
    return f"{row.share:.0%} {row.limit}" + (f", measured {real:.0%}" if real is not None else "")
