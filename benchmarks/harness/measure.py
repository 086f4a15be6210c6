"""From an op's declaration to rows of results.

Providers: ``parallel_ops``; ``eager``, the PyTorch composite; ``compile``, torch.compile of that composite with default
options, compiled before the timing; the op's peers, where they are installed and run on the device; and ``clone``,
torch.clone of a tensor that moves as many bytes as the op must. Clone is the roofline and runs in the same rounds. On
CPU part of its time goes into fresh memory pages, which an op that asks for huge pages saves: it can pass 100%.

Directions: the forward as training runs it, with what backward needs being saved; the backward alone, on a retained
graph; "full", one after the other; and on a tiny tensor "overhead", the host's time for forward and backward.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch._functorch.config
from torch import Tensor

from benchmarks.harness.environment import Environment, last_level_cache_bytes
from benchmarks.harness.memory import peak_bytes
from benchmarks.harness.results import Row
from benchmarks.harness.spec import DIRECTIONS, OVERHEAD, Benchmark, Inputs, Provider, Shape
from benchmarks.harness.timing import Call, CudaTimer, HostTimer, Rounds, Stats, Timer, take_turns

_OVERHEAD_REPEAT = 50
# A CUDA event pair spans calls that take about so long, which is long against its resolution.
_CUDA_BATCH_S = 5e-4
_CPU_ROUNDS = Rounds(5, 60, 3.5)


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Attributes:
        input_bytes: Size of all input sets together.
        shapes: The first so many shapes of an op; ``None`` for all.
        compiled: Measures the composite, eager and by torch.compile, beside the op.
        replay: Measures replays of a CUDA graph of the op, too.
    """

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    quick: bool = False
    backend: str = "inductor"
    rounds: Rounds = _CPU_ROUNDS
    input_bytes: int = 512 << 20
    shapes: int | None = None
    compiled: bool = True
    replay: bool = False

    @classmethod
    def standard(
        cls, device: torch.device, dtypes: tuple[torch.dtype, ...], quick: bool, shapes: int | None = None,
        compiled: bool = True, replay: bool = False,
    ) -> "Settings":  # fmt: skip
        if device.type == "cuda":
            rounds, input_bytes = Rounds(10 if quick else 30), 16 << 30
        else:
            rounds, input_bytes = (Rounds(3, 60, 0.4), 64 << 20) if quick else (cls.rounds, cls.input_bytes)
        return cls(
            device, dtypes, quick, rounds=rounds, input_bytes=input_bytes, shapes=shapes, compiled=compiled,
            replay=replay,
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One measurement: every provider of one op at one shape, dtype and direction."""

    op: str
    shape: Shape
    dtype: torch.dtype
    direction: str
    build: Callable[[], Inputs]
    providers: dict[str, Provider]
    bytes: int | None  # that the op must move; None for overhead


def cases(benchmark: Benchmark, settings: Settings, problems: list[str]) -> Iterator[Case]:
    """The cases of one op. Providers that cannot run are left out and named in ``problems``."""
    device = settings.device
    for index, dtype in enumerate(settings.dtypes):
        shapes = benchmark.shapes(device.type, dtype, settings.quick)[: settings.shapes]
        if index == 0:  # the host's work does not depend on the dtype
            shapes = [*shapes, benchmark.tiny]
        for shape in shapes:
            directions = (OVERHEAD,) if shape == benchmark.tiny else benchmark.directions
            build = functools.partial(benchmark.build, shape, dtype, device)
            providers = _working(_providers(benchmark, settings), build, benchmark.op, problems)
            for direction in directions:
                able = {name: fn for name, fn in providers.items() if direction in _directions(benchmark, name)}
                moved = None if direction == OVERHEAD else benchmark.traffic(shape, dtype).of(direction)
                yield Case(benchmark.op, shape, dtype, direction, build, able, moved)


def measure(case: Case, settings: Settings, environment: Environment) -> list[Row]:
    """Times the case's providers against each other, clone among them."""
    torch.manual_seed(0)
    sets = _input_sets(case, settings)
    calls = {name: [_call(case, fn, *inputs) for inputs in sets] for name, fn in case.providers.items()}
    if settings.replay and case.direction in ("forward", "full"):
        ours = case.providers["parallel_ops"]
        calls["replay"] = [_replayed(_call(case, ours, tuple(map(_copy, inputs)), grad)) for inputs, grad in sets]
    moved = dict.fromkeys(calls, case.bytes)
    if case.bytes is not None:
        source = torch.randn(case.bytes // 2 // case.dtype.itemsize, dtype=case.dtype, device=settings.device)
        calls["clone"] = [functools.partial(torch.clone, source.clone()) for _ in sets]
        moved["clone"] = 2 * source.nbytes
    stats = take_turns(calls, _timer(case, settings, calls["parallel_ops"]), settings.rounds)
    peaks = {}
    if case.direction == "full":
        peaks = {name: peak_bytes(calls[name][0], settings.device) / 2**20 for name in case.providers}
    rates = {name: size / stats[name].median for name, size in moved.items() if size is not None}
    return [_row(case, name, stats[name], moved[name], rates, peaks.get(name), environment) for name in calls]


def _row(
    case: Case, provider: str, stats: Stats, moved: int | None, rates: dict[str, float], peak_mib: float | None,
    environment: Environment,
) -> Row:  # fmt: skip
    rate = rates.get(provider)
    return Row(
        op=case.op,
        direction=case.direction,
        shape="x".join(map(str, case.shape)),
        dtype=str(case.dtype).removeprefix("torch."),
        provider=provider,
        ms_median=1e3 * stats.median,
        ms_p25=1e3 * stats.p25,
        ms_p75=1e3 * stats.p75,
        gb_per_s=None if rate is None else rate / 1e9,
        percent_of_clone=None if rate is None else 100 * rate / rates["clone"],
        peak_mib=peak_mib,
        overhead_us=1e6 * stats.median if case.direction == OVERHEAD else None,
        bytes=moved,
        **vars(environment),
    )


def _providers(benchmark: Benchmark, settings: Settings) -> dict[str, Provider]:
    providers: dict[str, Provider] = {"parallel_ops": benchmark.ours}
    if settings.compiled:
        providers |= _composites(benchmark, settings)
    for name, peer in benchmark.peers.items():
        if settings.device.type in peer.devices and (settings.compiled or not peer.compiles):
            with contextlib.suppress(ImportError):
                providers[name] = peer.load()
    return providers


def _composites(benchmark: Benchmark, settings: Settings) -> dict[str, Provider]:
    # Each shape is compiled for itself, as in training, where shapes are fixed. The reset keeps earlier shapes from
    # counting against dynamo's limit. Donated buffers forbid the retained graph that the backward is timed on; all
    # they could spare here is memory for temporaries, and these composites save inputs, outputs and masks.
    torch.compiler.reset()
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(benchmark.eager, fullgraph=True, dynamic=False, backend=settings.backend)
    return {"eager": benchmark.eager, "compile": compiled}


def _directions(benchmark: Benchmark, provider: str) -> tuple[str, ...]:
    return benchmark.peers[provider].directions if provider in benchmark.peers else (*DIRECTIONS, OVERHEAD)


def _working(
    providers: dict[str, Provider], build: Callable[[], Inputs], op: str, problems: list[str]
) -> dict[str, Provider]:
    """Runs each provider once, backward too where inputs have gradients, which compiles it; drops those that raise."""
    inputs = build()
    working = {}
    for name, fn in providers.items():
        try:
            y = fn(*inputs)
            if leaves := _leaves(inputs):
                torch.autograd.grad(y, leaves, torch.randn_like(y))
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            problems.append(f"{op}: {name} left out: {type(error).__name__}: {first_line}")
        else:
            working[name] = fn
    return working


def _input_sets(case: Case, settings: Settings) -> list[tuple[Inputs, Tensor]]:
    """Inputs and incoming gradient, so often that three times the last-level cache lies between two uses of a set.

    The sets hold the same values at different addresses.
    """
    inputs = case.build()
    with torch.no_grad():
        grad = torch.randn_like(next(iter(case.providers.values()))(*inputs))
    size = grad.nbytes + sum(t.nbytes for t in inputs if isinstance(t, Tensor))
    wanted = math.ceil(3 * last_level_cache_bytes(settings.device) / size)
    count = 1 if case.direction == OVERHEAD else max(2, min(wanted, settings.input_bytes // size))
    copies = [(tuple(map(_copy, inputs)), grad.clone()) for _ in range(count - 1)]
    return [(inputs, grad), *copies]


def _copy(value: object) -> object:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _leaves(inputs: Sequence[object]) -> list[Tensor]:
    return [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]


def _call(case: Case, fn: Provider, inputs: Inputs, grad: Tensor) -> Call:
    leaves = _leaves(inputs)
    if case.direction == "forward" or not leaves:
        return functools.partial(fn, *inputs)
    if case.direction == "backward":
        # A dense gradient, as a model gives; that of .sum() would be one number read again and again.
        return functools.partial(torch.autograd.grad, fn(*inputs), leaves, grad, retain_graph=True)
    return lambda: torch.autograd.grad(fn(*inputs), leaves, grad)


def _replayed(call: Call) -> Call:
    """A replay of what ``call`` launches, which has tensors of its own: nothing else used them on another stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> object:
        graph.replay()
        return kept  # whose memory the graph writes

    return replay


def _timer(case: Case, settings: Settings, calls: Sequence[Call]) -> Timer:
    if case.bytes is None:
        return HostTimer(settings.device, repeat=_OVERHEAD_REPEAT)
    if settings.device.type != "cuda":
        return HostTimer(settings.device)
    calls[0]()  # compiles
    (seconds,) = CudaTimer(repeat=1).round([calls[:1]])
    return CudaTimer(repeat=max(1, min(10, round(_CUDA_BATCH_S / seconds))))
