"""Launches that are executed here: the launchers run as they are, on tensors of the CPU."""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from ptx import aot
from ptx.machine import Approximation, Machine
from ptx.memory.global_memory import GlobalMemory
from ptx.program import Program, parse
from ptx.report import Report
from ptx.values import Array, Fault

# Threads of a launch that are run at once: more do not fit the caches, fewer leave NumPy's calls no work.
_THREADS = 1 << 15
_EXACT = Approximation(None)


@functools.cache
def compiled(launch: aot.Launch, capability: int, machine_code: bool = False) -> tuple[Program, int, int]:
    """(program, warps, bytes of shared memory). With ``machine_code``, what Triton caches is also what
    ``aot.compile_for`` reads."""
    kernel = aot.compiled(launch, capability, machine_code=machine_code)
    return parse(kernel.asm["ptx"]), kernel.metadata.num_warps, kernel.metadata.shared


class _Unwritten(TorchDispatchMode):
    """Notes what torch.empty and its kin allocate, until an op or a kernel writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.flags: dict[int, Array] = {}
        self._keep: list[torch.Tensor] = []  # so that no storage takes the address of another

    def note(self, t: torch.Tensor) -> None:
        self.flags[t.untyped_storage().data_ptr()] = np.ones(t.untyped_storage().nbytes(), np.bool_)
        self._keep.append(t)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.name.split("::")[1] in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"):
            if isinstance(out, torch.Tensor) and out.device.type == "cpu":
                self.note(_filled(out))
        else:
            for argument, value in zip(schema.arguments, args, strict=False):
                if argument.is_write and isinstance(value, torch.Tensor):
                    self.flags.pop(value.untyped_storage().data_ptr(), None)
        return out


def _filled(t: torch.Tensor) -> torch.Tensor:
    """Full of NaN or of large integers, so that an element that no kernel writes is seen."""
    return t.fill_(torch.nan if t.is_floating_point() else True if t.dtype is torch.bool else torch.iinfo(t.dtype).max)


_current: list[_Unwritten] = []


def unwritten(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An output full of NaN or of large integers, for which to read it before a kernel wrote it is a fault."""
    t = _filled(torch.empty(shape, dtype=dtype))
    if _current:
        _current[-1].note(t)
    return t


