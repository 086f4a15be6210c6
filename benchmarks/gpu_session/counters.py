"""``python -m benchmarks.gpu_session.counters FOLDER``: what limits four kernels, by the counters of ``ncu``.

Those of which a GPU fell furthest behind what the static model expects, and the slowest one of attention. Rows are in
counters.csv of the folder. Says so, and is done, where ``ncu`` is not there or may not read counters.
"""

import csv
import io
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks import ops
from parallel_ops import flash_attention

# Op, shape, and the kernel that is looked at, by what its name begins with.
CASES: dict[str, tuple[str, tuple[int, ...], str]] = {
    "bias_dropout_add forward": ("bias_dropout_add", (2048, 4, 4096), "_forward_kernel"),
    "cross_entropy statistics": ("vocab_parallel_cross_entropy", (8192, 32000), "_statistics_kernel"),
    "route forward": ("route", (8192, 256, 8), "_forward_kernel"),
    "attention dK and dV": ("flash_attention", (1, 8, 8192, 128, 1), "_keys_kernel"),
}
METRICS = {
    "time": "gpu__time_duration.sum",
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "tensor": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "special": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
_LIMIT = 40.0  # seconds of a kernel


def call(name: str, device: str) -> None:
    """Forward and backward of a case three times, the first of which compile."""
    op, shape, _ = CASES[name]
    benchmark = ops.every()[op]
    inputs = benchmark.build(shape if device == "cuda" else benchmark.tiny, torch.bfloat16, torch.device(device))
    leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    for _ in range(3):
        y = flash_attention(*inputs, backend="triton") if op == "flash_attention" and device == "cuda" else None
        y = benchmark.ours(*inputs) if y is None else y
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    if device == "cuda":
        torch.cuda.synchronize()


def command(ncu: str, name: str) -> list[str]:
    return [
        ncu, "--clock-control", "none", "--csv", "--page", "raw", "--metrics", ",".join(METRICS.values()),
        "--kernel-name", f"regex:^{CASES[name][2]}", "--launch-skip", "1", "--launch-count", "1",
        sys.executable, "-m", "benchmarks.gpu_session.counters", "--call", name,
    ]  # fmt: skip


def parsed(text: str) -> dict[str, str]:
    """Values with units by the names of ``METRICS``, of what ``ncu --csv --page raw`` prints."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None or len(lines) < first + 3:
        raise ValueError("ncu printed no table")
    names, units, values = csv.reader(io.StringIO("\n".join(lines[first : first + 3])))
    row = {name: f"{value} {unit}".strip() for name, unit, value in zip(names, units, values, strict=True)}
    return {short: row.get(metric, "") for short, metric in METRICS.items()}


def main(folder: str) -> int:
    ncu = shutil.which("ncu")
    if ncu is None:
        print("ncu is not there")
        return 0
    rows = []
    for name in CASES:
        try:
            ran = subprocess.run(command(ncu, name), check=False, capture_output=True, text=True, timeout=_LIMIT)
        except subprocess.TimeoutExpired:
            print(f"{name}: not done within {_LIMIT:.0f} s", flush=True)
            continue
        if "ERR_NVGPUCTRPERM" in ran.stdout + ran.stderr:
            print("ncu may not read the counters of this GPU")
            return 0
        try:
            found = parsed(ran.stdout)
        except ValueError as error:
            print(f"{name}: {error}: {(ran.stdout + ran.stderr)[-400:]}", flush=True)
            continue
        rows.append({"case": name, **found})
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found.items()), flush=True)
    if rows:
        with (Path(folder) / "counters.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return int(len(rows) < len(CASES))


if __name__ == "__main__":
    if sys.argv[1] == "--call":
        call(sys.argv[2], "cuda")
    else:
        sys.exit(main(sys.argv[1]))
