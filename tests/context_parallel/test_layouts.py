"""Which tokens each rank has, by the helpers and by the formulas behind them, and sequences split and joined."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parallel_ops.context_parallel import SequenceLayout, join_sequence, split_sequence, token_ranges
from parallel_ops.context_parallel.batch_layout import layout_for
from parallel_ops.ops.attention import document_ranges
from parallel_ops.ops.attention.options import AttentionOptions
from support.ranks.distributed import ranks

KINDS = ("zigzag", "striped", "contiguous")
kinds = st.sampled_from(KINDS)


@given(kind=st.sampled_from([*KINDS, "balanced"]), length=st.integers(0, 50), size=st.integers(1, 16))
def test_every_token_is_on_one_rank_in_order(kind, length, size):
    layout = layout_for(length, size, kind)
    positions = [layout.positions(rank) for rank in range(size)]
    assert [len(p) for p in positions] == list(layout.lengths)
    assert max(layout.lengths) - min(layout.lengths) <= 1
    assert sorted(layout.lengths) == sorted(token_ranges.lengths("balanced", length, size))
    assert sorted(torch.cat(positions).tolist()) == list(range(length))
    assert all(p.tolist() == sorted(p.tolist()) for p in positions)
    x = torch.randn(2, length, 3)
    shards = layout.split(x, dim=1)
    assert all(torch.equal(shard, x[:, p]) for shard, p in zip(shards, positions, strict=True))
    assert torch.equal(layout.join(shards, dim=1), x)
    assert torch.equal(layout.join(layout.split(x[0], dim=-2), dim=-2), x[0])


@given(kind=kinds, length=st.integers(0, 50), size=st.integers(1, 16), data=st.data())
def test_neighbours_hold_a_shard_of_the_same_layout(kind, length, size, data):
    ulysses_degree = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    rank = data.draw(st.integers(0, size - 1))
    near, far = (f(kind, size, rank, ulysses_degree) for f in (token_ranges.ulysses_ranks, token_ranges.ring_ranks))
    assert len(near) == ulysses_degree and len(far) == size // ulysses_degree and set(near) & set(far) == {rank}
    union = token_ranges.shard_ranges(kind, length, size, rank, ulysses_degree)
    own = [token for member in near for token in SequenceLayout(length, size, kind).positions(member).tolist()]
    assert sorted(own) == [run.start + i * run.step for run in union for i in range(run.length)]
    if length % (2 * size) == 0:
        index = far.index(rank)
        assert union == token_ranges.shard_ranges(kind, length, size // ulysses_degree, index)


@given(
    kind=kinds, length=st.integers(0, 40), size=st.integers(1, 8),
    left=st.one_of(st.none(), st.integers(0, 45)), right=st.one_of(st.none(), st.just(0), st.integers(0, 45)),
)  # fmt: skip
def test_what_is_sent_is_what_is_seen(kind, length, size, left, right):
    """No key is missing, and under a causal mask or a window within a run none is sent that nobody sees."""
    shards = [token_ranges.shard_ranges(kind, length, size, rank) for rank in range(size)]
    tokens = [[run.start + i * run.step for run in shard for i in range(run.length)] for shard in shards]

    def sees(q, k):
        return (right is None or k - q <= right) and (left is None or q - k <= left)

    for source in range(size):
        for target in range(size):
            sent = token_ranges.visible_keys(shards[source], shards[target], left, right)
            listed = [run.start + i * run.step for run in sent for i in range(run.length)]
            needed = [k for k in tokens[source] if any(sees(q, k) for q in tokens[target])]
            assert set(needed) <= set(listed) <= set(tokens[source])
            if needed != listed:  # between what two runs of queries see may be what neither sees
                assert len(shards[target]) > 1 and not left is right is None
            index = [
                i for run in sent for i in range(len(tokens[source]))[token_ranges.local_slice(run, shards[source])]
            ]
            assert [tokens[source][i] for i in index] == listed


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("bounds", [[0, 64], [0, 5, 5, 40, 64], [0, 64 - 1, 64]])
def test_a_balanced_layout_sends_what_is_seen(size, bounds):
    ranges = document_ranges(torch.tensor(bounds))
    layout = SequenceLayout.balanced([ranges], size)
    assert layout == SequenceLayout.balanced([ranges.clone(), ranges], size, weights=[1, 3])
    shards = [token_ranges.shard_ranges(layout.cp_layout, 64, size, rank) for rank in range(size)]
    rows, options = layout.rows_sent(ranges), AttentionOptions(key_ranges=ranges)
    assert sum(layout.area(ranges)) == int((ranges[1] - ranges[0] + 1).sum())
    for source, target in itertools.permutations(range(size), 2):
        parts = token_ranges.visible_keys(shards[source], shards[target], None, 0, options.limits(shards[target]))
        assert token_ranges.count_tokens(parts) == rows[source][target]


def test_zigzag_is_balanced_under_a_causal_mask():
    for size in (2, 5, 8):
        layout = SequenceLayout(size * 64, size)
        seen = [sum(layout.positions(rank).tolist()) for rank in range(size)]
        assert len(set(seen)) == 1


def test_positions_start_again_with_each_document():
    layout, bounds = SequenceLayout(10, 2), torch.tensor([0, 3, 3, 9, 10], dtype=torch.int32)
    whole = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5, 0])
    assert layout.positions(0).tolist() == [0, 1, 2, 8, 9]
    for rank in range(2):
        assert torch.equal(layout.positions(rank, cu_seqlens=bounds), layout.shard(whole, rank))


def half_joined(rank: int, length: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's part of a sequence, the sequence joined again, and the gradient of the part."""
    whole = torch.arange(2.0 * length).view(2, length)
    part = split_sequence(whole, dist.group.WORLD, cp_layout=kind, dim=1).requires_grad_()
    joined = join_sequence(part, dist.group.WORLD, length=length, cp_layout=kind, dim=-1)
    (joined * whole).sum().backward()
    return part.detach(), joined.detach(), part.grad


