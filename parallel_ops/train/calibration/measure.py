"""Measurements of a rank's device and of its links to the others. All ranks measure at the same time, as they
compute in training: processes that share cores, memory or a bus slow each other down."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_ops._internal.distributed.compat import all_gather_single, reduce_scatter_single
from parallel_ops.comm import ParallelMesh
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.ops import flash_attention
from parallel_ops.planner.plan import Plan
from parallel_ops.train.calibration.fit import MORE, SHARED, Measured
from parallel_ops.train.parallelize_model import micro_batch, parallelize
from parallel_ops.train.planner_model import planner_model
from parallel_ops.train.step.optimizer import optimizer_of, update
from parallel_ops.train.step.settings import OptimizerSettings

# Sizes of matmuls, layer, update (parameters) and collectives (bytes): what a small run on CPUs has, and a large one
# on GPUs.
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "products": ((256, 256, 256), (256, 768, 256), (256, 1024, 256), (256, 256, 1024)),
        "layer": {"hidden_size": 256, "num_heads": 4, "seq_length": 256, "vocab_size": 1024},
        "sequences": 1,
        "update": 2**22,
        "collectives": (2**16, 2**18, 2**20, 2**22),
    },
    "cuda": {
        "products": ((4096, 4096, 4096), (4096, 16384, 4096), (4096, 4096, 16384), (8192, 8192, 8192)),
        "layer": {"hidden_size": 4096, "num_heads": 32, "seq_length": 4096, "vocab_size": 1024},
        "sequences": 1,
        "update": 128 * 2**20,
        "collectives": (2**18, 2**22, 2**26, 2**28),
    },
}
# Parts of the time that the measurements share: about as many with several ranks; with one it takes a third of them.
_PARTS = 72
# ZeRO stages of micro-batches, not the last of a step, that find parameters whole and reduce nothing, that reduce
# gradients, and that gather twice and reduce.
_WHOLE, _REDUCED, _GATHERED = 1, 2, 3
# Seconds of calls without a pause, at least three calls.
_WINDOW = 0.05


class Clock:
    """Times calls that all ranks make at once, one after another, in windows that fill ``seconds``.

    A window is long beside the time slice of a scheduler: ranks that share cores wait for each other in it, as they do
    in training. It takes as long as its slowest rank: of ranks that share cores, some end early in a window and leave
    their core to the others, which in training would wait for these. Of the windows it is the median of a GPU, and the
    fastest of CPUs, where other programs delay the rest.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds

    def __call__(self, call: Callable[[], object], *, parts: int = 1) -> float:
        return self.in_turn([call], parts=parts)[0]

    def in_turn(self, calls: Sequence[Callable[[], object]], *, parts: int = 1) -> list[float]:
        """Seconds of several calls, whose windows take turns: what slows the machine for a while slows all of them, and
        leaves their differences."""
        for call in calls:
            self._window(call, 1)
        # All ranks make as many calls.
        each = [self._slowest(self._window(call, 3)) for call in calls]
        seconds = self.seconds * parts
        counts = [max(3, int(min(_WINDOW, seconds / 3) / max(one, 1e-6))) for one in each]
        rounds = max(3, int(seconds / sum(count * one for count, one in zip(counts, each, strict=True))))
        usual = min if self.device.type == "cpu" else statistics.median
        windows = [
            [self._slowest(self._window(call, count)) for call, count in zip(calls, counts, strict=True)]
            for _ in range(rounds)
        ]
        return [usual(found) for found in zip(*windows, strict=True)]

    def _window(self, call: Callable[[], object], count: int) -> float:
        if dist.is_initialized():
            dist.barrier()
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self._wait()
        return (time.perf_counter() - start) / count

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _slowest(self, seconds: float) -> float:
        if not dist.is_initialized():
            return seconds
        found = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()


