"""What all command lines share: the one line that bad input gets, exit codes, missing packages."""

import importlib
import subprocess
import sys

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
