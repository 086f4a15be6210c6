"""The layout that docs/architecture.md describes: no circle of files, no import of another room's private module."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "triton_kernels":
        parts = ("parallel_ops", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, modules: set[str]) -> set[str]:
    """Names that a file imports from the package: modules, or a module and a name in it. Absolute imports only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} is a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in modules or name.rpartition(".")[0] in modules}


FILES = {module_name(p): p for top in ("parallel_ops", "triton_kernels") for p in (ROOT / top).rglob("*.py")}
IMPORTS = {name: imports(path, set(FILES)) for name, path in FILES.items()}


def test_no_circles():
    graph = {
        name: {i if i in FILES else i.rpartition(".")[0] for i in found} - {name} for name, found in IMPORTS.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"imports run in a circle: {' <- '.join(error.args[1])}") from None


def test_private_modules_stay_in_their_room():
    def room(name: str) -> str:
        return ".".join(name.split(".")[:2])

    # `_nccl` is the compiled binding, at the top since its name is part of the wheel; the version is public.
    wrong = [
        f"{name} imports {imported}"
        for name, found in IMPORTS.items()
        for imported in found
        if any(
            part.startswith("_") and part not in ("_internal", "_nccl", "__version__")
            for part in imported.split(".")[1:]
        )
        and room(name) != room(imported)
        and not name.startswith("parallel_ops.__main__")
    ]
    assert not wrong, "\n".join(sorted(wrong))
