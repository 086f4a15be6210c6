"""Measurements of a rank's device and of its links to the others. All ranks measure at the same time, as they
compute in training: processes that share cores, memory or a bus slow each other down."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
        self.device, self.seconds, self.cpu = device, seconds, device.type == "cpu"
        self.options: dict[str, Any] = {"device": device, "dtype": torch.float32 if self.cpu else torch.bfloat16}

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
        usual = min if self.cpu else statistics.median
        windows = [
            [self._slowest(self._window(call, count)) for call, count in zip(calls, counts, strict=True)]
            for _ in range(rounds)
        ]
        return [usual(found) for found in zip(*windows, strict=True)]

    def of_a_layer(
        self, shape: dict[str, Any], sequences: int, kinds: Sequence[Callable[[TransformerConfig], nn.Module]],
        parts: int,
    ) -> list[float]:  # fmt: skip
        """Seconds of a layer, forward and backward, in each kind of model: what two more layers take."""
        tokens = torch.randint(shape["vocab_size"], (shape["seq_length"], sequences), device=self.device)
        models = [kind(TransformerConfig(num_layers=layers, **shape)) for kind in kinds for layers in (1, 3)]
        calls = [functools.partial(lambda model: model(tokens, tokens).backward(), model) for model in models]
        seconds = self.in_turn(calls, parts=parts)
        return [(three - one) / 2 for one, three in zip(seconds[::2], seconds[1::2], strict=True)]

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
        if not self.cpu:
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
    clock, shape, sequences = Clock(device, seconds / _PARTS), sizes["layer"], sizes["sequences"]
    dtype = "fp32" if clock.cpu else "bf16"

    def plain(config: TransformerConfig, mesh: DeviceMesh | None = None) -> Transformer:
        return Transformer(config, tp_mesh=mesh, sequence_parallel=mesh is not None).to(**clock.options)

    def sharded(mesh: ParallelMesh, stages: Sequence[int]) -> tuple[float, ...]:
        """One layer as ``Trainer`` shards it over ``mesh``, for each ZeRO stage."""
        kinds = [functools.partial(_sharded, device=device, mesh=mesh, plan=Plan(
            dp=mesh.size("dp"), tp=mesh.size("tp"), sequence_parallel=mesh.size("tp") > 1, zero=zero, dtype=dtype,
            micro_batch=sequences, global_batch=mesh.size("dp") * sequences,
        )) for zero in stages]  # fmt: skip
        return tuple(clock.of_a_layer(shape, sequences, kinds, 4 * len(stages)))

    found: dict[str, Any] = {
        "products": tuple((m, n, k, clock(_product(clock, m, n, k))) for m, n, k in sizes["products"]),
        "attention": _attention(clock, shape, sequences),
        "layer": clock.of_a_layer(shape, sequences, [plain], 8)[0],
        "launch": 0.0 if clock.cpu else _launch(clock, shape, sequences, plain),
        "layer_of_more": clock.of_a_layer(shape, MORE * sequences, [plain], 8)[0],
        "update": (sizes["update"], _update(clock, sizes["update"])),
    }
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks > 1:
        found["collectives"] = tuple(_collectives(clock, sizes))
        found |= zip(("product_beside", "collective_beside", "both"), _beside(clock, sizes), strict=True)
        found["sharded"] = sharded(ParallelMesh(dp_shard=ranks), (_WHOLE, _REDUCED, _GATHERED))
        if ranks % SHARED == shape["num_heads"] % SHARED == 0:
            mesh = ParallelMesh(dp_shard=ranks // SHARED, tp=SHARED)
            shared = functools.partial(plain, mesh=mesh["tp"])
            found["layer_over_ranks"] = clock.of_a_layer(shape, sequences, [shared], 8)[0]
            if ranks > SHARED:
                found["sharded_over_ranks"] = sharded(mesh, (_WHOLE, _GATHERED))
    model = planner_model(TransformerConfig(num_layers=1, **shape), shape["seq_length"], "measured")
    return Measured(**found, model=model, sequences=sequences, dtype=dtype)


def _sharded(config: TransformerConfig, device: torch.device, mesh: ParallelMesh, plan: Plan) -> nn.Module:
    """A model whose parameters are those of a micro-batch that is not the last of a step."""
    model = parallelize(Transformer(config, device="meta"), mesh, plan).to_empty(device=device)
    cast(Transformer, model).reset_parameters()
    micro_batch(model, plan.zero, last=False)
    return model


def _product(clock: Clock, m: int, n: int, k: int) -> Callable[[], Tensor]:
    a, b, out = (torch.randn(size, **clock.options) for size in ((m, k), (n, k), (m, n)))
    return lambda: torch.mm(a, b.t(), out=out)


def _attention(clock: Clock, shape: dict[str, Any], sequences: int) -> tuple[float, float]:
    heads, head = shape["num_heads"], shape["hidden_size"] // shape["num_heads"]
    sizes = shape["seq_length"], sequences, heads, head
    q, k, v = (torch.randn(sizes, **clock.options, requires_grad=True) for _ in range(3))
    forward = clock(lambda: flash_attention(q, k, v), parts=2)
    out = flash_attention(q, k, v)
    gradient = torch.randn_like(out)
    backward = clock(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), parts=2)
    return forward, backward


def _launch(
    clock: Clock, shape: dict[str, Any], sequences: int, kind: Callable[[TransformerConfig], nn.Module]
) -> float:
    """Seconds of the host for the forward pass of a layer, which a GPU computes meanwhile."""
    tokens = torch.randint(shape["vocab_size"], (shape["seq_length"], sequences), device=clock.device)
    launches = []
    for layers in (1, 3):
        model, found = kind(TransformerConfig(num_layers=layers, **shape)), []
        for _ in range(10):
            torch.cuda.synchronize(clock.device)
            start = time.perf_counter()
            model(tokens, tokens)
            found.append(time.perf_counter() - start)
        launches.append(statistics.median(found))
    return max(0.0, (launches[1] - launches[0]) / 2)


def _update(clock: Clock, parameters: int) -> float:
    """Seconds of norm, clipping and AdamW, as ``Trainer`` does them."""
    model = nn.ParameterList(torch.randn(parameters // 4, 1, device=clock.device) for _ in range(4))
    optimizer = optimizer_of(model, OptimizerSettings())
    gradients = [torch.randn_like(p) for p in model]

    def step() -> None:
        for parameter, gradient in zip(model, gradients, strict=True):
            parameter.grad = gradient
        update(optimizer, 1.0)

    return clock(step, parts=2)


def _collectives(clock: Clock, sizes: dict[str, Any]) -> Iterator[tuple[str, int, float]]:
    """Kind, bytes of the whole tensor (of all-to-all, on each rank) and seconds, each between matmuls.

    So ranks arrive at different times, as they do in training: one after another collectives take a half of that on
    CPUs, where a rank that waits for long goes to sleep.
    """
    ranks, product = dist.get_world_size(), _product(clock, *sizes["products"][0])
    alone = clock(product)
    for size in sizes["collectives"]:
        part = max(1, size // 4 // ranks)
        whole, out, shard = (torch.zeros(n, device=clock.device) for n in (part * ranks, part * ranks, part))
        calls: dict[str, Callable[[], object]] = {
            "all-reduce": functools.partial(dist.all_reduce, whole),
            "all-gather": functools.partial(all_gather_single, whole, shard),
            "reduce-scatter": functools.partial(reduce_scatter_single, shard, whole),
            "all-to-all": functools.partial(dist.all_to_all_single, out, whole),
        }
        for kind, call in calls.items():
            between = functools.partial(lambda call: (product(), call()), call)
            yield kind, size, max(1e-6, clock(between) - alone)


def _beside(clock: Clock, sizes: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds of matmuls, of an all-reduce, and of both at the same time, of about equal length."""
    tensor = torch.zeros(sizes["collectives"][-1] // 4, device=clock.device)
    product = _product(clock, *sizes["products"][-1])
    one, collective = clock(product), clock(lambda: dist.all_reduce(tensor), parts=2)
    count = max(1, round(collective / one))

    def products() -> None:
        for _ in range(count):
            product()

    def both() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        products()
        work.wait()

    return clock(products, parts=2), collective, clock(both, parts=2)
