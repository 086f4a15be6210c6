"""Every public function and class of ``comm`` has a caller in the package: what nothing calls is not there yet."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMM = "parallel_ops.comm"

# What users call.
ENTRY_POINTS = {
    "parallel_ops.comm.transport.registry.use_transport",
}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "parallel_ops").rglob("*.py")}
PACKAGES = {_name(path) for path in (ROOT / "parallel_ops").rglob("__init__.py")}


def defined(trees: dict[str, ast.Module]) -> set[str]:
    """The public functions and classes of ``comm``; references are the oracles of tests."""
    return {
        f"{module}.{node.name}"
        for module, tree in trees.items()
        if module.startswith(COMM)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not node.name.endswith("_reference")
    }


def called(trees: dict[str, ast.Module]) -> set[str]:
    """What modules take from others and use, re-exports followed, and what they use of their own elsewhere."""
    exported = {
        f"{module}.{alias.asname or alias.name}": f"{node.module}.{alias.name}"
        for module in PACKAGES
        for node in trees[module].body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = set()
    for module, tree in trees.items():
        if module in PACKAGES:
            continue
        names = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        for top in tree.body:
            own = getattr(top, "name", None)
            for node in ast.walk(top):
                if isinstance(node, ast.Name) and node.id != own:
                    found.add(names.get(node.id, f"{module}.{node.id}"))
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    found.add(f"{names.get(node.value.id)}.{node.attr}")
    return found | {exported[name] for name in found if name in exported}


def test_everything_public_has_a_caller():
    assert defined(TREES) >= ENTRY_POINTS
    missing = defined(TREES) - called(TREES) - ENTRY_POINTS
    assert not missing, "nothing in the package calls " + ", ".join(sorted(missing))


def test_what_counts_as_a_call():
    module = "parallel_ops.comm.a"
    trees = dict(TREES)
    trees[module] = ast.parse("def f(): f()\ndef g(): pass\ndef h(): pass\nclass C: pass\ndef _p(x: C): return g()")
    trees["parallel_ops.ops.b"] = ast.parse(f"from {module} import h as other\nother()\nf()")
    here = {name for name in defined(trees) if name.startswith(f"{module}.")}
    assert {name.rpartition(".")[2] for name in here - called(trees)} == {"f"}
