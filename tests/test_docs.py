"""Documentation names what is there: commands with their options and values, settings, files, targets, Python names."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import ops
from parallel_ops.planner.cli import inputs
from parallel_ops.planner.compute.software import era
from parallel_ops.planner.export import find_target
from parallel_ops.planner.schedules.schedule import KINDS

typer = pytest.importorskip("typer")
pytest.importorskip("pydantic")
tomllib = pytest.importorskip("tomllib")  # Python 3.11

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for pattern in ("*.md", "docs/**/*.md", ".github/*.md") for path in ROOT.glob(pattern))
PAGES = [path for path in PAGES if path.name != "CHANGELOG.md"]  # it names what has gone, too
PAGES += sorted(path for path in (ROOT / "examples").iterdir() if path.is_file())
PROGRAMS = ("parallel-ops", "python -m", "make", "pytest", "torchrun")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SECTIONS = "run|model|lora|data|evaluation|optimizer|parallel|precision|recompute|checkpoint|logging"
# Folders whose files are named by their path.
FOLDERS = {"parallel_ops", "triton_kernels", "csrc", "benchmarks", "tests", "docs", "examples"}
FOLDERS |= {".github", "build_backend"}


def code(text):
    """The lines of fenced and indented blocks, continued ones joined."""
    indented = re.findall(r"(?:(?<=\n\n)|\A)((?: {4}\S.*\n(?:\n(?= {4}))?)+)", FENCE.sub("", text))
    blocks = [block for _, block in FENCE.findall(text)] + indented
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def spans(text):
    """Inline code, which may go over the end of a line."""
    return [" ".join(found.split()) for found in re.findall(r"(?<!`)`([^`]+)`(?!`)", FENCE.sub("", text))]


def words(line):
    """The words of a command line without its comment; none if it is no command of the project's."""
    line = re.sub(r"^(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?", "", line)
    if line.split(" ")[0] not in {name.split(" ")[0] for name in PROGRAMS} or not line.startswith(PROGRAMS):
        return []
    found = shlex.split(line.split("   #")[0], comments=True)
    if "parallel_ops" in found and found[found.index("parallel_ops") - 1] == "-m":
        found = ["parallel-ops", *found[found.index("parallel_ops") + 1 :]]
    return found


def read(page):
    """The text of a page; an example's comments are a block of code."""
    text = page.read_text()
    return text if page.suffix == ".md" else "```\n" + re.sub(r"^#? *", "", text, flags=re.MULTILINE) + "```\n"


def every(kind):
    """Every find of ``kind`` on every page once, as cases of a test."""
    found = [(page.relative_to(ROOT).as_posix(), each) for page in PAGES for each in kind(read(page))]
    return [
        pytest.param(*case, id=f"{case[0]}: {' '.join(case[1])}".partition(chr(10))[0][:100])
        for case in dict.fromkeys(found)
    ]


def lines(program):
    """The command lines of a program in blocks and in inline code, as tuples of words."""

    def of(text):
        found = [tuple(words(line)) for line in (*code(text), *spans(text))]
        return [each for each in found if each[:1] == (program,)]

    return every(of)


@pytest.fixture(scope="module")
def commands():
    return typer.main.get_command(importlib.import_module("parallel_ops._commands").app).commands


@pytest.fixture(scope="module")
def keys():
    """Every key of the settings, as ``section.key``."""
    from parallel_ops.train.config import json_schema

    schema = json.loads(json_schema())
    found = set()
    for section, node in schema["properties"].items():
        for choice in (node, *node.get("anyOf", ())):
            fields = schema["$defs"][choice["$ref"].rpartition("/")[2]] if "$ref" in choice else choice
            found |= {f"{section}.{name}" for name in fields.get("properties", ())}
    return found


def options_of(command):
    return {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}


def given(arguments):
    return {word.partition("=")[0] for word in arguments if word.startswith("--")}


