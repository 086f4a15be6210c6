"""Digests of forwards by their source, so that a replacement is used only for a forward that it was written for.

Two functions have the same digest if they differ at most in the names of local variables, annotations, decorators,
docstrings, comments and layout. The methods and functions of the same class and module that a function uses belong to
it. ``_known.py`` has the table.
"""

import ast
import functools
import hashlib
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any


@functools.cache
def digest(function: Callable[..., Any], owner: type | None = None) -> str | None:
    """Twelve hexadecimal digits for what ``function`` computes as a method of ``owner``.

    ``None`` if the source cannot be read.
    """
    try:
        parts = [_normal(part) for part in _with_used(_plain(function), owner)]
    except (OSError, TypeError, SyntaxError):
        return None
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _plain(function: Callable[..., Any]) -> types.FunctionType:
    inner: Any = inspect.unwrap(function)
    if not isinstance(inner, types.FunctionType):
        raise TypeError(f"{inner!r} is no function of Python")
    return inner


def _with_used(function: types.FunctionType, owner: type | None) -> Iterator[types.FunctionType]:
    """``function``, and what it calls of its own module and of ``owner``, each once."""
    waiting, found = [function], [function]
    while waiting:
        current = waiting.pop(0)
        yield current
        for name in current.__code__.co_names:
            used: Any = inspect.getattr_static(owner, name, None) if owner is not None else None
            used = current.__globals__.get(name) if used is None else used
            used = getattr(used, "__func__", used)  # a static method
            used = inspect.unwrap(used) if callable(used) else used
            if isinstance(used, types.FunctionType) and used.__module__ == function.__module__ and used not in found:
                found.append(used)
                waiting.append(used)


def _normal(function: types.FunctionType) -> Any:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise SyntaxError(f"{function.__qualname__} is no def")
    names: dict[str, str] = {}
    for node in ast.walk(tree.args):
        if isinstance(node, ast.arg):
            names[node.arg] = f"v{len(names)}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, f"v{len(names)}")
    body = tree.body[1:] if ast.get_docstring(tree, clean=False) is not None else tree.body
    return _tuples(tree.args, names), [_tuples(statement, names) for statement in body]


def _tuples(node: Any, names: dict[str, str]) -> Any:
    """The tree as nested tuples, equal in all versions of Python: what is empty or an annotation is left out."""
    if isinstance(node, list):
        return tuple(_tuples(item, names) for item in node)
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.arg):
        return names[node.arg]
    if isinstance(node, ast.AnnAssign):
        if node.value is None:
            return ()
        node = ast.Assign([node.target], node.value)
    if isinstance(node, ast.AST):
        fields = ((name, _tuples(value, names)) for name, value in ast.iter_fields(node) if name not in _LEFT_OUT)
        return type(node).__name__, *((name, value) for name, value in fields if value not in ((), None))
    return repr(node) if isinstance(node, str | bytes | float | complex | bool) or node is Ellipsis else node


_LEFT_OUT = ("ctx", "kind", "type_comment", "type_params", "annotation", "returns", "decorator_list")
