"""all_gather_linear and linear_reduce_scatter over gloo groups of 2, 3 and 4 ranks."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_ops import all_gather_linear, linear_reduce_scatter
from support.numerics import suite
from support.parallelism.parallel_linear import OPS, integers, leaf, normal, sharded_linear, whole_linear
from support.ranks.distributed import ranks

groups = pytest.mark.parametrize("size", [2, 3, 4])
kinds = pytest.mark.parametrize("kind", ["column", "row"])

OVERLAPS = ["off", "auto", 1, 3]
SIZES = {2: [[4, 4], [5, 2]], 3: [[3, 3, 3], [1, 0, 4]], 4: [[2, 2, 2, 2], [4, 1, 0, 3]]}


def whole(kind, results, sizes):
    """(y, dx, dW, db) of the whole linear from those of the ranks."""
    y, dx, dweight, *dbias = zip(*results, strict=True)
    if kind == "column":
        return [torch.cat(y, dim=-1), torch.cat(dx), torch.cat(dweight), *(torch.cat(b) for b in dbias)]
    for b in dbias:
        assert all(torch.equal(b[0], other) for other in b[1:]), "the gradient of bias differs between ranks"
    return [torch.cat(y), torch.cat(dx, dim=-1), torch.cat(dweight, dim=1), *(b[0] for b in dbias)]


@groups
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integers_give_the_unsharded_linear_exactly(size, kind, dtype):
    for number, sizes in enumerate(SIZES[size]):
        for inner in ((), (2,)):
            s, k, n = sum(sizes), 2 * size, 3 * size
            bias = integers(n, seed=3, dtype=dtype) if number == 0 or inner else None
            x, weight = integers(s, *inner, k, seed=1, dtype=dtype), integers(n, k, seed=2, dtype=dtype)
            tensors = [x, weight, bias, integers(s, *inner, n, seed=4, dtype=dtype)]
            expected = whole_linear(*tensors)
            for overlap in OVERLAPS:
                results = ranks(size).run(sharded_linear, kind, tensors, sizes, {"overlap": overlap})
                for got, want in zip(whole(kind, results, sizes), expected, strict=True):
                    assert torch.equal(got, want), (sizes, inner, overlap)


@groups
@kinds
def test_fp64_gradients_are_those_of_the_single_process_linear(size, kind):
    sizes = SIZES[size][1]
    s, k, n = sum(sizes), 4 * size, 2 * size
    shapes = [(s, 3, k), (n, k), (n,), (s, 3, n)]
    tensors = [normal(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes)]
    expected = whole_linear(*tensors)
    for options in ({"overlap": 2}, {"overlap": "off"}):
        results = ranks(size).run(sharded_linear, kind, tensors, sizes, options)
        torch.testing.assert_close(whole(kind, results, sizes), expected, rtol=1e-12, atol=1e-12)


@groups
@kinds
def test_the_reference_means_the_same(size, kind):
    sizes = SIZES[size][1]
    tensors = [integers(sum(sizes), 2 * size, seed=1), integers(size, 2 * size, seed=2), None]
    tensors.append(integers(sum(sizes), size, seed=3))
    results = ranks(size).run(sharded_linear, kind, tensors, sizes, {}, True)
    for got, want in zip(whole(kind, results, sizes), whole_linear(*tensors), strict=True):
        assert torch.equal(got, want)


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
    """(y, dx, dW) by broadcasts and matmuls of the same pieces, one after the other; x, W and dy are this rank's."""
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
        leaves = [leaf(x), leaf(weight)]
        y = OPS[kind](*leaves, group=dist.group.WORLD, sizes=sizes, overlap=pieces)
        y.backward(grad)
        results.append([y.detach(), *(t.grad for t in leaves)])
    return results


@groups
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overlapped_is_unfused_bit_for_bit_on_every_run(size, kind, dtype):
    for sizes in SIZES[size]:
        for pieces in (1, 2):
            for results in ranks(size).run(against_unfused, kind, sizes, pieces, dtype):
                for repeated in results[1:]:
                    for got, want in zip(repeated, results[0], strict=True):
                        assert torch.equal(got, want), (sizes, pieces)