@pytest.mark.parametrize(("page", "line"), lines("parallel-ops"))
def test_a_command_takes_its_options_and_values(commands, keys, page, line):
    name, *arguments = (*line[1:], "--help")
    if name.startswith("--") or name == "COMMAND":
        assert name in {"--help", "--version", "--install-completion", "COMMAND"}
        return
    command = commands[name]
    assert given(arguments) <= options_of(command)
    required = {each.opts[0] for each in command.params if each.required and each.param_type_name == "option"}
    if not required <= given(arguments):
        return  # a mention, such as `parallel-ops train --schema`
    values = command.make_context(name, arguments[:-1], resilient_parsing=False).params if arguments[:-1] else {}
    check_values(values, keys)


def check_values(values, keys):
    """Raises where a value is none that the command would take; files need not be there."""
    theirs = (".json", ".toml")  # a file of the reader's, such as a measured machine
    model_is_theirs = str(values.get("model") or "").endswith(theirs)
    model = inputs.model(values["model"], values.get("seq")) if values.get("model") and not model_is_theirs else None
    own = str(values.get("cluster") or "").endswith(theirs)
    cluster = inputs.cluster(values["cluster"]) if values.get("cluster") and not own else None
    sequences = inputs.batch(values["batch"], model.seq_length) if model else 0
    target = values.get("system") or values.get("format")
    if target:
        find_target(target)
    if values.get("software"):
        era(values["software"])
    if cluster and values.get("plan"):
        inputs.plan(values["plan"], cluster.gpus, sequences)
    if cluster and values.get("only"):
        inputs.options(cluster, values.get("system"), values["only"])
    if "kind" in values:
        assert values["kind"] in KINDS
    for change in values.get("changes") or ():
        assert change.partition("=")[0] in keys | {"parallel"}
    if (file := values.get("file")) is not None and str(file).startswith("examples/"):
        assert (ROOT / file).is_file()


@pytest.mark.parametrize(
    ("page", "line"), every(lambda text: [tuple(s.split()) for s in spans(text) if re.match(r"[a-z_]+ --[a-z]", s)])
)
def test_a_command_that_is_named_alone_has_its_options(commands, page, line):
    """Such as `config --launcher torchrun`."""
    if line[0] in commands:
        assert given(line) <= options_of(commands[line[0]])


@pytest.mark.parametrize(("page", "line"), lines("make"))
def test_a_target_is_in_the_makefile(page, line):
    makefile = (ROOT / "Makefile").read_text()
    for word in line[1:]:
        variable, equals, value = word.partition("=")
        pattern = rf"\$\((?:origin )?{variable}\)|\({variable}\)" if equals else rf"^{word}:"
        assert re.search(pattern, makefile, re.MULTILINE), word
        if variable == "ARGS":
            source = sources(f"benchmarks{'.demo' if line[1] == 'demo' else ''}")
            assert all(has_option(source, option) for option in given(value.split()))