@pytest.mark.parametrize("size", [2, 3])
def test_a_group_splits_and_joins(size):
    for kind in KINDS:
        for length in (2, 13):
            whole = torch.arange(2.0 * length).view(2, length)
            layout = SequenceLayout(length, size, kind)
            for rank, (part, joined, grad) in enumerate(ranks(size).run(half_joined, length, kind)):
                assert torch.equal(part, layout.shard(whole, rank, dim=1))
                assert torch.equal(joined, whole)
                assert torch.equal(grad, part)
    x = torch.randn(3, 2)
    assert torch.equal(join_sequence(split_sequence(x, None), None), x)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SequenceLayout(-1, 2), ValueError, "length must be at least 0, got -1"),
        (lambda: SequenceLayout(4, 0), ValueError, "ranks must be at least 1, got 0"),
        (lambda: SequenceLayout(4.0, 2), TypeError, "length must be an int, got float"),
        (lambda: SequenceLayout(4, 2, "blocks"), ValueError, "cp_layout must be one of zigzag, striped, contiguous"),
        (lambda: SequenceLayout(4, 2).positions(2), ValueError, "rank must be from 0 to 1, got 2"),
        (
            lambda: SequenceLayout(4, 2).shard(torch.ones(5), 0),
            ValueError,
            r"dimension 0 must have 4 tokens, got \[5\]",
        ),
        (lambda: SequenceLayout(4, 2).join([torch.ones(4)]), ValueError, "one for each of the 2 ranks"),
        (lambda: SequenceLayout(4, 2, "balanced"), ValueError, "SequenceLayout.balanced makes it"),
        (lambda: SequenceLayout(4, 2, "0,2"), ValueError, "cp_layout has chunks of rank 2, but there are 2 ranks"),
        (lambda: SequenceLayout.balanced([], 2), ValueError, r"masks must be ranges \[2, length\] of one length"),
        (
            lambda: SequenceLayout.balanced([torch.tensor([[0, 1, 0], [0, 1, 2]])], 2),
            ValueError,
            r"masks\[0\]: the first key must not decrease, but falls from 1 to 0 in row 2",
        ),
        (
            lambda: SequenceLayout.balanced([torch.zeros(2, 3), torch.tensor([[0, 1, 1], [0, 1, 3]])], 2),
            ValueError,
            r"masks\[1\]: the last key of row 2 is 3, outside of -1 to 2",
        ),
        (
            lambda: split_sequence(torch.ones(4), None, cp_layout=SequenceLayout(4, 2)),
            ValueError,
            "split_sequence: cp_layout is of 4 tokens over 2 ranks, but the group has 1, length=4",
        ),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
