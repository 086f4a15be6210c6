"""MkDocs hooks.

A line ``::: public PACKAGE`` of a page becomes the reference of every public name of that package: the names of
``__all__``. Many are functions that share their name with the file that defines them, where mkdocstrings would show the
file, so each is given by its full path, which the imports of the package tell. Sources are parsed, not imported.

The pages in ``ROOT_PAGES`` lie beside docs/ in the repository and in it on the site; links to and from them follow.
"""

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
ROOT_PAGES = ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
INTRODUCTION = """::: {package}
    options: {{members: false, show_root_heading: false}}
"""
ENTRY = """::: {path}
    options: {{heading: "{name}", toc_label: "{name}"}}
"""


def public_names(package: str) -> dict[str, str]:
    """The full path of each public name: those of ``__all__``, or imports of the form ``name as name``."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text())
    imported, exported, names = {}, set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
            exported |= {alias.name for alias in node.names if alias.name == alias.asname}
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names = ast.literal_eval(node.value)
    names = names or sorted(exported)
    if not names:
        raise ValueError(f"{package} has neither __all__ nor imports of the form `name as name`")
    return {name: imported.get(name, f"{package}.{name}") for name in names}


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Called by MkDocs once it has found the pages of docs/."""
    from mkdocs.structure.files import File

    for name in ROOT_PAGES:
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by MkDocs for every page."""

    def reference(match: re.Match[str]) -> str:
        names = public_names(match[1])
        # What is called, what it returns or takes, and last the twins in plain PyTorch that the tests compare with.
        order = sorted(names, key=lambda name: (name.endswith("_reference"), name[0].isupper()))
        entries = [ENTRY.format(path=names[name], name=name) for name in order]
        return "\n".join([INTRODUCTION.format(package=match[1]), *entries])

    markdown = re.sub(rf"\]\(\.\./((?:\.\./)*(?:{'|'.join(ROOT_PAGES)}))", r"](\1", markdown)
    return re.sub(r"^::: public (\S+)$", reference, markdown, flags=re.MULTILINE)
