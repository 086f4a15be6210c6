"""What has been replaced in a model: to print, to ask and to undo."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from parallel_ops.integrations.huggingface import _use
from parallel_ops.integrations.huggingface._fused import (
    described,
    is_fused,
    is_wrapped,
    kept_ops,
    ops_of,
    set_class,
    stock_class,
)
from parallel_ops.integrations.huggingface._steps import Skipped, Step, Swap


class Applied:
    """The result of ``apply`` and of ``applied``, which prints as a summary. As a context manager it undoes ``apply``.

    After steps the summary also names the ops that were not used in them, and why: a trainer that calls other forwards,
    or padding, with which attention goes to SDPA. Compiled code is not counted.

    ``replaced`` and ``unreplaced`` are those of now: a module that somebody has changed since goes to stock.
    """

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module], unreplaced: dict[str, str]) -> None:
        self._root, self._modules, self._unreplaced = model, modules, unreplaced
        self._classes = {name: type(m) for name, m in modules.items()}
        self._ops = {name: ops_of(m) for name, m in modules.items() if ops_of(m)}

    @property
    def replaced(self) -> dict[str, tuple[str, ...]]:
        """The ops that each module calls, by the module's name."""
        kept = self._kept()
        left = {name: tuple(op for op in ops if op not in kept[name]) for name, ops in self._ops.items()}
        return {name: ops for name, ops in left.items() if ops}

    @property
    def unreplaced(self) -> dict[str, str]:
        """Why a module that one of ``ops`` is meant for keeps its own forward, or has it again, by its name."""
        found = dict(self._unreplaced)
        for name, kept in self._kept().items():
            for op, reason in kept.items():
                found[name] = "; ".join(filter(None, (found.get(name), f"{op}: {reason}")))
        return found

    def _kept(self) -> dict[str, dict[str, str]]:
        """The ops that are not used any more, and why, by the names of modules."""
        found: dict[str, dict[str, str]] = {name: {} for name in self._ops}
        present = {id(m) for m in self._root.modules()}
        for name, module in self._modules.items():
            if id(module) not in present:
                ops = ops_of(module) or ("any op",)
                found[name] = dict.fromkeys(ops, f"the {described(module)} that it was is no longer here")
            elif name in found and stock_class(module) is not None:
                found[name] = kept_ops(module)
        return found

    def undo(self) -> None:
        """Restores every module's own forward.

        Raises:
            RuntimeError: already undone, or a module has been changed since by something that must be undone first.
                Then nothing is undone.
        """
        if not self._modules:
            raise RuntimeError("undo: already undone")
        if not any(stock_class(m) for m in self._modules.values()):
            raise RuntimeError("undo: already undone, by another handle of this model")
        for name, module in self._modules.items():
            if type(module) is not self._classes[name] or not is_fused(module) or is_wrapped(module):
                raise RuntimeError(
                    f"undo: {name} has another class or forward since apply (FSDP, or Accelerate's mixed precision, "
                    "which accelerator.unwrap_model(model, keep_fp32_wrapper=False) removes); undo that first"
                )
        for module in self._modules.values():
            stock: Any = stock_class(module)
            set_class(module, stock)
            _use.forget(module)
        self._modules = {}

    def __enter__(self) -> "Applied":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for ops in self.replaced.values():
            for op in ops:
                counts[op] = counts.get(op, 0) + 1
        state = "" if self._modules else " (undone)"
        lines = [f"{type(self._root).__name__}{state}:", *(f"  {count:4d} x {op}" for op, count in counts.items())]
        lines += [f"  unreplaced: {name}: {reason}" for name, reason in self.unreplaced.items()]
        return "\n".join([*lines, *self._unused()])

    def _unused(self) -> list[str]:
        """Lines for the ops that calls since ``apply`` did not use."""
        if not any(_use.calls(m) for m in self._modules.values()):
            return []
        found: dict[tuple[str, str], list[int]] = {}  # modules, calls
        for module in self._modules.values():
            kept = _use.calls_of_stock(module)
            if not _use.calls(module):
                kept = {(op, "was not called"): 0 for op in ops_of(module)}
            for key, times in kept.items():
                entry = found.setdefault(key, [0, 0])
                entry[0] += 1
                entry[1] += times
        return [
            f"  unused: {modules} x {op}: it {reason}" + (f" (in {times} calls)" if times else "")
            for (op, reason), (modules, times) in found.items()
        ]


def swap(model: nn.Module, steps: list[Step]) -> Applied:
    """Replaces classes as ``steps`` say."""
    swaps = [s for s in steps if isinstance(s, Swap)]
    for s in swaps:
        _use.forget(s.module)
        set_class(s.module, s.fused)
    return Applied(model, {s.name: s.module for s in swaps}, reasons(s for s in steps if isinstance(s, Skipped)))


def replaced_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose forward is replaced, by name; the name of the class for ``model`` itself."""
    return {n or type(m).__name__: m for n, m in model.named_modules() if stock_class(m) is not None}


def reasons(steps: Iterable[Step]) -> dict[str, str]:
    """Why modules keep their forward, by name."""
    found: dict[str, str] = {}
    for step in steps:
        if isinstance(step, Skipped):
            found[step.name] = "; ".join(filter(None, (found.get(step.name), f"{step.op}: {step.reason}")))
        elif step.ops:
            found[step.name] = "; ".join(f"{op}: it could be replaced, and is not" for op in step.ops)
    return found
