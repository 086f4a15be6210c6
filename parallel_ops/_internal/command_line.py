"""What the command lines share: ``parallel-ops``, ``python -m benchmarks.demo`` and ``python -m benchmarks``.

What a user got wrong is one line on stderr and exit code 2. Needs neither torch nor, until a command line runs, any of
the packages below.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

# Packages of every command line; of commands that read token files; of those that read the settings of a run; of those
# that always draw.
CONSOLE = ("typer", "rich")
TOKENS = (*CONSOLE, "numpy")
TRAIN = (*TOKENS, "pydantic") if sys.version_info >= (3, 11) else (*TOKENS, "pydantic", "tomli")
PICTURES = (*CONSOLE, "matplotlib")
INTERRUPTED = 130


def processors() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start(module: str, packages: Iterable[str]) -> None:
    """Calls ``main`` of ``module``, or names the packages that are missing."""
    require(*packages)
    importlib.import_module(module).main()


def missing(packages: Iterable[str]) -> list[str]:
    """The packages that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def require(*packages: str) -> None:
    """Ends the process with a line that names the packages that are missing, if there are some."""
    if absent := missing(packages):
        fail(f"needs {', '.join(absent)}; run: pip install {' '.join(absent)}")


def run(app: Any, prog_name: str, errors: tuple[type[Exception], ...] = ()) -> NoReturn:
    """Runs a ``typer.Typer`` and exits.

    Args:
        errors: exceptions of the commands that are the user's; others have a traceback.
    """
    try:
        code = _command(app)(prog_name=prog_name, standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as stop:
        # Typer and rich exit with 1 where the reader of a pipe has seen enough, as head does.
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, BrokenPipeError):
            raise
        # Nothing is left for the interpreter to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    except errors as error:
        fail(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        # Typer's usage errors and its Abort; which package defines these depends on its version.
        if type(error).__name__ == "Abort":
            code = INTERRUPTED
        elif (message := getattr(error, "format_message", None)) is not None:
            fail(message())
        else:
            raise
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _command(app: Any) -> Any:
    """The command or group of a ``typer.Typer``, whose help shows flags without a type: they take no value."""
    from typer.main import get_command

    def without_types(command: Any) -> None:
        given = command.get_params

        def params(context: Any) -> Any:
            found = given(context)
            for parameter in found:
                if getattr(parameter, "is_flag", False):
                    parameter.metavar = ""
            return found

        command.get_params = params
        for each in getattr(command, "commands", {}).values():
            without_types(each)

    found = get_command(app)
    without_types(found)
    return found


def fail(error: Exception | str, code: int = 2) -> NoReturn:
    """Ends the process with one line on stderr."""
    if isinstance(error, OSError) and error.strerror:
        error = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(code)


class _Unbroken:
    """A text stream whose errors are dropped; after a closed pipe it writes to ``os.devnull``."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        return not self._stream.closed and bool(self._stream.isatty())

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[..., Any], *arguments: Any) -> None:
        try:
            act(*arguments)
        except BrokenPipeError:
            # What is buffered is flushed again, at the latest when the process ends.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self._stream.fileno())
        except (OSError, ValueError):  # a full disk; a closed stream
            pass


@contextlib.contextmanager
def unbroken_output() -> Iterator[None]:
    """A block in which no reader of standard output and error is needed: what ``head`` does not read is dropped."""
    with contextlib.ExitStack() as stack:
        for name, redirect in (("stdout", contextlib.redirect_stdout), ("stderr", contextlib.redirect_stderr)):
            stream = getattr(sys, name)
            if stream is None:  # closed before the start
                stream = stack.enter_context(open(os.devnull, "w"))
            if not isinstance(stream, _Unbroken):
                stream = _Unbroken(stream)
            stack.enter_context(redirect(stream))
        yield


@contextlib.contextmanager
def bytes_bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar of bytes on a terminal; the block calls what it is given with bytes done, and all."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(None), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=max(total, 1))


def terminal_console(*, stderr: bool = False, margin: int = 0) -> Any:
    """A console that does not hide the cursor, which a killed process could not restore.

    Args:
        margin: columns at the end of a line that stay free.
    """
    from rich.console import Console, ConsoleDimensions

    class Terminal(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False

        @property  # type: ignore[misc]
        def size(self) -> ConsoleDimensions:
            width, height = super().size
            return ConsoleDimensions(max(1, width - margin), height)

    return Terminal(stderr=stderr)


@contextlib.contextmanager
def waiting(text: Callable[[], str]) -> Iterator[None]:
    """A spinner on a terminal, with what is being done now and for how long, until the block ends or prints a bar."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.progress import Progress, ProgressColumn, SpinnerColumn, TimeElapsedColumn
    from rich.text import Text

    class Now(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(text())

    console = terminal_console(stderr=True)
    with Progress(SpinnerColumn(), Now(), TimeElapsedColumn(), console=console, transient=True) as bar:
        bar.add_task("", total=None)
        yield
