"""``python -m benchmarks.gpu_session.status [proofs.csv ...]``: writes docs/gpu/status.md.

Rows of a session that are named are first merged into ``benchmarks/results/gpu_proofs.csv``.
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.gpu_session.paths import PATHS, GpuPath
from benchmarks.gpu_session.prove import PASSED, Proven
from benchmarks.harness import results
from benchmarks.harness.environment import Environment

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
PROOFS = RESULTS / "gpu_proofs.csv"
PAGE = ROOT / "docs/gpu/status.md"
_HEAD = """# What has run on a GPU

Every path that a call can take on a GPU, written by `python -m benchmarks.gpu_session.status`. "Has run" names the
machine, the commit and the day of a session's row or measurement (`benchmarks/results/`); a dash says that no GPU has
run it. Every path that some call takes by default has run, or is a library's own code: a test holds this. The rest is
off until it is asked for.

No run over several GPUs has been made. `benchmarks/gpu_session.sh OUTPUT_FOLDER` runs all proofs on one GPU, those of
several ranks as processes that share it; they need NCCL 2.30 or later.
"""


def _run_of(row: Environment) -> str:
    return f"{row.device.replace('-', ' ')}, {row.commit}, {row.date}"


def runs(path: GpuPath, proven: Sequence[Proven], measured: Iterable[results.Row]) -> list[str]:
    """Machines that the path has run on: the newest row of each kind of record."""
    by_proof = [r for r in proven if r.result == PASSED and r.proof.startswith(path.proofs)]
    by_benchmark = [r for r in measured if path.benchmark and r.op == path.benchmark and r.provider == "parallel_ops"]
    newest = [max(rows, key=lambda r: r.date) for rows in (by_proof, by_benchmark) if rows]
    newest = [row for row in newest if row.date > path.since]
    return [*map(_run_of, newest[:1]), *([path.recorded] if path.recorded and not by_proof else [])]


def failures(path: GpuPath, proven: Sequence[Proven]) -> list[str]:
    failed = [r for r in proven if r.result != PASSED and r.proof.startswith(path.proofs)]
    return [f"{r.result.upper()}: {r.proof} ({_run_of(r)})" for r in failed]


def read() -> tuple[list[Proven], list[results.Row]]:
    """The rows of proofs, and the measurements made on GPUs."""
    measured = [row for path in sorted(RESULTS.glob("nvidia-*.csv")) for row in results.read(path)]
    return results.read_as(Proven, PROOFS), measured


def page() -> str:
    proven, measured = read()
    parts = [_HEAD]
    for area, paths in groupby(PATHS, key=lambda path: path.area):
        parts.append(f"\n## {area.capitalize()}\n")
        parts.append("| path | chosen by | default | code of | has run | other evidence |")
        parts.append("|---|---|---|---|---|---|")
        for path in paths:
            ran = "; ".join([*runs(path, proven, measured), *failures(path, proven)]) or "-"
            default = "yes" if path.default else "no"
            library = path.library or "this package"
            parts.append(f"| {path.name} | {path.chosen_by} | {default} | {library} | {ran} | {path.evidence or '-'} |")
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    for name in sys.argv[1:] if arguments is None else arguments:
        if rows := results.read_as(Proven, Path(name)):
            results.merge(PROOFS, rows)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
