"""The linears compiled, under autocast, in DDP and pipelines, and with weight gradients that go elsewhere."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from parallel_ops import all_gather_linear
from parallel_ops._internal.gradients.weight_gradients import ParameterGrad
from parallel_ops.tensor_parallel import DeferredWeightGradients
from support.parallelism.parallel_linear import OPS, leaf, normal
from support.ranks.distributed import Raised, ranks

groups = pytest.mark.parametrize("size", [2, 3, 4])
kinds = pytest.mark.parametrize("kind", ["column", "row"])


def with_handles(rank: int, kind: str, dtype: torch.dtype, defer: bool, main: bool, autocast: bool):
    """Two backwards: ((dx, dW, db) of autograd's, the same with handles, what was pending before it was computed)."""
    results = []
    for handled in (False, True):
        weight, bias = normal(6, 8, seed=1, dtype=dtype), normal(6, seed=2, dtype=dtype)
        leaves = [leaf(weight), leaf(bias)]
        queue = DeferredWeightGradients() if defer and handled else None
        main_grad = torch.zeros(6, 8) if main and handled else None
        pending = []
        dx = []
        for step in range(2):
            x = leaf(normal(4, 3, 8, seed=3 + step, dtype=dtype))
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


@kinds
@pytest.mark.parametrize(("defer", "main"), [(True, False), (False, True), (True, True)])
def test_weight_gradients_go_where_they_are_told(kind, defer, main):
    for outcome in ranks(2).run(with_handles, kind, torch.float32, defer, main, False):
        plain, handled, pending = outcome
        torch.testing.assert_close(handled, plain, rtol=1e-6, atol=1e-6)
        assert [n for n, _ in pending] == ([1, 2, 1] if defer else [0, 0])
        assert all(none for _, none in pending[:2]) or not defer


@kinds
def test_main_grad_accumulates_16_bit_products_in_fp32(kind):
    for plain, handled, _ in ranks(2).run(with_handles, kind, torch.bfloat16, False, True, False):
        assert handled[2].dtype is torch.float32
        torch.testing.assert_close(handled[2], plain[2].float(), rtol=2e-2, atol=5e-2)
        assert not torch.equal(handled[2], plain[2].float())  # two roundings fewer
    for plain, handled, _ in ranks(2).run(with_handles, kind, torch.float32, True, True, True):
        torch.testing.assert_close(handled, plain, rtol=2e-2, atol=5e-2)
        assert [t.dtype for t in handled] == [torch.float32] * 4


def grad_of_a_dtensor(rank: int, kind: str) -> list[Any]:
    """Two deferred gradients of a parameter [2, F, H] whose local part is the weight: (.grad, its placements)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part = normal(2, 3, 8, seed=1)
    parameter = torch.nn.Parameter(DTensor.from_local(part, mesh, [Shard(1)]))
    plain, target, queue = leaf(part), ParameterGrad(parameter), DeferredWeightGradients()
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


@kinds
def test_the_grad_of_a_dtensor_as_a_target(kind):
    assert ranks(2).run(grad_of_a_dtensor, kind) == [[True, True]] * 2


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


@pytest.mark.parametrize("handle", ["main_grad", "deferred"])
def test_gradients_that_ddp_would_not_reduce_are_refused(handle):
    for outcome in ranks(2).outcomes(inside_ddp, handle):
        assert isinstance(outcome, Raised) and outcome.type == "ValueError"
        assert "do not work inside DistributedDataParallel" in outcome.message and "leave them out" in outcome.message


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
            leaves = [leaf(normal(s, 2, 8, seed=1)), leaf(normal(6, 8, seed=2)), leaf(normal(6, seed=3))]
            y = f(*leaves)
            y.sum().backward()
            results.append([y.detach(), *(t.grad for t in leaves)])
    return results


# Inductor's code calls a registered op as any other: one case for all ops over a group. For what is around the op it
# compiles C++, half a minute on fresh caches.
@pytest.mark.parametrize(
    ("kind", "backend", "around"),
    [
        ("column", "aot_eager", True),
        ("row", "aot_eager", True),
        ("column", "inductor", False),
        pytest.param("row", "inductor", True, marks=pytest.mark.runs),
    ],
)
def test_compiles_to_one_graph(kind, backend, around):
    for results in ranks(2).run(compiled, kind, backend, 2, around):
        for eager, found in zip(results[::2], results[1::2], strict=True):
            torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-5)


def with_autocast(rank: int, kind: str):
    leaves = [leaf(normal(4, 8, seed=1)), leaf(normal(6, 8, seed=2)), leaf(normal(6, seed=3))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = OPS[kind](*leaves, group=dist.group.WORLD)
    y.float().sum().backward()
    cast = [leaf(t.detach().bfloat16()) for t in leaves]
    z = OPS[kind](*cast, group=dist.group.WORLD)
    z.float().sum().backward()
    return [y.detach(), *(t.grad for t in leaves)], [z.detach(), *(t.grad for t in cast)]


@kinds
def test_autocast_runs_in_its_dtype(kind):
    for auto, cast in ranks(2).run(with_autocast, kind):
        assert auto[0].dtype is torch.bfloat16
        assert torch.equal(auto[0], cast[0])
        for got, want in zip(auto[1:], cast[1:], strict=True):
            assert got.dtype is torch.float32
            assert torch.equal(got, want.float())
