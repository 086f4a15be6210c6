"""Launches of Triton kernels at less cost to the host than ``kernel[grid](...)``.

Triton builds dictionaries and strings for every launch before it finds the kernel that it compiled for the last one.
Here the first launch of a kind goes through Triton, and the compiled kernel that it returns launches the next ones.
What makes a kind is what Triton compiles for: the compile-time constants and options, the device, and of each argument
what Triton's own function says (type, alignment and divisibility by 16, being 1).

With launch hooks, pre-run hooks, a replaced ``JITFunction.run`` or settings that change what is compiled, and in
versions of Triton other than those whose launch was compared, every launch goes through Triton.
"""

from collections.abc import Callable
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import BaseBackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_COMPARED_VERSIONS = ("3.6.", "3.7.")
_RUN = JITFunction.run

if triton.__version__.startswith(_COMPARED_VERSIONS):
    from triton.runtime.jit import native_specialize_impl as _specialisation
else:
    _specialisation = None

# By kernel and kind: the compiled kernel's own launch, what it takes before and after the arguments of the call, and
# the compiled kernel, which holds the kernel, so that no other gets its id.
_Known = tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...], Any]
_known: dict[int, dict[tuple[Any, ...], _Known]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """``kernel[grid](*args, **meta)``; ``args`` are the run-time arguments, ``meta`` the constants and options."""
    if (
        not isinstance(kernel, JITFunction)
        or JITFunction.run is not _RUN
        or kernel.pre_run_hooks
        or _needs_triton_launch()
    ):
        kernel[grid](*args, **meta)  # also interpreted, autotuned, and what else there may be
        return
    known = _known.get(id(kernel))
    if known is None:
        _launch_first(kernel, grid, args, meta)
        return
    active = driver.active
    device = active.get_current_device()
    found = known.get(_kind(device, args, meta))
    if found is None:
        _launch_first(kernel, grid, args, meta)
        return
    run, handles, constants, _ = found
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    run(x, y, z, active.get_current_stream(device), *handles, *args, *constants)


def _needs_triton_launch() -> bool:
    """True if a hook needs what only Triton knows about a launch, or if this version's launch was not compared."""
    if _specialisation is None:
        return True
    runtime = knobs.runtime
    return (
        getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
        or runtime.add_stages_inspection_hook
    )


def _kind(device: int, args: tuple[Any, ...], meta: dict[str, Any]) -> tuple[Any, ...]:
    of_arguments = [_specialisation(BaseBackend, arg, False, True, True) for arg in args]
    return (device, knobs.runtime.debug, knobs.compilation.instrumentation_mode, *of_arguments, *meta.items())


def _launch_first(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    compiled = kernel[grid](*args, **meta)
    if compiled is None:  # a hook kept it from being compiled
        return
    defaults = kernel.signature.parameters
    constants = tuple(meta.get(name, defaults[name].default) for name in kernel.arg_names[len(args) :])
    handles = (compiled.function, compiled.packed_metadata, None, None, None)  # no metadata for hooks, and no hooks
    kind = _kind(driver.active.get_current_device(), args, meta)
    _known.setdefault(id(kernel), {})[kind] = (compiled.run, handles, constants, compiled)
