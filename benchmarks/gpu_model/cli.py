"""The command line: ``python -m benchmarks.gpu_model``."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu_model import attention, table
from benchmarks.gpu_model.cases import DTYPES, SHAPES, Row, dtypes, rows
from benchmarks.gpu_model.devices import DEVICES
from benchmarks.harness import options
from parallel_ops._internal import command_line

_MARK = "<!-- What follows is written by benchmarks.gpu_model. -->"


def command(
    op: Annotated[list[str] | None, typer.Option(help="The ops; all by default. Repeatable.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Sizes such as 2048x4x4096, instead of the op's own.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bfloat16 or float32; by default float32 at one size. Repeatable.")
    ] = None,
    device: Annotated[list[str] | None, typer.Option(help="GPUs; all by default. Repeatable.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for the rows; those of the same cases are replaced.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--table", help="File for the tables of all rows, after what the file has above its mark."),
    ] = None,
    measured: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Folder of CSV files that were measured.")
    ] = options.RESULTS,
) -> None:
    """Prints the speed that kernels should reach on GPUs that need not be there, from their compiled code."""
    options.check("op", op, SHAPES)
    options.check("dtype", dtype, DTYPES)
    options.check("device", device, (d.name for d in DEVICES))
    for option, file in (("--json", json_file), ("--table", page)):
        if file:
            options.writable(option, file.parent)
    known_rows = _read(json_file) if json_file else {}
    measurements = table.measured(measured)
    for name in op or SHAPES:
        sizes = [_sizes(text, len(SHAPES[name][0])) for text in shape] if shape else SHAPES[name]
        for size in sizes:
            for kind in dtype or dtypes(name, size):
                for row in rows(name, size, kind, [d for d in DEVICES if d.name in (device or [d.name])]):
                    known_rows[row.key] = row
                    _show(row, measurements.get(row.key))
                if json_file:
                    json_file.write_text(json.dumps([dataclasses.asdict(r) for r in known_rows.values()], indent=1))
    if page:
        prose = page.read_text().partition(_MARK)[0] if page.exists() else ""
        tables = table.page(list(known_rows.values()), DEVICES, measurements)
        page.write_text(f"{prose}{_MARK}\n{tables}\n{attention.section(DEVICES)}")


def _sizes(text: str, count: int) -> tuple[int, ...]:
    found = text.split("x")
    if len(found) != count or not all(size.isdecimal() and int(size) for size in found):
        command_line.fail(f"--shape must be {count} sizes such as {'x'.join(['64'] * count)}, got {text!r}")
    return tuple(map(int, found))


app = options.single(command)


def main() -> None:
    """Runs the command line."""
    command_line.run(app, "python -m benchmarks.gpu_model", errors=(OSError, ValueError))


def _read(path: Path) -> dict[tuple[str, ...], Row]:
    found = [Row(**fields) for fields in json.loads(path.read_text())] if path.exists() else []
    return {row.key: row for row in found}


def _show(row: Row, real: float | None) -> None:
    typer.echo(
        f"{row.op} {row.direction} {row.shape} {row.dtype} {row.device}: "
        f"{row.share:.0%} of clone, limited by {row.limit}{'' if real is None else f', measured {real:.0%}'}; "
        f"bytes {row.bytes_to_least:.2f} of the least, {row.instructions:.1f} instructions an element "
        f"({row.issue_share:.0%} of issue), {row.registers} registers, {row.resident} programs a multiprocessor, "
        f"{row.waves:.1f} waves ({row.wave_efficiency:.0%}), {row.barriers:.0f} barriers, "
        f"sectors {row.sectors_to_least:.2f}, narrow {row.narrow:.0%}"
    )
