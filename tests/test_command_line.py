"""What all command lines share: the one line that bad input gets, exit codes, missing packages."""

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_ops._internal import command_line

typer = pytest.importorskip("typer")


def app(command):
    made = typer.Typer(add_completion=False)
    made.command()(command)
    return made


def end(capsys, *arguments, **options):
    """Runs an app; returns exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as stop:
        command_line.run(*arguments, **options)
    return stop.value.code, *capsys.readouterr()


@pytest.mark.parametrize(("module", "extra"), [("planner", "plan"), ("train", "train")])
def test_what_is_missing_is_named(monkeypatch, capsys, module, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else object())
    with pytest.raises(SystemExit, match="2"):
        command_line.start(f"parallel_ops.{module}.cli", extra=extra)
    assert capsys.readouterr().err == f"error: needs rich; run: pip install 'parallel_ops[{extra}]'\n"


@pytest.mark.parametrize(
    ("blocked", "command", "message"),
    [
        ("pydantic", ["train", "run.toml"], "needs pydantic; run: pip install 'parallel_ops[train]'"),
        ("rich", ["train"], "needs rich; run: pip install 'parallel_ops[train]'"),
        ("typer", ["plan"], "needs typer; run: pip install 'parallel_ops[plan]'"),
    ],
)
def test_the_extra_that_is_missing(blocked, command, message):
    code = f"import sys; sys.modules[{blocked!r}] = None; sys.argv[1:] = {command}; "
    call = [sys.executable, "-c", code + "from parallel_ops.__main__ import main; main()"]
    ended = subprocess.run(call, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"error: {message}\n")


def test_usage_errors_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x", "--nope"])
    code, out, err = end(capsys, app(lambda: None), "x")
    assert (code, out) == (2, "")
    assert err == "error: No such option: --nope\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("two\nlines"), 2, "error: two lines\n"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), 2, "error: x.json: No such file or directory\n"),
        (OSError("short of space"), 2, "error: short of space\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (typer.Abort(), 130, "error: interrupted\n"),
        (typer.Exit(3), 3, ""),
        (SystemExit(4), 4, ""),
    ],
)
def test_what_a_command_raises(monkeypatch, capsys, error, code, message):
    def command():
        raise error

    monkeypatch.setattr("sys.argv", ["x"])
    assert end(capsys, app(command), "x", errors=(ValueError, OSError)) == (code, "", message)


def test_a_mistake_of_the_program_has_its_traceback(monkeypatch, capsys):
    def command():
        raise KeyError("x")

    monkeypatch.setattr("sys.argv", ["x"])
    with pytest.raises(KeyError):
        command_line.run(app(command), "x", errors=(ValueError,))


def test_success_is_0(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x"])
    assert end(capsys, app(lambda: "done"), "x") == (0, "", "")


def commands():
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    return typer.main.get_command(importlib.import_module("parallel_ops._commands").app).commands


def table():
    """The rows of docs/commands.md by command."""
    text = (Path(__file__).parents[1] / "docs" / "commands.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_the_table_of_commands():
    """It has every command, which of them print JSON, and which have a result for exit code 1."""
    found = commands()
    assert list(table()) == list(found)
    for name, (_, _, as_json, one) in table().items():
        options = {option for parameter in found[name].params for option in parameter.opts}
        assert ("--json" in options) == bool(as_json), name
        assert ("exit code 1" in found[name].help.lower() or "1 failed" in found[name].help) == bool(one), name


@pytest.mark.parametrize("name", table())
def test_help_has_an_example_that_is_a_command(name):
    command = commands()[name]
    (line,) = [line for line in command.help.splitlines() if line.startswith("Example: ")]
    _, program, given, *arguments = shlex.split(line)
    assert (program, given) == ("parallel-ops", name)
    command.make_context(name, list(arguments), resilient_parsing=False)  # raises where an option is not there


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ins"], ["inspect"]), (["train", "--dry"], ["--dry-run"]), (["plan", "--model", "llama3-4"], ["llama3-405b"]),
        (["config", "--format", "mega"], ["megatron"]), (["schedule", "--kind", "dual"], ["dualpipe-v"]),
    ],
    ids=str,
)  # fmt: skip
def test_shells_complete(words, expected):
    pytest.importorskip("rich")
    environment = {
        **os.environ, "_PARALLEL_OPS_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["parallel-ops", *words]),
        "COMP_CWORD": str(len(words)),
    }  # fmt: skip
    code = "import sys; sys.argv = ['parallel-ops']; from parallel_ops.__main__ import main; main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, expected, "")


def test_nothing_spins_but_on_a_terminal(capsys):
    with command_line.waiting(lambda: "here"):
        pass
    assert capsys.readouterr() == ("", "")
    ours, theirs = os.openpty()
    code = "from parallel_ops._internal.command_line import waiting\nwith waiting(lambda: 'at work'): pass"
    subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True, env={**os.environ, "TERM": "xterm"})
    shown = os.read(ours, 10_000).decode()
    assert "at work" in shown and "\x1b[?25l" not in shown  # the cursor stays
