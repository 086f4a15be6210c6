"""Launches of Triton kernels at less cost to the host than ``kernel[grid](...)``.

Triton builds dictionaries and strings for every launch before it finds the kernel that it compiled for the last one.
Here the first launch of a kind goes through Triton, and the compiled kernel that it returns launches the next ones.
What makes a kind is what Triton compiles for: the compile-time constants and options, the device, and of each argument
what Triton's own function says (type, alignment and divisibility by 16, being 1).

A launcher that is ``remembered`` runs once for tensors of given shapes, strides, dtypes and alignment. After that its
launches are repeated with other tensors: to work out grids and arguments takes the host longer than to launch.

With launch hooks, pre-run hooks, a replaced ``JITFunction.run``, instrumented kernels or settings that change what is
compiled, and in versions of Triton other than those whose launch was compared, every launch goes through Triton.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import BaseBackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_COMPARED_VERSIONS = ("3.6.", "3.7.", "3.8.", "3.9.")
# None where another was in its place already.
_RUN = JITFunction.run if JITFunction.run.__module__ == JITFunction.__module__ else None

if triton.__version__.startswith(_COMPARED_VERSIONS):
    from triton.runtime.jit import native_specialize_impl as _specialisation
else:
    _specialisation = None

L = TypeVar("L", bound=Callable[..., None])

# By kernel and kind: the compiled kernel's own launch, what it takes before and after the arguments of the call, and
# the compiled kernel, which holds the kernel, so that no other gets its id.
_Known = tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...], Any]
_known: dict[int, dict[tuple[Any, ...], _Known]] = {}

# Signatures that a launcher remembers. It forgets all beyond them, as lengths that change each step would bring.
_MOST_SIGNATURES = 1024
_STREAM = 3  # its place in what a launch takes, behind the grid


class _Seen(threading.local):
    """What a remembered launcher that runs on this thread has launched and allocated; ``None`` if none runs."""

    launches: list[tuple[JITFunction, Callable[..., None], list[Any]]] | None = None
    temporaries: list[tuple[Callable[[], Tensor], Tensor]]
    by_triton = False  # a kernel, for the first time


_seen = _Seen()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """``kernel[grid](*args, **meta)``; ``args`` are the run-time arguments, ``meta`` the constants and options."""
    if not isinstance(kernel, JITFunction) or kernel.pre_run_hooks or _needs_triton_launch():
        kernel[grid](*args, **_fused(meta))  # also interpreted, autotuned, and what else there may be
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
    taken = [x, y, z, active.get_current_stream(device), *handles, *args, *constants]
    run(*taken)
    if _seen.launches is not None:
        _seen.launches.append((kernel, run, taken))


def temporary(make: Callable[[], Tensor]) -> Tensor:
    """``make()``: memory for a launcher's kernels beside its tensors. A remembered launcher makes it anew each time."""
    made = make()
    if _seen.launches is not None:
        _seen.temporaries.append((make, made))
    return made


class _Plan:
    """The launches of a remembered launcher."""

    def __init__(self, tensors: tuple[Tensor | None, ...]) -> None:
        launches, temporaries = _seen.launches or [], _seen.temporaries
        self.makers = [make for make, _ in temporaries]
        # By id: tensors are compared element by element.
        places = {id(t): i for i, t in enumerate((*tensors, *[made for _, made in temporaries])) if t is not None}
        # What is launched with, and where in it which tensor comes.
        self.launches = [
            (
                kernel,
                run,
                [None if isinstance(a, Tensor) else a for a in taken],
                [(i, places.get(id(a), -1)) for i, a in enumerate(taken) if isinstance(a, Tensor)],
            )
            for kernel, run, taken in launches
        ]
        # Not if it launched nothing, or with a copy of a tensor.
        self.complete = bool(self.launches) and all(place >= 0 for *_, slots in self.launches for _, place in slots)

    def run(self, tensors: tuple[Tensor | None, ...], stream: int) -> bool:
        """Launches all, or none if a kernel has a pre-run hook."""
        for kernel, *_ in self.launches:
            if kernel.pre_run_hooks:
                return False
        if self.makers:
            tensors = (*tensors, *[make() for make in self.makers])
        for _, run, fixed, slots in self.launches:
            taken = fixed.copy()
            taken[_STREAM] = stream
            for i, place in slots:
                taken[i] = tensors[place]
            run(*taken)
        return True


