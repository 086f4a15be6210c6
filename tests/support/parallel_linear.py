"""What each rank does in the tests of the linears over a group."""

import dataclasses
import functools
import itertools
import unittest.mock
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor, Shard

from parallel_ops import all_gather_linear, column_parallel_linear, linear_reduce_scatter
from parallel_ops._internal.overlap_model import CANDIDATES
from parallel_ops._internal.weight_gradients import GradientOf
from parallel_ops.comm import consistency
from parallel_ops.comm.transport.c10d import C10dTransport
from parallel_ops.tensor_parallel import (
    DeferredWeightGradients,
    all_gather_linear_reference,
    column_parallel_linear_reference,
    linear_reduce_scatter_reference,
    use_transport,
)
from parallel_ops.tensor_parallel.linear import overlap_plan as plan

OPS = {"column": all_gather_linear, "row": linear_reduce_scatter}
REFERENCES = {"column": all_gather_linear_reference, "row": linear_reduce_scatter_reference}


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers: their products and sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_()


def whole_linear(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    """Output and gradients of the linear on one process."""
    leaves = [_leaf(t) for t in (x, weight, bias) if t is not None]
    y = F.linear(*leaves)
    y.backward(grad)
    return [y.detach(), *(t.grad for t in leaves)]


def sharded_linear(
    rank: int, kind: str, whole: list[Tensor | None], sizes: list[int], options: dict[str, Any], reference: bool = False
) -> list[Tensor]:
    """(y, dx, dW, db) of this rank's shards of the tensors (x, weight, bias, dy); features are split evenly."""
    x, weight, bias, grad = whole
    world = dist.get_world_size()
    rows = lambda t: t.split(sizes)[rank]  # noqa: E731
    if kind == "column":
        shards = [rows(x), weight.chunk(world)[rank], None if bias is None else bias.chunk(world)[rank]]
        grad = grad.chunk(world, dim=-1)[rank]
    else:
        shards = [x.chunk(world, dim=-1)[rank], weight.chunk(world, dim=1)[rank], bias]
        grad = rows(grad)
    leaves = [None if t is None else _leaf(t) for t in shards]
    op = (REFERENCES if reference else OPS)[kind]
    y = op(*leaves, group=dist.group.WORLD, sizes=sizes, **options)
    y.backward(grad)
    return [y.detach(), *(t.grad for t in leaves if t is not None)]


def several_weights(rank: int, x: Tensor, weights: list[Tensor], biases: Any, grads: list[Tensor], overlap: Any):
    """(ys, dx, dWs, dbs) of one gather for several weights, which are this rank's alone; x is split evenly."""
    shard = _leaf(x.chunk(dist.get_world_size())[rank])
    ws, bs = [_leaf(w) for w in weights], None if biases is None else [_leaf(b) for b in biases]
    ys = all_gather_linear(shard, ws, bs, group=dist.group.WORLD, overlap=overlap)
    # An output that nobody used: as if its gradient were zero.
    used = [(y, g.clone()) for y, g in zip(ys, grads, strict=True) if g.any()]
    torch.autograd.backward([y for y, _ in used], [g for _, g in used])
    return [y.detach() for y in ys], shard.grad, [w.grad for w in ws], [b.grad for b in bs or []]


def _pieces(start: int, rows: int, pieces: int) -> list[slice]:
    return [slice(start + rows * j // pieces, start + rows * (j + 1) // pieces) for j in range(pieces)]


def _gathered(x: Tensor, sizes: list[int]) -> Tensor:
    out = [x.new_empty((n, *x.shape[1:])) for n in sizes]
    for source, t in enumerate(out):
        if source == dist.get_rank():
            t.copy_(x)
        dist.broadcast(t, src=source)
    return torch.cat(out)


def _owned(parts: Tensor, sizes: list[int], rank: int) -> Tensor:
    """What every rank computed for this rank's rows, added in rank order in fp32."""
    everyone = [torch.empty_like(parts) for _ in sizes]
    dist.all_gather(everyone, parts)
    mine = [p.split(sizes)[rank].float() for p in everyone]
    total = mine[0].clone()
    for p in mine[1:]:
        total = total + p
    return total


def unfused(rank: int, kind: str, tensors: list[Tensor], sizes: list[int], pieces: int) -> list[Tensor]:
    """(y, dx, dW) by broadcasts and products of the same pieces, one after the other; x, W and dy are this rank's."""
    x, weight, grad = tensors
    starts = [0, *itertools.accumulate(sizes)]
    chunks = [c for start, n in zip(starts, sizes, strict=False) for c in _pieces(start, n, pieces)]
    if kind == "column":
        whole = _gathered(x, sizes)
        y = torch.cat([torch.mm(whole[c], weight.t()) for c in chunks])
        return [y, _owned(grad @ weight, sizes, rank).to(x.dtype), grad.t() @ whole]
    y = _owned(torch.cat([torch.mm(x[c], weight.t()) for c in chunks]), sizes, rank).to(x.dtype)
    whole = _gathered(grad, sizes)
    return [y, torch.cat([torch.mm(whole[c], weight) for c in chunks]), whole.t() @ x]


def against_unfused(rank: int, kind: str, sizes: list[int], pieces: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """(y, dx, dW): unfused, then three times overlapped, on values of this rank."""
    s, k, n = sum(sizes), 24, 17
    rows = (sizes[rank], s) if kind == "column" else (s, sizes[rank])
    seed = 10 * rank
    x, grad = normal(rows[0], k, seed=seed, dtype=dtype), normal(rows[1], n, seed=seed + 1, dtype=dtype)
    weight = normal(n, k, seed=seed + 2, dtype=dtype)
    results = [unfused(rank, kind, [x, weight, grad], sizes, pieces)]
    for _ in range(3):
        leaves = [_leaf(x), _leaf(weight)]
        y = OPS[kind](*leaves, group=dist.group.WORLD, sizes=sizes, overlap=pieces)
        y.backward(grad)
        results.append([y.detach(), *(t.grad for t in leaves)])
    return results


def with_handles(rank: int, kind: str, dtype: torch.dtype, defer: bool, main: bool, autocast: bool):
    """Two backwards: ((dx, dW, db) of autograd's, the same with handles, what was pending before it was computed)."""
    results = []
    for handled in (False, True):
        weight, bias = normal(6, 8, seed=1, dtype=dtype), normal(6, seed=2, dtype=dtype)
        leaves = [_leaf(weight), _leaf(bias)]
        queue = DeferredWeightGradients() if defer and handled else None
        main_grad = torch.zeros(6, 8) if main and handled else None
        pending = []
        dx = []
        for step in range(2):
            x = _leaf(normal(4, 3, 8, seed=3 + step, dtype=dtype))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                y = OPS[kind](x, *leaves, group=dist.group.WORLD, overlap=2, main_grad=main_grad, deferred=queue)
            y.backward(normal(*y.shape, seed=5 + step).to(y.dtype))
            pending.append((0 if queue is None else len(queue), leaves[0].grad is None))
            dx.append(x.grad)
        if queue is not None:
            queue.compute(1)
            pending.append((len(queue), leaves[0].grad is None))
            queue.compute()
        assert (leaves[0].grad is None) == (main_grad is not None)
        results.append([*dx, leaves[0].grad if main_grad is None else main_grad, leaves[1].grad])
    return *results, pending


def compiled(rank: int, kind: str, backend: str, overlap: Any, around: bool):
    """(y, dx, dW, db), eager and compiled to one graph, on two sizes; with arithmetic ``around`` the op, or alone."""
    torch._dynamo.reset()

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = OPS[kind](x * 1 if around else x, w, b, group=dist.group.WORLD, overlap=overlap)
        return F.gelu(y) if around else y

    results = []
    function = torch.compile(run, fullgraph=True, backend=backend)
    for s in (4, 6):
        for f in (run, function):
            leaves = [_leaf(normal(s, 2, 8, seed=1)), _leaf(normal(6, 8, seed=2)), _leaf(normal(6, seed=3))]
            y = f(*leaves)
            y.sum().backward()
            results.append([y.detach(), *(t.grad for t in leaves)])
    return results


def with_autocast(rank: int, kind: str):
    leaves = [_leaf(normal(4, 8, seed=1)), _leaf(normal(6, 8, seed=2)), _leaf(normal(6, seed=3))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = OPS[kind](*leaves, group=dist.group.WORLD)
    y.float().sum().backward()
    cast = [_leaf(t.detach().bfloat16()) for t in leaves]
    z = OPS[kind](*cast, group=dist.group.WORLD)
    z.float().sum().backward()
    return [y.detach(), *(t.grad for t in leaves)], [z.detach(), *(t.grad for t in cast)]


def frozen(rank: int, kind: str, wanted: list[bool], overlap: Any) -> list[Any]:
    """Gradients where only some are wanted; None elsewhere."""
    leaves = [
        t.requires_grad_(n) for t, n in zip((integers(4, 8, seed=1), integers(6, 8, seed=2)), wanted, strict=True)
    ]
    OPS[kind](*leaves, group=dist.group.WORLD, overlap=overlap).sum().backward()
    return [t.grad for t in leaves]


def mismatched(rank: int, kind: str, what: str):
    """Calls that differ between ranks in a way that no rank can see by itself, or that one rank sees alone."""
    rows, columns, options = 12, 8, {}
    dtype = torch.float32
    if what == "rows":
        rows += 12 * rank
    elif what == "columns":
        columns += rank
    elif what == "dtype":
        dtype = torch.float64 if rank else dtype
    elif what == "overlap":
        options["overlap"] = 1 + rank
    elif what == "sizes":
        options["sizes"] = None if rank else [5] * dist.get_world_size()
    x, weight = torch.randn(rows, columns, dtype=dtype), torch.randn(columns, columns, dtype=dtype)
    if what == "one bad argument" and rank == 0:
        weight = weight[:, :-1]
    if what == "gradients":
        weight.requires_grad_(bool(rank))
    return OPS[kind](x, weight, group=dist.group.WORLD, **options)


def measured(rank: int, kind: str) -> tuple[list[Any], int, bool]:
    """As if a CPU's timings were worth something: (what was chosen, how often was timed, whether results are right)."""
    seconds = [[1.0, 0.5, 0.9, 0.95], [1.0, 0.99, 0.9, 0.8]][rank]  # the slowest rank's count: 2 pieces
    timed = []

    def fastest(run: Any, pieces: int, device: torch.device) -> float:
        run(pieces)
        timed.append(pieces)
        return seconds[CANDIDATES.index(pieces)]

    tensors = [integers(8, 6, seed=1), integers(4, 6, seed=2), None, integers(8, 4, seed=3)]
    want = sharded_linear(rank, kind, tensors, [4, 4], {"overlap": "off"})
    with unittest.mock.patch.multiple(plan, may_measure=lambda device: True, _fastest=fastest):
        results = [sharded_linear(rank, kind, tensors, [4, 4], {}) for _ in range(3)]
    choices = list(plan._measured[dist.group.WORLD].values())
    del plan._measured[dist.group.WORLD]
    right = all(torch.equal(a, b) for got in results for a, b in zip(got, want, strict=True))
    return choices, len(timed), right


def tasks(rank: int, kind: str, sizes: list[int]) -> list[str]:
    """What a choice of pieces is kept under, forward and backward."""
    seen: list[str] = []

    def choose(task: plan.Task, *_: Any) -> int:
        seen.append(str(task))
        return plan.OFF

    op = all_gather_linear if kind == "column" else linear_reduce_scatter
    rows = sizes[rank] if kind == "column" else sum(sizes)
    x, weight = _leaf(normal(rows, 4, seed=rank)), _leaf(normal(6, 4, seed=1))
    with unittest.mock.patch.multiple(plan, choose=choose, may_measure=lambda device: True):
        op(x, weight, group=dist.group.WORLD, sizes=sizes, overlap="auto").sum().backward()
    return seen


def timed_for_real(rank: int) -> bool:
    with unittest.mock.patch.object(plan, "may_measure", return_value=True):
        sharded_linear(
            rank, "row", [integers(8, 6, seed=i) for i in range(2)] + [None, integers(8, 8, seed=3)], [4, 4], {}
        )
    return plan._measured.pop(dist.group.WORLD) is not None


class Counting(C10dTransport):
    """The group's own backend, under another name."""

    posted = 0

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, name="counting")

    def post(self, op, chunks):
        Counting.posted += 1
        return super().post(op, chunks)

    def _collective(self, *args):
        handle = super()._collective(*args)
        Counting.posted += handle is not None
        return handle


def over_another_transport(rank: int, everywhere: bool) -> tuple[int, int]:
    """Exchanges over a transport of the caller's, and after it was given up."""
    tensors = [integers(8, 6, seed=1), integers(4, 6, seed=2), None, integers(8, 4, seed=3)]
    Counting.posted, counts = 0, []
    try:
        if everywhere or rank == 0:
            use_transport(dist.group.WORLD, Counting(dist.group.WORLD))
        for _ in range(2):
            sharded_linear(rank, "column", tensors, [4, 4], {"overlap": 2})
            counts.append(Counting.posted)
            use_transport(dist.group.WORLD, None)
    finally:
        use_transport(dist.group.WORLD, None)
    return counts[0], counts[1]


def transport_of_another_group(rank: int) -> None:
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    use_transport(dist.group.WORLD, C10dTransport(alone))


def _as_stage_output(y: Tensor) -> Tensor:
    """What a pipeline does with the output of a stage; it raises for a view."""
    assert not y._is_view()
    return y


def split_backward(rank: int, kind: str, handle: str, overlap: Any) -> tuple[list[Any], list[Any], list[int], int]:
    """((dx, dW, db) of one backward, the same of its halves, exchanges posted by each of them, entries in the queue).

    The exchanges are those of the whole backward, of the half for the input, of the half for the parameters, and of
    ``autograd.grad`` of the input alone, which must leave everything else as it is.
    """
    leaves = [_leaf(normal(*shape, seed=i)) for i, shape in enumerate([(4, 3, 8), (6, 8), (6,)])]
    x, weight, bias = leaves
    main_grad = torch.zeros(6, 8) if handle == "main_grad" else None
    queue = DeferredWeightGradients() if handle == "deferred" else None
    use_transport(dist.group.WORLD, Counting(dist.group.WORLD))
    posted: list[int] = []

    def forward() -> Tensor:
        y = OPS[kind](x * 1, weight, bias, group=dist.group.WORLD, overlap=overlap, main_grad=main_grad, deferred=queue)
        return _as_stage_output(y * 1)

    def count(run: Any) -> Any:
        Counting.posted = 0
        result = run()
        posted.append(Counting.posted)
        return result

    def taken() -> list[Any]:
        if queue is not None:
            queue.compute()
        gradients = [x.grad, weight.grad if main_grad is None else main_grad.clone(), bias.grad]
        x.grad = weight.grad = bias.grad = None
        if main_grad is not None:
            main_grad.zero_()
        return gradients

    try:
        y = forward()
        dy = normal(*y.shape, seed=7)
        count(lambda: y.backward(dy))
        whole = taken()
        y = forward()
        _, groups = count(lambda: stage_backward_input([y], [dy], [x], iter([weight, bias])))
        if handle == "autograd":
            count(lambda: stage_backward_weight(iter([weight, bias]), groups))
        else:
            posted.append(0)
        halves = taken()
        y = forward()
        (dx,) = count(lambda: torch.autograd.grad(y, [x], dy))
        assert torch.equal(dx, whole[0]) and weight.grad is None and bias.grad is None
        assert main_grad is None or not main_grad.any()
    finally:
        use_transport(dist.group.WORLD, None)
    return whole, halves, posted, 0 if queue is None else len(queue)


def deferred_shards(rank: int, kind: str) -> tuple[int, int, int]:
    """(bytes that an entry of the queue holds, exchanges of the backward, exchanges of the queue)."""
    queue, world = DeferredWeightGradients(), dist.get_world_size()
    s, k, n = 8 * world, 6, 5
    x = _leaf(normal(s // world if kind == "column" else s, k, seed=1))
    weight = _leaf(normal(n, k, seed=2))
    use_transport(dist.group.WORLD, Counting(dist.group.WORLD))
    try:
        y = OPS[kind](x, weight, group=dist.group.WORLD, overlap="off", deferred=queue)
        Counting.posted = 0
        y.backward(normal(*y.shape, seed=3))
        backward = Counting.posted
        (entry,) = queue._pending
        tensors = {id(t): t for cell in entry.__closure__ for t in _tensors_in(cell.cell_contents)}
        held_bytes = sum(t.untyped_storage().nbytes() for t in tensors.values())
        queue.compute()
        return held_bytes, backward, Counting.posted - backward
    finally:
        use_transport(dist.group.WORLD, None)


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, functools.partial):
        value = [*value.args, *value.keywords.values()]
    if isinstance(value, list | tuple):
        return [t for part in value for t in _tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def grad_of_a_dtensor(rank: int, kind: str) -> list[Any]:
    """Two deferred gradients of a parameter [2, F, H] whose local part is the weight: (.grad, its placements)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part = normal(2, 3, 8, seed=1)
    parameter = torch.nn.Parameter(DTensor.from_local(part, mesh, [Shard(1)]))
    plain, target, queue = _leaf(part), GradientOf(parameter), DeferredWeightGradients()
    for step in range(2):
        x = normal(4, 8, seed=2 + step)
        for local, options in (
            (parameter.to_local().flatten(0, 1), {"main_grad": target, "deferred": queue if step else None}),
            (plain.flatten(0, 1), {}),
        ):
            OPS[kind](x, local, group=dist.group.WORLD, **options).square().sum().backward()
    queue.compute()
    torch.testing.assert_close(parameter.grad.to_local(), plain.grad)
    return [parameter.grad.placements == parameter.placements, parameter.grad.shape == parameter.shape]


def inside_ddp(rank: int, handle: str) -> None:
    class Module(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            options = {"main_grad": torch.zeros(4, 4)} if handle == "main_grad" else {"deferred": queue}
            return all_gather_linear(x, self.weight, self.bias, group=None, **options)

    queue = DeferredWeightGradients()
    module = torch.nn.parallel.DistributedDataParallel(Module(4, 4))
    with torch.no_grad():
        module(torch.ones(2, 4))
    module(torch.ones(2, 4))


def pipelined(rank: int, how: str) -> dict[str, Tensor]:
    """The gradients of this rank's stages under a schedule that splits their backwards; "whole" is without one."""
    chunks, dim = 4, 8
    stages = {i: Stage(dim, i, DeferredWeightGradients() if how == "queue" else None) for i in range(4)}
    x, target = (normal(chunks * 2, 3, dim, seed=seed, dtype=torch.float64) for seed in (1, 2))
    if how == "whole":
        for a, b in zip(x.chunk(chunks), target.chunk(chunks), strict=True):
            F.mse_loss(torch.nn.Sequential(*stages.values())(a), b).backward()
        own = stages
    else:
        own = {i: s for i, s in stages.items() if i % 2 == rank}
        wrapped = [
            PipelineStage(s, i, 4, torch.device("cpu"), dw_builder=None if s.queue is None else s.queue.dw_builder)
            for i, s in own.items()
        ]
        schedule = ScheduleInterleavedZeroBubble(wrapped, chunks, loss_fn=F.mse_loss, scale_grads=False)
        schedule.step(*([x] if rank == 0 else []), target=target, losses=[])
    return {f"{i}.{name}": p.grad for i, s in own.items() for name, p in s.named_parameters()}


class Stage(torch.nn.Module):
    """Two linears, a weight of which may be left to a queue."""

    def __init__(self, dim: int, number: int, queue: DeferredWeightGradients | None) -> None:
        super().__init__()
        self.up, self.down = (
            torch.nn.Parameter(normal(dim, dim, seed=10 * number + i, dtype=torch.float64)) for i in range(2)
        )
        self.queue = queue

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(all_gather_linear(x, self.up, group=None, deferred=self.queue))
        return linear_reduce_scatter(h, self.down, group=None, deferred=self.queue)


def copied_linear(rank: int, whole: list[Tensor], overlap: Any) -> list[Tensor]:
    """(y, dx, dW, db) of ``column_parallel_linear``, of its reference where ``overlap`` is None."""
    x, weight, bias, grad = whole
    world = dist.get_world_size()
    leaves = [_leaf(t) for t in (x, weight.chunk(world)[rank], bias.chunk(world)[rank])]
    if overlap is None:
        y = column_parallel_linear_reference(*leaves, group=dist.group.WORLD)
    else:
        y = column_parallel_linear(*leaves, group=dist.group.WORLD, overlap=overlap)
    y.backward(grad.chunk(world, dim=-1)[rank])
    return [y.detach(), *(t.grad for t in leaves)]


def copied_to_several(rank: int, overlap: Any) -> list[list[Tensor]]:
    """(dx, dWs) of two weights: given to autograd, and added to a main_grad and a queue."""
    x, weights = integers(5, 2, 4, seed=0), [integers(n, 4, seed=n + rank) for n in (3, 6)]
    outcomes = []
    for handled in (False, True):
        leaf, ws, queue = _leaf(x), [_leaf(w) for w in weights], DeferredWeightGradients()
        mains = [torch.zeros(3, 4), None]
        options = {"main_grad": mains, "deferred": queue} if handled else {}
        ys = column_parallel_linear(leaf, ws, group=dist.group.WORLD, overlap=overlap, **options)
        torch.autograd.backward(ys, [integers(*y.shape, seed=9) for y in ys])
        if handled:
            assert not mains[0].any() and ws[1].grad is None
            queue.compute()
        outcomes.append([leaf.grad, mains[0] if handled else ws[0].grad, ws[1].grad])
    return outcomes


def copies_sent(rank: int) -> dict[str, int]:
    """Exchanges and comparisons of a forward and a backward, with one of the two gradients wanted."""
    counts = {}
    for wanted in ("x", "weight"):
        x, weight = (normal(6, 4, seed=i).requires_grad_(wanted == name) for i, name in enumerate(("x", "weight")))
        with (
            unittest.mock.patch.object(C10dTransport, "post", autospec=True, side_effect=C10dTransport.post) as post,
            unittest.mock.patch.object(
                C10dTransport, "_collective", autospec=True, side_effect=C10dTransport._collective
            ) as collective,
            unittest.mock.patch.object(consistency, "_compare", side_effect=consistency._compare) as ask,
        ):
            column_parallel_linear(x, weight, group=dist.group.WORLD, overlap="off").sum().backward()
        counts[wanted] = post.call_count + collective.call_count + ask.call_count
    return counts


def copied_apart(rank: int) -> None:
    column_parallel_linear(normal(4 + rank, 3, seed=0).requires_grad_(), normal(2, 3, seed=1), group=dist.group.WORLD)


def copied_and_compiled(rank: int) -> list[list[Tensor]]:
    def step(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return column_parallel_linear(x, weight, bias, group=dist.group.WORLD).square().sum()

    outcomes = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaves = [_leaf(normal(*s, seed=i + (0 if i == 0 else rank))) for i, s in enumerate([(5, 2, 4), (3, 4), (3,)])]
        function(*leaves).backward()
        outcomes.append([t.grad for t in leaves])
    return outcomes


def partial_bias(rank: int, sizes: list[int], compiled: bool) -> list[Tensor]:
    """The complete and the partial gradient of a bias, and the sum of this rank's rows of that of y."""
    x, weight = integers(sum(sizes), 3, 4, seed=rank), integers(5, 4, seed=7 + rank)
    grad = integers(sizes[rank], 3, 5, seed=20 + rank)
    found = []
    for kind in ("complete", "partial"):

        def run(x: Tensor, bias: Tensor, kind: str = kind) -> Tensor:
            return linear_reduce_scatter(x, weight, bias, group=dist.group.WORLD, sizes=sizes, bias_gradient=kind)

        bias = _leaf(integers(5, seed=3))
        run = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
        run(_leaf(x), bias).backward(grad)
        found.append(bias.grad)
    return [*found, grad.sum((0, 1))]
