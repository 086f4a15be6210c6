"""What all command lines share: the one line that bad input gets, exit codes, missing packages."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest

from parallel_ops.__main__ import COMMANDS
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


OPTIONAL = ("matplotlib", "numpy", "pydantic", "rich", "typer")


def without(blocked, *arguments, module="parallel_ops.__main__"):
    """Runs a command line in a process that cannot import ``blocked``: exit code, stdout, stderr."""
    code = f"import sys; sys.modules.update(dict.fromkeys({list(blocked)})); sys.argv = ['x', *{list(arguments)}]; "
    call = [sys.executable, "-c", f"{code}from {module} import main; main()"]
    ended = subprocess.run(call, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("blocked", "command", "packages"),
    [
        (["pydantic"], ["train", "run.toml"], "pydantic"),
        (["rich"], ["train"], "rich"),
        (["typer", "rich"], ["plan"], "typer rich"),
        (["rich"], ["schedule", "--help"], "rich"),
        (["pydantic", "numpy"], ["inspect", "runs"], "numpy pydantic"),
        (["numpy"], ["tokenize", "text", "x.bin", "--tokenizer", "t.json"], "numpy"),
        (["numpy"], ["train", "run.toml"], "numpy"),
        (["matplotlib"], ["schedule", "--pp", "2", "--micro-batches", "2", "--output", "x.svg"], "matplotlib"),
    ],
    ids=str,
)
def test_a_missing_package_is_named_as_the_index_has_it(tmp_path, monkeypatch, blocked, command, packages):
    monkeypatch.chdir(tmp_path)
    code, out, err = without(blocked, *command)
    assert (code, out) == (2, "")
    assert err == f"error: needs {packages.replace(' ', ', ')}; run: pip install {packages}\n"
    assert not list(tmp_path.iterdir())


def test_the_program_introduces_itself_with_torch_alone():
    version = f"parallel-ops {importlib.import_module('parallel_ops').__version__}\n"
    assert without(OPTIONAL, "--version") == (0, version, "")
    code, out, err = without(OPTIONAL)
    assert (code, err) == (0, "") and without(OPTIONAL, "--help") == (0, out, "")
    assert all(f"  {name} " in out for name in table()) and "pip install typer rich" in out


def test_a_bare_command_is_its_help():
    bare, asked = without([]), without([], "--help")
    assert bare == asked and bare[0] == 0 and "--version" in bare[1] and bare[2] == ""
    assert without([], "--version")[:2] == without(OPTIONAL, "--version")[:2]


@pytest.mark.parametrize(
    "command",
    [["presets"], ["schedule", "--pp", "2", "--micro-batches", "2"], ["plan", "--model", "llama3-8b", "--help"]],
    ids=str,
)
def test_nothing_but_a_picture_needs_what_draws(command):
    code, out, err = without(["matplotlib", "numpy"], *command)
    assert (code, err) == (0, "") and out


def test_no_line_advises_to_install_this_package_by_name():
    """The name is nobody's on the index: whoever registers it would be installed."""
    root = Path(__file__).parents[1]
    files = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("[pbet]*/**/*.py"), *root.glob("examples/*")]
    files = [file for file in files if file.is_file() and file != Path(__file__)]
    assert len(files) > 500
    advice = re.compile(r"pip install[^\n`]*['\" ]parallel[_-]ops")
    joined = {file: re.sub(r'"\n\s*f?r?"', "", file.read_text(encoding="utf-8")) for file in files}
    assert not [str(file) for file, text in joined.items() if advice.search(text)]


def test_flags_are_shown_without_a_type():
    """As are those of programs with one command; options with a value keep their type."""

    def command(
        quick: Annotated[bool, typer.Option("--quick")] = False,
        colour: bool = True,
        size: int = 3,
    ) -> None:
        pass

    made = command_line._command(app(command))
    context = made.make_context("x", [])
    shown = {option: each.metavar for each in made.get_params(context) for option in each.opts}
    assert shown == {"--quick": "", "--colour": "", "--size": None, "--help": ""}
    for arguments in (["plan", "--help"], ["train", "--help"], ["--help"]):
        code, out, _ = without([], *arguments)
        assert code == 0 and "<bool>" not in out and "BOOLEAN" not in out
        assert arguments == ["--help"] or "<" in out or "TEXT" in out


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
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (typer.Abort(), 130, "interrupted\n"),
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
    assert list(table()) == list(found) == list(COMMANDS)
    for name, (_, _, as_json, one) in table().items():
        options = {option for parameter in found[name].params for option in parameter.opts}
        assert ("--json" in options) == bool(as_json), name
        assert ("exit code 1" in found[name].help.lower() or "1 failed" in found[name].help) == bool(one), name
        assert found[name].help.split("\n\n")[0].replace("\n", " ") == COMMANDS[name]


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
        (["estimate", "--for", "mega"], ["megatron"]), (["schedule", "--kind", "dual"], ["dualpipe-v"]),
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