def several_weights(rank: int, x: Tensor, weights: list[Tensor], biases: Any, grads: list[Tensor], overlap: Any):
    """(ys, dx, dWs, dbs) of one gather for several weights, which are this rank's alone; x is split evenly."""
    shard = leaf(x.chunk(dist.get_world_size())[rank])
    ws, bs = [leaf(w) for w in weights], None if biases is None else [leaf(b) for b in biases]
    ys = all_gather_linear(shard, ws, bs, group=dist.group.WORLD, overlap=overlap)
    # An output that nobody used: as if its gradient were zero.
    used = [(y, g.clone()) for y, g in zip(ys, grads, strict=True) if g.any()]
    torch.autograd.backward([y for y, _ in used], [g for _, g in used])
    return [y.detach() for y in ys], shard.grad, [w.grad for w in ws], [b.grad for b in bs or []]


@groups
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_several_weights_share_a_gather(size, overlap):
    x, weights = integers(2 * size, 3, 5, seed=1), [integers(n, 5, seed=n) for n in (4, 1, 6)]
    for biases in (None, [integers(n, seed=9) for n in (4, 1, 6)]):
        grads = [integers(2 * size, 3, n, seed=2) for n in (4, 1, 6)]
        grads[1].mul_(biases is None)
        each = [whole_linear(x, w, b, g) for w, b, g in zip(weights, biases or [None] * 3, grads, strict=True)]
        results = ranks(size).run(several_weights, x, weights, biases, grads, overlap)
        dx = size * sum(e[1] for e in each)  # every rank has the same weights
        assert torch.equal(torch.cat([r[1] for r in results]), dx)
        for ys, _, dweights, dbiases in results:
            assert all(torch.equal(y, e[0]) for y, e in zip(ys, each, strict=True))
            assert all(torch.equal(d, e[2]) for d, e in zip(dweights, each, strict=True))
            assert all(torch.equal(d, e[3]) for d, e in zip(dbiases, each, strict=False))


def frozen(rank: int, kind: str, wanted: list[bool], overlap: Any) -> list[Any]:
    """Gradients where only some are wanted; None elsewhere."""
    leaves = [
        t.requires_grad_(n) for t, n in zip((integers(4, 8, seed=1), integers(6, 8, seed=2)), wanted, strict=True)
    ]
    OPS[kind](*leaves, group=dist.group.WORLD, overlap=overlap).sum().backward()
    return [t.grad for t in leaves]


@kinds
@pytest.mark.parametrize("overlap", ["off", 1])
@pytest.mark.parametrize("wanted", [[True, False], [False, True]])
def test_only_the_gradients_that_are_wanted(kind, overlap, wanted):
    both = ranks(2).run(frozen, kind, [True, True], overlap)
    for some, every in zip(ranks(2).run(frozen, kind, wanted, overlap), both, strict=True):
        for got, want, needed in zip(some, every, wanted, strict=True):
            assert torch.equal(got, want) if needed else got is None


def partial_bias(rank: int, sizes: list[int], compiled: bool) -> list[Tensor]:
    """The complete and the partial gradient of a bias, and the sum of this rank's rows of that of y."""
    x, weight = integers(sum(sizes), 3, 4, seed=rank), integers(5, 4, seed=7 + rank)
    grad = integers(sizes[rank], 3, 5, seed=20 + rank)
    found = []
    for kind in ("complete", "partial"):

        def run(x: Tensor, bias: Tensor, kind: str = kind) -> Tensor:
            return linear_reduce_scatter(x, weight, bias, group=dist.group.WORLD, sizes=sizes, bias_gradient=kind)

        bias = leaf(integers(5, seed=3))
        run = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
        run(leaf(x), bias).backward(grad)
        found.append(bias.grad)
    return [*found, grad.sum((0, 1))]


@pytest.mark.parametrize(("size", "compiled"), [(2, False), (3, False), (4, False), (3, True)])
def test_a_partial_bias_gradient_is_that_of_this_ranks_rows(size, compiled):
    sizes = SIZES[size][1]
    for complete, partial, own in ranks(size).run(partial_bias, sizes, compiled):
        assert torch.equal(partial, own)
        assert not torch.equal(partial, complete)