def sources(module):
    """The text of a program of the repository that is started with ``python -m``."""
    path = ROOT / module.replace(".", "/")
    files = [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else [path / "cli.py", path / "__main__.py"]
    return "".join(file.read_text() for file in files if file.is_file())


def has_option(source, option):
    declared = rf"^ +{option[2:].replace('-', '_')}: (?:Annotated|options\.)"
    return re.search(rf'["/]{option}\b', source) or re.search(declared, source, re.MULTILINE)


@pytest.mark.parametrize(("page", "line"), [*lines("python"), *lines("torchrun")])
def test_a_program_takes_its_options(page, line):
    scripts = [word for word in line if word.startswith("examples/")]
    assert all((ROOT / script).is_file() for script in scripts)
    if "-m" not in line or not (module := line[line.index("-m") + 1]).startswith("benchmarks"):
        return
    arguments = line[line.index("-m") + 2 :]
    assert sources(module)
    named = [word for word in arguments[:1] if re.fullmatch("[a-z_]+", word)]
    if module == "benchmarks" and named:
        commands = dict(re.findall(r'^    "(\w+)": \("([\w.]+)",', sources(module), re.MULTILINE))
        assert named[0] in commands or named[0] in ops.every()
        source = sources(f"benchmarks.{commands[named[0]]}") if named[0] in commands else sources(module)
    else:
        source = sources(module)
    assert all(has_option(source, option) for option in given(arguments))


@pytest.mark.parametrize(("page", "line"), lines("pytest"))
def test_tests_are_there(page, line):
    """Files, options, and what ``-k`` selects."""
    files = [ROOT / word for word in line if word.startswith("tests/")]
    texts = [path.read_text() for file in files for path in ([file] if file.is_file() else file.rglob("*.py"))]
    assert texts or not files
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    assert all(f'"{option}"' in conftest for option in given(line))
    if "-k" in line:
        assert any(line[line.index("-k") + 1] in text for text in texts)


def key(text):
    """Settings: `checkpoint.dir`, `data.dtype = "uint8"`."""
    found = [re.match(rf"(?:--set )?((?:{SECTIONS})\.[a-z_\d]+)(?: ?=.*)?$", span) for span in spans(text)]
    return [(each[1],) for each in found if each and not each[1].endswith((".py", ".json", ".pt", ".md"))]


@pytest.mark.parametrize(("page", "line"), every(key))
def test_a_setting_is_one(keys, page, line):
    assert line[0] in keys


def table(text):
    """Section and keys of a row of the table of settings."""
    rows = re.findall(r"^\| `\[(\w+)\]` \| (.*) \|$", text, re.MULTILINE)
    return [(section, *re.findall(r"`([a-z_]+)`", row)) for section, row in rows]


@pytest.mark.parametrize(("page", "line"), every(table))
def test_the_table_of_settings(keys, page, line):
    section, *named = line
    assert {f"{section}.{name}" for name in named} <= keys


def toml(text):
    return [(block,) for kind, block in FENCE.findall(text) if kind == "toml"]


@pytest.mark.parametrize(("page", "line"), every(toml))
def test_the_keys_of_a_file(keys, page, line):
    for section, values in tomllib.loads(line[0]).items():
        named = {f"{section}.{name}" for name in values} if isinstance(values, dict) else set()
        assert named <= keys or not any(known.startswith(f"{section}.") for known in keys)


def path(text):
    """Files of the repository, without what stands for any name."""
    found = [span.partition(":")[0] for span in spans(text) if " " not in span and span.partition("/")[0] in FOLDERS]
    return [(each,) for each in found if "/" in each and not re.search(r"[<{*]|\.\.\.", each)]


@pytest.mark.parametrize(("page", "line"), every(path))
def test_a_file_is_there(page, line):
    assert (ROOT / line[0]).exists() or list(ROOT.glob(f"{line[0]}.*"))


def dotted(text):
    """Python names: `parallel_ops.layers.ParallelMoE`; not those of loggers, nor what loads another library."""
    found = [re.match(r"(parallel_ops(?:\.\w+)+)", span) for span in spans(re.sub(r"logger\s`[^`]+`", "", text))]
    return [(each[1],) for each in found if each and ".integrations." not in each[1]]


@pytest.mark.parametrize(("page", "line"), every(dotted))
def test_a_python_name_is_there(page, line):
    parts = line[0].split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return


def runnable(text):
    """Blocks that import what they use; those of Transformers need a model's folder."""
    return [(block,) for kind, block in FENCE.findall(text) if kind == "python" and block.startswith("import torch\n")]


@pytest.mark.parametrize(("page", "line"), [case for case in every(runnable) if "examples/" not in case.id])
def test_a_block_of_python_runs(page, line):
    exec(line[0], {})


def test_a_stale_name_is_found(commands, keys):
    """The checks above, of a page that names what has gone."""
    stale = "`export --launcher torchrun`, `model.folder`, `tests/gone.py`\n\n    parallel-ops plan --modle x\n"
    assert [line for line in spans(stale) if line.startswith("export")] == ["export --launcher torchrun"]
    assert not given(["--launcher"]) <= options_of(commands["export"])
    assert key(stale) == [("model.folder",)] and "model.folder" not in keys
    assert path(stale) == [("tests/gone.py",)] and not (ROOT / "tests/gone.py").exists()
    assert [words(line) for line in code(stale)] == [["parallel-ops", "plan", "--modle", "x"]]
