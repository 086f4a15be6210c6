"""Rebinds names of another package to other objects, all or none of them, and restores them.

A function is imported by name into the modules that call it. So it is replaced in every loaded module of the package
that holds it, including the one that defines it, from which modules import it later. A method is replaced in its class,
so existing instances have the new one too.
"""

import importlib
import sys
from types import FunctionType, TracebackType
from typing import Any, NamedTuple

MISSING = object()


class Binding(NamedTuple):
    """``name`` of a module, a class or a dictionary, bound to ``new`` instead of ``old``."""

    owner: Any
    name: str
    old: Any  # MISSING if the name did not exist
    new: Any

    @property
    def full_name(self) -> str:
        if self.owner is sys.modules:
            return f"sys.modules[{self.name!r}]"
        module = getattr(self.owner, "__module__", None)
        own = self.owner.__qualname__ if module else self.owner.__name__
        return ".".join(part for part in (module, own, self.name) if part)

    def current(self) -> Any:
        names = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        return names.get(self.name, MISSING)

    def bind(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            if value is MISSING:
                self.owner.pop(self.name, None)
            else:
                self.owner[self.name] = value
        elif value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


def find(place: str) -> tuple[Any, str, Any] | None:
    """Owner, name and value of ``"module:name"`` or ``"module:Class.name"``; ``None`` if it does not exist."""
    module, _, path = place.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return None
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each, None)
    value = MISSING if owner is None else vars(owner).get(name, MISSING)
    return None if value is MISSING else (owner, name, value)


def holders(package: str, value: Any, new: Any) -> list[Binding]:
    """Bindings to ``new`` of every name in a loaded module of ``package`` that is bound to ``value``."""
    return [
        Binding(module, name, value, new)
        for module_name, module in list(sys.modules.items())
        if module is not None and f"{module_name}.".startswith(f"{package}.")
        for name, held in list(vars(module).items())
        if held is value
    ]


class Replaced(dict[str, Any]):
    """Maps the full names that were replaced, such as ``"megatron.core.transformer.mlp.bias_gelu_impl"``, to their
    former objects (``None`` if the name did not exist).

    ``undo()`` restores all names, as does the end of a ``with`` block.
    """

    def __init__(self, package: str, bindings: list[Binding]) -> None:
        """Binds all of them, or none: if one fails, those before it are undone."""
        self._package, self._bindings = package, bindings
        done: list[Binding] = []
        try:
            for binding in bindings:
                binding.bind(binding.new)
                done.append(binding)
        except BaseException:
            for binding in reversed(done):
                binding.bind(binding.old)
            raise
        super().__init__({b.full_name: None if b.old is MISSING else b.old for b in bindings})

    def undo(self) -> None:
        """Restores all names, also in modules that were imported since. A second call does nothing.

        Raises:
            RuntimeError: a name has been bound to something else since. It keeps that; all others are restored.
        """
        bindings, self._bindings = self._bindings, []
        self.clear()
        taken = [b.full_name for b in bindings if b.current() is not b.new]
        for binding in reversed(bindings):
            if binding.current() is binding.new:
                binding.bind(binding.old)
        for binding in bindings:
            if isinstance(binding.new, FunctionType) and binding.old is not MISSING:
                for later in holders(self._package, binding.new, binding.old):
                    later.bind(binding.old)
        if taken:
            raise RuntimeError(f"{', '.join(taken)}: bound to something else since apply(), so left as it is")

    def __enter__(self) -> "Replaced":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()