@contextlib.contextmanager
def executed(
    capability: int,
    *,
    exact: bool = False,
    programs: int | None = None,
    shuffle: int | None = None,
) -> Iterator[list[Report]]:
    """Kernels that are launched in the block are compiled for ``sm_<capability>`` and run here.

    ``exact``: approximate instructions are exact, instead of off by their worst error in directions that are drawn.
    ``programs``: run so many programs of each launch, evenly spread over the grid, instead of all; of a grid of tiles
    of which the last of a row is partly empty, as many as whole rows of tiles need, two at least. Where some programs
    wait for others, the workers, both kinds have a report of their own.
    ``shuffle``: all programs of a launch at once, in an order set by this number, instead of in theirs.
    """
    reports: list[Report] = []
    notes = _Unwritten()
    approximation = Approximation(None if exact else 0)

    def execute(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        reports.extend(_run(self, args, kwargs, grid, capability, programs, notes, approximation, shuffle=shuffle))

    original = JITFunction.run
    JITFunction.run = execute
    _current.append(notes)
    try:
        with notes, aot.chosen_for(capability):
            yield reports
    finally:
        JITFunction.run = original
        _current.pop()


def rerun(launch: aot.Launch, capability: int, programs: int) -> Report:
    """A launch that ``aot.recorded`` noted, on as many of its programs."""
    args, kwargs, grid = launch.call
    return _run(launch.kernel, args, kwargs, grid, capability, programs, _Unwritten(), _EXACT, machine_code=True)[0]


@contextlib.contextmanager
def ops_launch_kernels() -> Iterator[None]:
    """The ops of the package launch their Triton kernels on tensors of the CPU, and on tensors without memory.

    Outputs that an op allocates are unwritten as ``unwritten`` has them, in a block of ``executed``.
    """
    from parallel_ops import ops  # noqa: F401  (registers them)
    from parallel_ops._internal.dispatch.registration import cuda_kernels

    def noted(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _current[-1] if _current else contextlib.nullcontext():  # torch leaves a mode while it handles an op
                return kernel(*args, **kwargs)

        return call

    library = torch.library.Library("parallel_ops", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            for name, kernel in cuda_kernels.items():
                for key in ("CPU", "Meta"):
                    library.impl(name, noted(kernel), key, allow_override=True)
        yield
    finally:
        library._destroy()


def _run(
    kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any, capability: int,
    sample: int | None, notes: _Unwritten, approximation: Approximation, machine_code: bool = False,
    shuffle: int | None = None,
) -> list[Report]:  # fmt: skip
    bound = kernel.signature.bind(*args, **{k: v for k, v in kwargs.items() if k not in aot.OPTIONS})
    bound.apply_defaults()
    launch = aot.specialise(kernel, args, dict(kwargs))
    program, warps, shared = compiled(launch, capability, machine_code)
    grid = grid(dict(bound.arguments)) if callable(grid) else grid
    types = dict(launch.signature)
    values = [
        (parameter.name.removesuffix("_ptr"), value)
        for parameter, value in zip(kernel.params, bound.arguments.values(), strict=True)
        if types[parameter.name] != "constexpr"
    ]
    try:
        tiles = _tiles_of_a_row(bound.arguments)
        total, workers = math.prod(grid), bound.arguments.get("workers")
        all_of_them = np.arange(total)
        if shuffle is not None:
            np.random.default_rng(shuffle).shuffle(all_of_them)
        parts, counted = [all_of_them], None
        if sample is not None and workers in (None, total):
            parts = [_spread(total, sample, tiles)]
        elif sample is not None:  # those that wait find what all others would have counted
            parts = [_spread(workers, sample, tiles), workers + _spread(total - workers, sample, 1)]
            counted = {"counter": workers}
        reports = [
            run(
                program, grid, warps, values, shared, part, notes.flags, approximation, launch, counted,
                total if shuffle is not None else None,
            )
            for part in parts
        ]  # fmt: skip
        if len(reports) > 1:
            reports[0].stands_for, reports[1].stands_for, reports[1].waits = workers, total - workers, True
        return reports
    except Fault as fault:
        raise Fault(f"{launch}, grid {tuple(grid)}: {fault}") from None


def _tiles_of_a_row(arguments: Mapping[str, Any]) -> int:
    """Programs that differ, since columns do not fill the last one's tile; launchers number tiles by rows."""
    tiles: int = arguments.get("col_blocks", 1)
    return tiles if tiles > 1 and arguments["cols"] % arguments["BLOCK_COLS"] else 1


def _spread(total: int, sample: int | None, tiles: int) -> Array:
    """``sample`` of the numbers below ``total``, in whole rows of ``tiles``; one alone may be any."""
    if sample is None or sample >= total:
        return np.arange(total)
    if sample == 1 or total % tiles:
        tiles = 1
    rows = min(total // tiles, sample if tiles == 1 else max(2, sample // tiles))
    first = np.unique(np.linspace(0, total // tiles - 1, rows).round().astype(np.int64))
    return (first[:, None] * tiles + np.arange(tiles)).ravel()


def run(
    program: Program, grid: tuple[int, ...], warps: int, arguments: list[tuple[str, Any]], shared_bytes: int = 0,
    numbers: Array | None = None, unwritten: dict[int, Array] | None = None,
    approximation: Approximation = _EXACT, specialised: aot.Launch | None = None,
    counted: Mapping[str, int] | None = None, at_once: int | None = None,
) -> Report:  # fmt: skip
    """Runs ``program``; ``arguments``: (name, tensor or number) of each parameter.

    ``numbers``: of the programs to run; all by default. ``counted``: what a counter has at first, by its name.
    """
    memory = GlobalMemory(unwritten or {})
    values = [memory.pointer(name, v) if isinstance(v, torch.Tensor) else v for name, v in arguments]
    values += [0] * (len(program.parameters) - len(values))  # scratch memory, of which Triton's kernels ask for none
    named = {name: value for (name, _), value in zip(program.parameters, values, strict=True)}
    for buffer in memory.buffers:
        if counted and buffer.name in counted:
            buffer.data[:4].view(np.int32)[:] = counted[buffer.name]
    shape = (*grid, 1, 1)[:3]
    if numbers is None:
        numbers = np.arange(shape[0] * shape[1] * shape[2])
    report = Report(specialised, shape, warps, len(numbers), shared_bytes, math.prod(shape))
    report.names = {i: instruction.name for i, instruction in enumerate(program.instructions)}
    report.sizes = {b.name: len(b.data) for b in memory.buffers}
    report.element_bytes = {b.name: b.unit for b in memory.buffers}
    at_once = at_once or max(1, _THREADS // (32 * warps))
    parts = [numbers[first : first + at_once] for first in range(0, len(numbers), at_once)]
    for part in parts:
        Machine(program, shape, part, warps, named, memory, shared_bytes, report, approximation).run()
    return report