class TestOneRank:
    @pytest.mark.parametrize("device", suite.DEVICES)
    @pytest.mark.parametrize("op", [all_gather_linear, linear_reduce_scatter])
    def test_is_a_linear(self, op, device):
        shapes = ((5, 2, 8), (3, 8), (3,))
        args = [suite.randn(*s, dtype=torch.float32, device=device, seed=i) for i, s in enumerate(shapes)]
        ours = lambda *a: op(*a, group=None)  # noqa: E731
        suite.check_numerics(ours, torch.nn.functional.linear, args)
        suite.check_gradient(ours, args)
        suite.check_checkpointing(ours, args)
        suite.check_second_derivative_raises(ours, args)

    @pytest.mark.parametrize("op", [all_gather_linear, linear_reduce_scatter])
    def test_any_strides(self, op):
        """On integers: how a matmul of other numbers rounds depends on where its factors lie in memory."""
        args = [integers(5, 2, 8, seed=1).requires_grad_(), integers(3, 8, seed=2).requires_grad_()]
        ours = lambda *a: op(*a, group=None)  # noqa: E731
        grad = integers(5, 2, 3, seed=3)
        expected = suite.forward_backward(ours, args, grad)
        for index in (0, 1):
            for tensor in suite.layouts(args[index]).values():
                for g in suite.layouts(grad).values():
                    varied = [*args[:index], tensor, *args[index + 1 :]]
                    for got, want in zip(suite.forward_backward(ours, varied, g), expected, strict=True):
                        assert torch.equal(got, want)

    @pytest.mark.parametrize("name", ["all_gather_linear", "linear_reduce_scatter"])
    def test_custom_op_contract(self, name):
        x, w = suite.randn(5, 2, 8, dtype=torch.float32), suite.randn(3, 8, dtype=torch.float32)
        b = suite.randn(3, dtype=torch.float32)
        op = getattr(torch.ops.parallel_ops, name).default
        more = [True, False] if name == "linear_reduce_scatter" else [True]
        suite.check_op(op, [x, [w], [b], None, [5], 0, [True, True, True], *more])
        suite.check_op(op, [x.detach(), [w], [], None, [5], 2, [False, True], *more])

    @pytest.mark.parametrize("op", [all_gather_linear, linear_reduce_scatter])
    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"x": torch.randn(8)}, ValueError, r"x must have at least two dimensions, got \[8\]"),
            ({"x": torch.ones(4, 8, dtype=torch.int64)}, TypeError, "x must be float32"),
            ({"weight": torch.randn(3, 7)}, ValueError, r"weight must have shape \[N, 8\]"),
            ({"weight": torch.randn(3, 8).double()}, TypeError, "weight is torch.float64, but x is torch.float32"),
            ({"bias": torch.randn(4)}, ValueError, r"bias must have shape \[3\]"),
            (
                {"overlap": 0},
                ValueError,
                "overlap must be one of 'auto', 'off', 'symmetric' or a number of chunks",
            ),
            ({"overlap": "on"}, ValueError, "overlap must be .* got 'on'"),
            ({"overlap": "bulk"}, ValueError, "overlap must be .* got 'bulk'"),
            ({"overlap": True}, ValueError, "overlap must be .* got True"),
            ({"overlap": 1.5}, TypeError, "overlap must be .* got 1.5"),
            ({"sizes": [3]}, ValueError, r"3, but x"),
            ({"sizes": [2, 2]}, ValueError, "sizes must have one entry for each of the 1 ranks, got 2"),
            ({"group": "tp"}, TypeError, "group must be None or a torch.distributed.ProcessGroup"),
            ({"main_grad": torch.zeros(3, 7)}, ValueError, r"main_grad must have the shape of weight, \[3, 8\]"),
            ({"main_grad": torch.zeros(3, 8).bfloat16()}, TypeError, "main_grad must be torch.float32 for a weight"),
            ({"main_grad": [torch.zeros(3, 8)] * 2}, (TypeError, ValueError), "main_grad must"),
            ({"main_grad": "weight"}, TypeError, "main_grad must be a tensor, got str"),
            ({"deferred": []}, TypeError, "deferred must be a DeferredWeightGradients, got list"),
        ],
    )
    def test_bad_arguments_are_named(self, op, change, error, message):
        arguments = {"x": torch.randn(4, 8), "weight": torch.randn(3, 8), "group": None, **change}
        if "sizes" in change:
            message = {"3, but x": r"(sizes\[0\] is 3|sizes adds up to 3), but x"}.get(message, message)
        with pytest.raises(error, match=message):
            op(**arguments)

    def test_an_unknown_kind_of_bias_gradient(self):
        with pytest.raises(ValueError, match="bias_gradient must be 'complete' or 'partial', got 'whole'"):
            linear_reduce_scatter(torch.ones(4, 8), torch.ones(3, 8), group=None, bias_gradient="whole")
