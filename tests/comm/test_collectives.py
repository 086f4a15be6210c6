"""Collectives over gloo groups of 2, 3 and 4 ranks, compared bit for bit on integer-valued tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_ops import comm
from support.ranks.distributed import ranks
from support.transports import collectives

groups = pytest.mark.parametrize("size", [2, 3, 4])
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def integers(shape, seed, dtype=torch.float32):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shape_with(shape, dim, n):
    return (*shape[:dim], n, *shape[dim + 1 :])


cases = st.fixed_dictionaries(
    {
        "shape": st.sampled_from([(1,), (5,), (2, 3), (4, 1, 3), (3, 0, 2)]),
        "dim": st.integers(0, 2),
        "uneven": st.booleans(),
        "negative": st.booleans(),
        "dtype": st.sampled_from(DTYPES),
        "grad_reduce": st.sampled_from(["fp32", "backend"]),
        "seed": st.integers(0, 100),
    }
)


def split_of(case, size):
    shape = case["shape"]
    dim = case["dim"] % len(shape)
    generator = torch.Generator().manual_seed(case["seed"])
    sizes = torch.randint(0, 4, (size,), generator=generator).tolist() if case["uneven"] else [2] * size
    if sum(sizes) == 0:
        sizes[-1] = 1
    options = {"dim": dim - len(shape) if case["negative"] else dim}
    if case["uneven"]:
        options["sizes"] = sizes
    return shape, dim, sizes, options


@groups
@settings(max_examples=15)
@given(case=cases)
def test_all_gather_and_its_gradient(size, case):
    shape, dim, sizes, options = split_of(case, size)
    shards = [integers(shape_with(shape, dim, n), r, case["dtype"]) for r, n in enumerate(sizes)]
    grads = [integers(shape_with(shape, dim, sum(sizes)), 10 + r, case["dtype"]) for r in range(size)]
    whole, reduced = torch.cat(shards, dim), sum(grads).split(sizes, dim)
    options = {**options, "grad_reduce": case["grad_reduce"]}
    for rank, (out, grad) in enumerate(ranks(size).run(collectives.call, "all_gather", shards, grads, options)):
        assert torch.equal(out, whole)
        assert torch.equal(grad, reduced[rank])


@groups
@settings(max_examples=15)
@given(case=cases)
def test_reduce_scatter_and_its_gradient(size, case):
    shape, dim, sizes, options = split_of(case, size)
    wholes = [integers(shape_with(shape, dim, sum(sizes)), r, case["dtype"]) for r in range(size)]
    grads = [integers(shape_with(shape, dim, n), 10 + r, case["dtype"]) for r, n in enumerate(sizes)]
    reduced, gathered = sum(wholes).split(sizes, dim), torch.cat(grads, dim)
    options = {**options, "grad_reduce": case["grad_reduce"]}
    for rank, (out, grad) in enumerate(ranks(size).run(collectives.call, "reduce_scatter", wholes, grads, options)):
        assert torch.equal(out, reduced[rank])
        assert torch.equal(grad, gathered)


@groups
@settings(max_examples=10)
@given(case=cases)
def test_scatter_and_gather(size, case):
    shape, dim, sizes, options = split_of(case, size)
    whole = integers(shape_with(shape, dim, sum(sizes)), 1, case["dtype"])
    shards = [integers(shape_with(shape, dim, n), 10 + r, case["dtype"]) for r, n in enumerate(sizes)]
    scattered = ranks(size).run(collectives.call, "scatter_to_group", [whole] * size, shards, options)
    gathered = ranks(size).run(collectives.call, "gather_from_group", shards, [whole] * size, options)
    for rank in range(size):
        assert torch.equal(scattered[rank][0], whole.split(sizes, dim)[rank])
        assert torch.equal(scattered[rank][1], torch.cat(shards, dim))
        assert torch.equal(gathered[rank][0], torch.cat(shards, dim))
        assert torch.equal(gathered[rank][1], whole.split(sizes, dim)[rank])


@groups
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (130, 257)])  # the last is large enough to be sent in shards
@pytest.mark.parametrize("grad_reduce", ["fp32", "backend"])
def test_copy_and_reduce(size, shape, grad_reduce):
    options = {"grad_reduce": grad_reduce}
    xs, grads = ([integers(shape, seed + r, torch.float64) for r in range(size)] for seed in (0, 10))
    for out, grad in ranks(size).run(collectives.call, "copy_to_group", [xs[0]] * size, grads, options):
        assert torch.equal(out, xs[0])
        assert torch.equal(grad, sum(grads))
    for out, grad in ranks(size).run(collectives.call, "reduce_from_group", xs, [grads[0]] * size, options):
        assert torch.equal(out, sum(xs))
        assert torch.equal(grad, grads[0])


@groups
def test_all_to_all_changes_the_sharding(size):
    """From sequence to heads and back, both uneven."""
    tokens, heads = [3, 1, 4, 2][:size], [2, 3, 1, 5][:size]
    whole, grad = integers((sum(tokens), sum(heads), 2), 0), integers((sum(tokens), sum(heads), 2), 1)
    options = {"split_dim": 1, "concat_dim": 0, "split_sizes": heads, "concat_sizes": tokens}
    shards, grads = list(whole.split(tokens, 0)), list(grad.split(heads, 1))
    for rank, (out, got) in enumerate(ranks(size).run(collectives.call, "all_to_all", shards, grads, options)):
        assert torch.equal(out, whole.split(heads, 1)[rank])
        assert torch.equal(got, grad.split(tokens, 0)[rank])


@groups
def test_all_to_all_of_rank_dependent_counts(size):
    counts = [[(3 * i + j) % 4 for j in range(size)] for i in range(size)]
    xs = [integers((sum(counts[r]), 2), r) for r in range(size)]
    expected = [torch.cat([xs[i].split(counts[i])[r] for i in range(size)]) for r in range(size)]
    options = [{"split_sizes": counts[r], "concat_sizes": [c[r] for c in counts]} for r in range(size)]
    grads = [integers(e.shape, 20 + r) for r, e in enumerate(expected)]
    for rank, (out, grad) in enumerate(ranks(size).run(collectives.call, "all_to_all", xs, grads, options)):
        assert torch.equal(out, expected[rank])
        back = [grads[j].split([counts[i][j] for i in range(size)])[rank] for j in range(size)]
        assert torch.equal(grad, torch.cat(back))


def test_results_may_be_written_over():
    ranks(2).run(collectives.written_over)


def test_without_a_group():
    x = torch.randn(3, 4, requires_grad=True)
    for op in (comm.copy_to_group, comm.reduce_from_group, comm.all_gather, comm.reduce_scatter, comm.all_to_all):
        assert torch.equal(op(x, None), x)
