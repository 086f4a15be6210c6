"""Launches of Triton kernels, which can be noted on the way, with everything it takes to repeat them without Triton.

Notes are for ``parallel_ops.ops``, whose plans repeat the launches of earlier calls from C++. They rest on what
compiled kernels tell of themselves and on the order in which Triton passes arguments, so they are taken from the
versions of Triton whose launcher was compared; with another one every launch goes through Triton.
"""

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

# Kernel arguments are followed by two pointers to scratch memory, both null where the kernel asks for none.
_COMPARED_VERSIONS = ("3.6.", "3.7.")
_SCRATCH_POINTERS = 2

_FLOATS = {"fp32": ctypes.c_float, "fp64": ctypes.c_double}
_INTEGERS = ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64")

_notes = threading.local()
# Kernels whose handles were given away stay loaded, whatever becomes of Triton's caches.
_given_away: dict[int, Any] = {}


@dataclass(frozen=True)
class Launch:
    """One launch. ``arguments``: tensors, whose address is meant, or 64-bit words whose low bytes the kernel reads."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    arguments: tuple[Tensor | int, ...]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """``kernel[grid](*args, **meta)``."""
    compiled = kernel[grid](*args, **meta)
    notes = getattr(_notes, "launches", None)
    if notes is not None:
        notes.append(_described(kernel, compiled, grid, args, meta))


@contextlib.contextmanager
def noted() -> Iterator[list[Launch | None]]:
    """The launches of the block on this thread; ``None`` for one that cannot be repeated without Triton."""
    outer, _notes.launches = getattr(_notes, "launches", None), []
    try:
        yield _notes.launches
    finally:
        _notes.launches = outer


def _described(
    kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]
) -> Launch | None:
    if compiled is None or 0 in grid or not triton.__version__.startswith(_COMPARED_VERSIONS):
        return None
    metadata = compiled.metadata
    plain = metadata.num_ctas == 1 and not metadata.launch_cooperative_grid and not metadata.launch_pdl
    if not plain or metadata.global_scratch_size or metadata.profile_scratch_size:
        return None
    values = dict(zip(kernel.arg_names, args, strict=False)) | meta
    arguments = []
    for name, kind in compiled.src.signature.items():
        if kind == "constexpr":  # compiled in: declared so, absent, or equal to one
            continue
        argument = _argument(kind, values.get(name))
        if argument is None:
            return None
        arguments.append(argument)
    _given_away[compiled.function] = compiled
    x, y, z = (*grid, 1, 1)[:3]
    return Launch(
        function=compiled.function,
        grid=(x, y, z),
        threads=32 * metadata.num_warps,
        shared_bytes=metadata.shared,
        arguments=(*arguments, *[0] * _SCRATCH_POINTERS),
    )


def _argument(kind: str, value: Any) -> Tensor | int | None:
    if kind.startswith("*") and isinstance(value, Tensor):
        return value
    if kind in _INTEGERS and isinstance(value, int):
        return value % 2**64
    if kind in _FLOATS and isinstance(value, int | float):
        return int.from_bytes(bytes(_FLOATS[kind](value)), "little")
    return None