def measure(device: torch.device, seconds: float, sizes: dict[str, Any] | None = None) -> Measured:
    """Measures this rank's device and the default process group, for about ``seconds``. Every rank calls it.

    ``sizes``: in place of those of ``SIZES``.
    """
    sizes = SIZES[device.type] if sizes is None else sizes
    clock = Clock(device, seconds / _PARTS)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    products = tuple((m, n, k, clock(_product(m, n, k, device, dtype))) for m, n, k in sizes["products"])
    shape, sequences = sizes["layer"], sizes["sequences"]
    attention = _attention(clock, shape, sequences, device, dtype)
    layer, launch = _layer(clock, shape, sequences, device, dtype)
    more = _layer(clock, shape, MORE * sequences, device, dtype)[0]
    collectives: tuple[tuple[str, int, float], ...] = ()
    beside, shared, sharded, sharded_over_ranks = (0.0, 0.0, 0.0), 0.0, (0.0, 0.0, 0.0), (0.0, 0.0)
    if dist.is_initialized() and dist.get_world_size() > 1:
        collectives = tuple(_collectives(clock, sizes, device, dtype))
        beside = _beside(clock, sizes, device, dtype)
        ranks = dist.get_world_size()
        whole, reduced, gathered = _sharded(
            clock, shape, sequences, device, ParallelMesh(dp_shard=ranks), (_WHOLE, _REDUCED, _GATHERED)
        )
        sharded = whole, reduced, gathered
        if ranks % SHARED == shape["num_heads"] % SHARED == 0:
            mesh = ParallelMesh(dp_shard=ranks // SHARED, tp=SHARED)
            shared, _ = _layer(clock, shape, sequences, device, dtype, mesh["tp"])
            if ranks > SHARED:
                whole, gathered = _sharded(clock, shape, sequences, device, mesh, (_WHOLE, _GATHERED))
                sharded_over_ranks = whole, gathered
    return Measured(
        products=products,
        attention=attention,
        layer=layer,
        layer_of_more=more,
        layer_over_ranks=shared,
        sharded=sharded,
        sharded_over_ranks=sharded_over_ranks,
        update=(sizes["update"], _update(clock, sizes["update"], device)),
        collectives=collectives,
        product_beside=beside[0],
        collective_beside=beside[1],
        both=beside[2],
        launch=0.0 if device.type == "cpu" else launch,
        model=planner_model(TransformerConfig(num_layers=1, **shape), shape["seq_length"], "measured"),
        sequences=sequences,
        dtype="fp32" if device.type == "cpu" else "bf16",
    )


def _product(m: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    return lambda: torch.mm(a, b.t(), out=out)


def _attention(
    clock: Clock, shape: dict[str, Any], sequences: int, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    heads, head = shape["num_heads"], shape["hidden_size"] // shape["num_heads"]
    q, k, v = (
        torch.randn(shape["seq_length"], sequences, heads, head, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    forward = clock(lambda: flash_attention(q, k, v), parts=2)
    out = flash_attention(q, k, v)
    gradient = torch.randn_like(out)
    backward = clock(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), parts=2)
    return forward, backward


def _layer(
    clock: Clock, shape: dict[str, Any], sequences: int, device: torch.device, dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of one layer, forward and backward, and of the launch of its forward pass: what two more layers take.

    ``mesh``: ranks that share the layer and its sequence.
    """
    tokens = torch.randint(shape["vocab_size"], (shape["seq_length"], sequences), device=device)
    calls: list[Callable[[], object]] = []
    launches = []
    for layers in (1, 3):
        config = TransformerConfig(num_layers=layers, **shape)
        model = Transformer(config, tp_mesh=mesh, sequence_parallel=mesh is not None).to(device=device, dtype=dtype)
        calls.append(lambda model=model: model(tokens, tokens).backward())  # type: ignore[misc]
        launches.append(_launch(model, tokens, clock))
    seconds = clock.in_turn(calls, parts=8)
    return (seconds[1] - seconds[0]) / 2, max(0.0, (launches[1] - launches[0]) / 2)


def _sharded(
    clock: Clock, shape: dict[str, Any], sequences: int, device: torch.device, mesh: ParallelMesh,
    stages: Sequence[int],
) -> list[float]:  # fmt: skip
    """Seconds of one layer as ``Trainer`` shards it over ``mesh``, for each ZeRO stage: what two more layers take."""
    tokens = torch.randint(shape["vocab_size"], (shape["seq_length"], sequences), device=device)
    dp, tp = mesh.size("dp"), mesh.size("tp")
    calls: list[Callable[[], object]] = []
    for zero in stages:
        plan = Plan(
            dp=dp, tp=tp, sequence_parallel=tp > 1, zero=zero, micro_batch=sequences, global_batch=dp * sequences,
            dtype="fp32" if device.type == "cpu" else "bf16",
        )  # fmt: skip
        for layers in (1, 3):
            model = Transformer(TransformerConfig(num_layers=layers, **shape), device="meta")
            model = cast(Transformer, parallelize(model, mesh, plan)).to_empty(device=device)
            model.reset_parameters()
            micro_batch(model, zero, last=False)
            calls.append(lambda model=model: model(tokens, tokens).backward())  # type: ignore[misc]
    seconds = clock.in_turn(calls, parts=4 * len(stages))
    return [(three - one) / 2 for one, three in zip(seconds[::2], seconds[1::2], strict=True)]


def _launch(model: Transformer, tokens: Tensor, clock: Clock) -> float:
    """Seconds of the host for a forward pass, which a GPU computes meanwhile; 0 on CPUs, where it is part of a pass."""
    if clock.device.type == "cpu":
        return 0.0
    found = []
    for _ in range(10):
        torch.cuda.synchronize(clock.device)
        start = time.perf_counter()
        model(tokens, tokens)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _update(clock: Clock, parameters: int, device: torch.device) -> float:
    """Seconds of norm, clipping and AdamW, as ``Trainer`` does them."""
    model = torch.nn.ParameterList(torch.randn(parameters // 4, 1, device=device) for _ in range(4))
    optimizer = optimizer_of(model, OptimizerSettings())
    gradients = [torch.randn_like(p) for p in model]

    def step() -> None:
        for parameter, gradient in zip(model, gradients, strict=True):
            parameter.grad = gradient
        update(optimizer, 1.0)

    return clock(step, parts=2)


def _collectives(
    clock: Clock, sizes: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, int, float]]:
    """Kind, bytes of the whole tensor (of all-to-all, on each rank) and seconds, each between matmuls.

    So ranks arrive at different times, as they do in training: one after another collectives take a half of that on
    CPUs, where a rank that waits for long goes to sleep.
    """
    ranks = dist.get_world_size()
    m, n, k = sizes["products"][0]
    product = _product(m, n, k, device, dtype)
    alone = clock(product)

    def between(collective: Callable[[], object]) -> Callable[[], object]:
        return lambda: (product(), collective())

    for size in sizes["collectives"]:
        part = max(1, size // 4 // ranks)
        whole, shard = torch.zeros(part * ranks, device=device), torch.zeros(part, device=device)
        out = torch.zeros_like(whole)
        calls: dict[str, Callable[[], object]] = {
            "all-reduce": lambda whole=whole: dist.all_reduce(whole),  # type: ignore[misc]
            "all-gather": lambda whole=whole, shard=shard: all_gather_single(whole, shard),  # type: ignore[misc]
            "reduce-scatter": lambda whole=whole, shard=shard: reduce_scatter_single(shard, whole),  # type: ignore[misc]
            "all-to-all": lambda whole=whole, out=out: dist.all_to_all_single(out, whole),  # type: ignore[misc]
        }
        for kind, call in calls.items():
            yield kind, size, max(1e-6, clock(between(call)) - alone)


def _beside(
    clock: Clock, sizes: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> tuple[float, float, float]:
    """Seconds of matmuls, of an all-reduce, and of both at the same time, of about equal length."""
    tensor = torch.zeros(sizes["collectives"][-1] // 4, device=device)
    m, n, k = sizes["products"][-1]
    product = _product(m, n, k, device, dtype)
    one, collective = clock(product), clock(lambda: dist.all_reduce(tensor), parts=2)
    count = max(1, round(collective / one))

    def both() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        for _ in range(count):
            product()
        work.wait()

    def products() -> None:
        for _ in range(count):
            product()

    return clock(products, parts=2), collective, clock(both, parts=2)
