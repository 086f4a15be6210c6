"""ring_attention over gloo groups of 2, 3 and 4 ranks, against full attention in fp64."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_ops import ring_attention
from parallel_ops.context_parallel import ring_attention_algorithm
from parallel_ops.context_parallel.algorithm import ranks_per_node
from parallel_ops.ops.attention.cache import know_on_host
from support.parallelism.context_parallel import SEED, Case, inputs, joined, oracle
from support.ranks.distributed import ranks

groups = pytest.mark.parametrize("size", [2, 3, 4])
LAYOUTS = ("zigzag", "striped", "contiguous")


def cases_of(size):
    """Every layout and way; odd lengths, fewer tokens than ranks, grouped queries, and every option."""
    documents = (0, 3, 7, 0, 1, 8)
    for layout in (*LAYOUTS, "balanced", "scattered"):
        for way in (
            {},
            {"all_gather": True},
            {"ulysses_degree": size},
            *([{"ulysses_degree": 2}] if size == 4 else []),
        ):
            options = {"heads": 2 * size, "kv_heads": size, "layout": layout, **way}
            yield Case(19, batch=2, **options)
            yield Case(19, head_dim=6, head_dim_v=4, **options)
            yield Case(size - 1, causal=False, sink=True, **options)
            frames = (0,) * 19, tuple(min(i // 4 * 4 + 3, 18) for i in range(19))
            yield Case(19, causal=False, ranges=frames, **options)
            yield Case(19, window=6, sink=True, softcap=2.0, dropout_p=0.3, documents=documents, **options)


def public(case: Case, group: Any, tensors: list[Tensor | None], algorithm: str = "", **options: Any) -> list[Tensor]:
    """(O, dq, dk, dv, dsink) of this rank's tokens, by the public op."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    layout = case.shared_by(size)
    q, k, v, sink, grad = tensors
    leaves = [layout.shard(t, rank).requires_grad_() for t in (q, k, v)]
    sink = None if sink is None else sink.clone().requires_grad_()
    if not algorithm:
        algorithm = "all_gather" if case.all_gather else "ring" if case.ulysses_degree == 1 else "hybrid"
        options["ulysses_degree"] = case.ulysses_degree if algorithm == "hybrid" else None
    out = ring_attention(
        *leaves,
        group=group,
        cp_layout=layout if case.layout == "scattered" else case.layout,
        algorithm=algorithm,
        causal=case.causal,
        softmax_scale=case.scale,
        window_size=None if case.window is None else (case.window - 1, 0),
        sink=sink,
        softcap=case.softcap or None,
        dropout_p=case.dropout_p,
        dropout_seed=SEED,
        cu_seqlens=case.cu_seqlens,
        key_ranges=case.options().key_ranges,
        length=case.length,
        **options,
    )
    out.backward(layout.shard(grad, rank))
    return [out.detach(), *(t.grad for t in (*leaves, sink) if t is not None)]


def run_cases(rank: int, what: list[Case], dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """``public`` of each case."""
    return [public(case, dist.group.WORLD, case.tensors(dtype)) for case in what]


def repeated(rank: int, case: Case, times: int) -> list[list[Tensor]]:
    return [public(case, dist.group.WORLD, case.tensors(torch.bfloat16)) for _ in range(times)]


def why(rank: int) -> list[str]:
    """Reasons for one sequence; for documents that the host knows, on CPU and device; for those it does not know."""
    q, k, _ = inputs(rank)
    bounds = torch.tensor([0, 2, 8])
    known, unknown = (torch.empty(3, dtype=torch.int64, device="meta") for _ in range(2))
    know_on_host(known, bounds)
    return [
        ring_attention_algorithm(q, k, group=dist.group.WORLD, cu_seqlens=each).reason
        for each in (None, bounds, known, unknown)
    ]


SUB_GROUP_CASE = Case(11, heads=4, kv_heads=2)


def sub_groups(rank: int) -> list[Tensor]:
    """Two rings of two ranks at once, on ranks that are not adjacent."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return public(SUB_GROUP_CASE, groups[rank % 2], SUB_GROUP_CASE.tensors())


NODES_CASES = [Case(23, heads=4, kv_heads=2, all_gather=all_gather) for all_gather in (False, True)]


def nodes_of_two(rank: int) -> list[list[Tensor]]:
    """Keys over two nodes, and nodes of other sizes by what one rank was told."""
    counts = [ranks_per_node(dist.group.WORLD)]
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        counts.append(ranks_per_node(dist.group.WORLD))
        found = run_cases(rank, NODES_CASES)
    for text in ("3", "4", "x", "1"):
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=text):
            counts.append(ranks_per_node(dist.group.WORLD))
    assert counts == [1, 2, 1, 1, 1, 1]
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="4" if rank == 3 else "2"),
        pytest.raises(ValueError, match="with 2 ranks a node"),
    ):
        run_cases(rank, NODES_CASES)
    return found


@groups
def test_outputs_and_gradients_are_those_of_the_whole_sequence(size):
    cases = list(cases_of(size))
    results = ranks(size).run(run_cases, cases)
    for case, of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        for got, want in zip(joined(case, of_ranks), oracle(case, case.tensors()), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=lambda m: f"{case}: {m}")  # noqa: B023


def test_the_dropout_mask_is_the_same_on_any_number_of_ranks():
    """Values that show the mask: v is one, so each output is the sum of what was kept."""
    case = Case(23, heads=4, kv_heads=4, dropout_p=0.5)
    whole = [joined(case, [r[0] for r in ranks(size).run(run_cases, [case])]) for size in (2, 3, 4)]
    for other in whole[1:]:
        torch.testing.assert_close(other, whole[0], rtol=1e-9, atol=1e-11)
    assert not torch.allclose(whole[0][0], oracle(Case(23, heads=4, kv_heads=4), case.tensors())[0])


@pytest.mark.parametrize("algorithm", ["ring", "hybrid", "all_gather"])
def test_every_run_has_the_same_bits(algorithm):
    way = {"hybrid": {"ulysses_degree": 2}, "all_gather": {"all_gather": True}}.get(algorithm, {})
    for results in ranks(4).run(repeated, Case(33, heads=4, kv_heads=2, head_dim=16, **way), 3):
        for again in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(again, results[0], strict=True))


def test_two_rings_at_once_on_ranks_apart():
    case = SUB_GROUP_CASE
    results = ranks(4).run(sub_groups)
    for pair in (results[::2], results[1::2]):
        for got, want in zip(joined(case, pair), oracle(case, case.tensors()), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_keys_over_nodes():
    for case, results in zip(NODES_CASES, zip(*ranks(4).run(nodes_of_two), strict=True), strict=True):
        for got, want in zip(joined(case, results), oracle(case, case.tensors()), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_why_an_algorithm_was_chosen():
    for reason, counted, known, unknown in ranks(2).run(why):
        assert reason.startswith("ring: sends least") and "all_gather" in reason and "all_to_all" in reason
        assert known == counted != unknown == reason
