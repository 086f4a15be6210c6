"""Options and output that the command lines have in common."""

import sys
import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.harness.timing import Stats
from parallel_ops._internal.command_line import fail

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")
RESULTS = Path(__file__).parents[1] / "results"

# Options of several commands.
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option(help="bfloat16 on a GPU, float32 on a CPU by default.")]
Links = Annotated[list[float] | None, typer.Option(min=1e-3, help="GB/s of the paced link; repeatable.")]
Output = Annotated[Path | None, typer.Option(help="Folder for the CSV file.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few rounds: a look, not a result.")]


def single(command: Callable[..., None]) -> typer.Typer:
    """A command line of one command."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    return app


def check(what: str, given: Iterable[str] | None, known: Iterable[str]) -> None:
    """Ends the process with a message if one of the names is not known."""
    known = list(known)
    for name in given or ():
        if name not in known:
            fail(f"unknown {what} {name!r}; choose from {', '.join(known)}")


def chosen_device(name: str) -> str:
    """``"cpu"`` or ``"cuda"`` for one of ``DEVICES``."""
    check("device", [name], DEVICES)
    if name == "cuda" and not torch.cuda.is_available():
        fail("no CUDA device is there; use --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def folder(output: Path | None, quick: bool) -> Path:
    """The folder of the rows: ``output``, or that of rows in git, or of rows that are no results. See ``writable``."""
    return writable("--output", output or RESULTS / ("quick" if quick else ""))


def writable(option: str, folder: Path) -> Path:
    """Makes the folder before anything is measured; ends the process with a message if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        fail(f"{option}: {folder} cannot be written: {error.strerror}")


def console(width: int = 120) -> Console:
    """A terminal, or lines of ``width`` in a file, where they may be long."""
    return Console() if sys.stdout.isatty() else Console(width=width)


def table(*columns: str, left: Collection[str] = (), title: str | None = None, caption: str | None = None) -> Table:
    """A table whose columns are right-justified, but for the first and those in ``left``."""
    made = Table(
        title=title, title_justify="left", title_style="bold", caption=caption, caption_justify="left", box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number == 0 or name in left else "right", no_wrap=True)
    return made


def milliseconds(stats: Stats) -> tuple[str, str]:
    """Median and quartiles as cells of a table."""
    return f"{stats.median * 1e3:.1f}", f"{stats.p25 * 1e3:.1f} to {stats.p75 * 1e3:.1f}"
