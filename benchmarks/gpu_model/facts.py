"""Facts of a launch: counted by the executor on a sample of its programs, and read from its machine code."""

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.harness.spec import Benchmark, Provider, Shape

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from ptx import aot, machine_code
from ptx.execution import compiled, executed, ops_launch_kernels
from ptx.memory.global_memory import meta_values
from ptx.report import Report

# Programs of a launch that are run: enough that first, last and those between count (causal rows differ in length).
SAMPLE = 6


@dataclass(frozen=True)
class Operand:
    """Loads or stores of one tensor, all programs together; bytes are whole sectors of 32."""

    name: str
    stored: bool
    requested: float  # each instruction of each warp for itself
    by_program: float  # each sector once for each program that touches it
    once: float  # each sector once
    size: int
    ratio: float  # sectors moved per warp against the least that could hold the bytes
    narrow: float  # share of the bytes that moves in less than 128 bits a thread


@dataclass(frozen=True)
class Facts:
    """The programs of a launch, or of its two kinds one."""

    kernel: str
    waits: bool  # programs behind those of the same launch for which they wait
    grid: tuple[int, ...]
    programs: int
    warps: int
    registers: int
    shared_bytes: int
    spills: bool
    instructions: float  # machine instructions a warp
    special: float  # those of them for the special function unit
    trips: float  # of the main loop; 0: there is none
    rounds: float  # what a program touches is worked through in so many equal parts, one after the other
    barriers: float  # an iteration of the main loop, or a program without one
    phases: float  # loads that wait for each other: one outside loops, and one a trip unless copies run ahead
    operands: tuple[Operand, ...]


def facts(report: Report, capability: int) -> Facts:
    code = aot.compile_for(report.specialised, capability)
    program = compiled(report.specialised, capability)[0]
    issued = machine_code.issued(code.sass, program, report)
    programs = report.stands_for
    scale = programs / report.programs
    operands = []
    for stored, side in ((False, report.loads), (True, report.stores)):
        for name, t in side.items():
            by_program = t.distinct_per_program() * scale
            once = min(by_program, report.sizes[name])
            narrow = sum(n for width, n in t.widths.items() if width < 128) / max(1, t.bytes)
            ratio = t.sectors / max(1, t.least)
            operands.append(
                Operand(name, stored, 32 * t.sectors * scale, by_program, once, report.sizes[name], ratio, narrow)
            )
    loops = machine_code.memory_phases(program, report)
    main = max(loops, key=lambda loop: loop.trips, default=None)
    loading = [loop for loop in loops if loop.loads]
    return Facts(
        kernel=report.name,
        waits=report.waits,
        grid=report.grid,
        programs=programs,
        warps=report.warps,
        registers=code.registers,
        shared_bytes=max(code.shared_bytes, report.shared_bytes),
        spills=code.spills,
        instructions=issued.all,
        special=issued.count("MUFU"),
        trips=main.trips if main else 0.0,
        rounds=max(1.0, loading[0].trips) if len(loading) == 1 else 1.0,  # later loops may read the same again
        barriers=main.barriers if main else report.barriers / report.programs,
        phases=1.0 + sum(loop.trips for loop in loops if loop.loads and not loop.copies_ahead),
        operands=tuple(operands),
    )


def directions(
    benchmark: Benchmark, shape: Shape, dtype: torch.dtype, capability: int, multiprocessors: int,
    op: Provider | None = None, sample: int | None = SAMPLE,
) -> dict[str, list[Facts]]:  # fmt: skip
    """The launches of forward and backward at ``shape``, of ``op`` instead of the benchmark's own if given.

    ``sample``: programs of a launch that are run, all if None.
    """
    run = functools.partial(executed, capability, exact=True, programs=2**31 if sample is None else sample)
    reports = _run(benchmark, shape, dtype, multiprocessors, op, run)
    return {direction: [facts(r, capability) for r in found] for direction, found in reports.items()}


def launched(
    benchmark: Benchmark, shape: Shape, dtype: torch.dtype, capability: int, multiprocessors: int
) -> dict[str, list[tuple[str, int, tuple[int, int, int]]]]:
    """(kernel, programs, (registers, warps, bytes of shared memory)) of the launches, without running them.

    Programs that wait for the others are not counted.
    """
    found = _run(benchmark, shape, dtype, multiprocessors, None, aot.recorded)
    return {direction: [_use(launch, capability) for launch in launches] for direction, launches in found.items()}


def arguments_of(launch: Any) -> dict[str, Any]:
    """The arguments of the kernel, by name."""
    args, keywords, _ = launch.call
    named = {name: value for name, value in keywords.items() if name not in aot.OPTIONS}
    bound: dict[str, Any] = launch.kernel.signature.bind(*args, **named).arguments
    return bound


def _use(launch: Any, capability: int) -> tuple[str, int, tuple[int, int, int]]:
    code = aot.compile_for(launch, capability)
    warps = compiled(launch, capability)[1]
    workers = arguments_of(launch).get("workers", math.prod(launch.call[2]))
    return launch.name, workers, (code.registers, warps, code.shared_bytes)


def _give_values(t: torch.Tensor, values: torch.Tensor) -> None:
    """Gives a tensor without memory values, repeated if it is larger."""
    meta_values[t.untyped_storage()._cdata] = values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _run(
    benchmark: Benchmark, shape: Shape, dtype: torch.dtype, multiprocessors: int, op: Provider | None,
    watched: Callable[[], Any],
) -> dict[str, Any]:  # fmt: skip
    """The launches of each direction, as ``watched`` records them."""
    from parallel_ops.triton_kernels.norms import backward as asking  # the one launcher of these ops that asks

    with mock.patch.object(asking, "multiprocessors", return_value=multiprocessors), ops_launch_kernels():
        inputs = benchmark.build(shape, dtype, torch.device("meta"))
        indices = benchmark.index_values(shape) if benchmark.index_values else {}
        for argument, values in indices.items():
            _give_values(inputs[argument], values)
        with watched() as forward:
            y = (op or benchmark.ours)(*inputs)
        grad = torch.empty_like(y)
        if grad.numel() == 1:  # a loss, whose gradient is one where it is what is differentiated
            _give_values(grad, torch.ones(1, dtype=grad.dtype))
        with watched() as backward:
            y.backward(grad)
        for t in (grad, *(inputs[argument] for argument in indices)):
            meta_values.pop(t.untyped_storage()._cdata, None)
    return {"forward": forward, "backward": backward}
