"""The documentation: links lead somewhere, every public package has a reference page. `make docs` builds the site."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md")]


@pytest.fixture(scope="module")
def hook():
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "docs/reference/pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    files = [link for link in links if not re.match(r"\w+:", link)]
    assert [link for link in files if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_are_named_are_there(page):
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        assert f"def {name}(" in (ROOT / file).read_text(), (file, name)


def test_cases_that_are_named_are_there():
    """In quotes; ``...`` stands for the beginning of the one before."""
    cases = (ROOT / "tests/train/test_elsewhere.py").read_text()
    rows = (ROOT / "docs/design/what_goes_wrong_elsewhere.md").read_text().split("\n| fault")
    named = re.findall(r'"([^"|]+)"', "".join(row.partition("|---|")[2] for row in rows))
    assert len(named) > 20
    for name in named:
        part = name.strip(".,").removesuffix(" under").strip(" .,")
        assert part in cases, name


def test_every_public_package_has_a_reference_page():
    public = [
        path.parent.relative_to(ROOT)
        for path in ROOT.glob("parallel_ops/**/__init__.py")
        if re.search(r"__all__ = \[|import (\w+) as \1\b", path.read_text()) and path.parent.name != "parallel_ops"
    ]
    rooms = {".".join(path.parts) for path in public if len(path.parts) == 2 or path.parts[1] == "integrations"}
    pages = "".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    assert set(re.findall(r"^::: public (\S+)$", pages, flags=re.MULTILINE)) == rooms
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [path.name for path in ROOT.glob("docs/reference/*.md") if f"reference/{path.name}" not in navigation] == []


def test_the_reference_names_what_is_public(hook):
    from parallel_ops import ops

    names = hook.public_names("parallel_ops.ops")
    assert {"bias_gelu", "bias_gelu_reference", "Routing"} < set(names) and all(hasattr(ops, name) for name in names)
    assert names["bias_gelu"] == f"{ops.bias_gelu.__module__}.bias_gelu"  # the function, not the file of its name
    page = hook.on_page_markdown("# Ops\n\n::: public parallel_ops.ops\n")
    assert page.startswith("# Ops\n\n::: parallel_ops.ops\n")
    assert [f"\n::: {path}\n" in page for path in names.values()] == [True] * len(names)
    functions, results, twins = (
        page.index(f'heading: "{name}"') for name in ("unpermute", "Routing", "route_reference")
    )
    assert functions < results < twins


def test_links_to_pages_of_the_root_stay_on_the_site(hook):
    pages = "[a](../SECURITY.md) [b](../../CONTRIBUTING.md#tests) [c](../examples/train.toml) [d](ops.md)"
    links = "[a](SECURITY.md) [b](../CONTRIBUTING.md#tests) [c](../examples/train.toml) [d](ops.md)"
    assert hook.on_page_markdown(pages) == links
    assert [name for name in hook.ROOT_PAGES if not (ROOT / name).exists()] == []
