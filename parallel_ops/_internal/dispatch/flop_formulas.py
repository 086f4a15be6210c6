"""Registers formulas with ``torch.utils.flop_counter`` once somebody imports it.

The module imports Triton, which nothing here does before the first CUDA tensor.
"""

import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_COUNTER = "torch.utils.flop_counter"
_waiting: list[tuple[Any, Callable[..., int]]] = []


def register_flops(op: Any, formula: Callable[..., int]) -> None:
    """Registers ``formula`` for an overload packet; it takes the op's arguments and returns floating-point operations.

    ``FlopCounterMode`` then counts the op, whether its module was imported before or is imported later.
    """
    _waiting.append((op, formula))
    if (counter := sys.modules.get(_COUNTER)) is not None:
        _register_waiting(counter)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register_waiting(counter: ModuleType) -> None:
    while _waiting:
        op, formula = _waiting.pop()
        counter.register_flop_formula(op, get_raw=True)(functools.partial(_without_output, formula))


def _without_output(formula: Callable[..., int], *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return formula(*args, **kwargs)


class _Finder(MetaPathFinder):
    """Sees the first import of the counter, and leaves it to the other finders."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                _register_waiting(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