def remembered(launcher: L) -> L:
    """``launcher``, which does not run again for tensors like those that it had before: its launches are repeated.

    Its positional arguments are tensors or ``None``; the others numbers, strings, ``None`` and tuples of them, each of
    one type in all calls. What it launches depends on shapes, strides, dtypes, alignment to 16 bytes, the device and
    those others alone. If it launches anything, it does nothing else to a tensor, and its kernels take only the given
    tensors and what ``temporary`` makes.
    """
    plans: dict[tuple[Any, ...], _Plan | None] = {}

    @functools.wraps(launcher)
    def call(*tensors: Tensor | None, **options: Any) -> None:
        if _seen.launches is not None or _needs_triton_launch():
            launcher(*tensors, **options)
            return
        active = driver.active
        device = active.get_current_device()
        signature = (
            device, knobs.runtime.debug, *options.items(),
            *[None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors],
        )  # fmt: skip
        plan = plans.get(signature)
        if plan is not None and plan.run(tensors, active.get_current_stream(device)):
            return
        if signature in plans:
            launcher(*tensors, **options)
        else:
            found = _observed(launcher, tensors, options)
            if found is not None:
                if len(plans) >= _MOST_SIGNATURES:
                    plans.clear()
                plans[signature] = found if found.complete else None

    return cast(L, call)


def _observed(
    launcher: Callable[..., None], tensors: tuple[Tensor | None, ...], options: dict[str, Any]
) -> _Plan | None:
    """Runs the launcher; ``None`` if a kernel was launched for the first time, through Triton, or if it cannot be seen
    which of several places of a tensor is meant."""
    given = [id(t) for t in tensors if t is not None]
    if len(set(given)) < len(given):
        launcher(*tensors, **options)
        return None
    _seen.launches, _seen.temporaries, _seen.by_triton = [], [], False
    try:
        launcher(*tensors, **options)
        return None if _seen.by_triton else _Plan(tensors)
    finally:
        _seen.launches = None
        _seen.temporaries = []


def _needs_triton_launch() -> bool:
    """True if a hook or a sanitizer needs what only Triton knows, or if this version's launch was not compared."""
    if _specialisation is None or JITFunction.run is not _RUN:
        return True
    runtime = knobs.runtime
    return (
        getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
        or runtime.add_stages_inspection_hook
        # Sanitizers: in 3.9 they have settings of their own, and memory that each launch passes.
        or knobs.compilation.instrumentation_mode
    )


def _kind(device: int, args: tuple[Any, ...], meta: dict[str, Any]) -> tuple[Any, ...]:
    of_arguments = [_specialisation(BaseBackend, arg, False, True, True) for arg in args]
    return (device, knobs.runtime.debug, *of_arguments, *meta.items())


def _fused(meta: dict[str, Any]) -> dict[str, Any]:
    """``meta`` with multiplications and additions fused, as the kernels were measured, unless it or the user says no.

    Triton 3.9 warns where nobody has, and 3.10 is to fuse none by default.
    """
    if "TRITON_DEFAULT_FP_FUSION" in os.environ:
        return meta
    return {**meta, "enable_fp_fusion": meta.get("enable_fp_fusion", True)}


def _launch_first(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    _seen.by_triton = True
    compiled = kernel[grid](*args, **_fused(meta))
    if compiled is None:  # a hook kept it from being compiled
        return
    defaults = kernel.signature.parameters
    constants = tuple(meta.get(name, defaults[name].default) for name in kernel.arg_names[len(args) :])
    handles = (compiled.function, compiled.packed_metadata, None, None, None)  # no metadata for hooks, and no hooks
    kind = _kind(driver.active.get_current_device(), args, meta)
    _known.setdefault(id(kernel), {})[kind] = (compiled.run, handles, constants, compiled)
