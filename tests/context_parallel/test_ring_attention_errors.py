"""ring_attention over ranks that make different or wrong calls, or lose a rank."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_ops import ring_attention
from parallel_ops.context_parallel import SequenceLayout
from parallel_ops.context_parallel.token_ranges import layout_of
from parallel_ops.ops.attention import block_causal_ranges
from support.parallelism.context_parallel import inputs
from support.ranks.distributed import Raised, Ranks, ranks


def mismatched(rank: int, what: str) -> None:
    """Calls that differ between ranks, or that one rank alone sees to be wrong."""
    world = dist.get_world_size()
    last = rank == world - 1
    s, heads = {"tokens": (6 + rank, 4), "heads": (6, 4 + 2 * rank)}.get(what, (6, 4))
    options: dict[str, Any] = {
        "layout": {"cp_layout": "striped" if rank else "zigzag"},
        "algorithm": {"algorithm": "all_gather" if rank else "ring"},
        "window": {"window_size": (3 + rank, 0)},
        "seed": {"dropout_p": 0.5, "dropout_seed": rank},
        "documents": {"cu_seqlens": torch.tensor([0, 3 + rank, 6 * world])},
        "ranges": {"key_ranges": block_causal_ranges(2 + rank, length=6 * world)},
        "ranges, balanced": {"key_ranges": block_causal_ranges(2 + rank, length=6 * world), "cp_layout": "balanced"},
        "placements": {
            "cp_layout": SequenceLayout(6 * world, world, layout_of([(i + rank) % world for i in range(world)]))
        },
        "ranges of one rank": {"key_ranges": block_causal_ranges(2, length=6 * world) - int(last)},
        "documents too short": {"cu_seqlens": torch.tensor([0, 3, 6])},
        "documents that fall": {"cu_seqlens": torch.tensor([0, 5, 3, 6 * world])},
        "length": {"length": 6 * world - 1},
        "one bad argument": {"window_size": (-2 if last else 3, 0)},
    }.get(what, {})
    torch.set_grad_enabled(what != "gradients" or bool(rank))
    try:
        ring_attention(*inputs(rank, s, heads), group=dist.group.WORLD, **options)
    finally:
        torch.set_grad_enabled(True)


def refused(rank: int, options: dict[str, Any], change: dict[str, Any]) -> None:
    """A call that is wrong in the same way on every rank."""
    q, k, v = inputs(rank, **change)
    ring_attention(q, k, v, group=dist.group.WORLD, **options)


def goes_on(rank: int) -> Tensor:
    """After errors the group is as good as before."""
    return ring_attention(*inputs(rank), group=dist.group.WORLD).detach()


def killed(rank: int, victim: int) -> None:
    """A rank ends without a word."""
    out = ring_attention(*inputs(rank), group=dist.group.WORLD, algorithm="ring")
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    out.sum().backward()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("tokens", "make different calls"),
        ("heads", "make different calls"),
        ("layout", "in striped"),
        ("algorithm", "all_gather in zigzag"),
        ("window", "window_size=(4, 0)"),
        ("seed", "seed=1"),
        ("documents", "documents=(0, 4, "),
        (
            "ranges",
            "key_ranges must be the same on every rank, but in row 0 rank 0 of the group has keys 0 to 1, rank 1",
        ),
        ("ranges, balanced", "key_ranges must be the same on every rank, but in row 0 rank 0 of the group has keys 0"),
        ("placements", "cp_layout must have the same chunks on every rank"),
        ("ranges of one rank", "ring_attention: key_ranges: the first key of row 0 is -1"),
        ("documents too short", "cu_seqlens must rise from 0 to"),
        ("documents that fall", "cu_seqlens must rise from 0 to"),
        ("length", "rejected its arguments"),
        ("one bad argument", "rejected its arguments: ring_attention: window_size must be at least 0"),
        ("gradients", "requires_grad=False"),
    ],
)
def test_disagreement_raises_on_every_rank(size, what, message):
    outcomes = ranks(size).outcomes(mismatched, what)
    assert all(isinstance(o, Raised) and o.type == "ValueError" for o in outcomes), outcomes
    assert any(message in o.message for o in outcomes), [o.message for o in outcomes]
    ranks(size).run(goes_on)


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"cp_layout": "blocks"}, {}, "cp_layout must be one of zigzag, striped, contiguous, balanced, got 'blocks'"),
        ({"algorithm": "usp"}, {}, "algorithm must be one of auto, ring, all_to_all, hybrid, all_gather, got 'usp'"),
        (
            {"algorithm": "all_to_all"},
            {"heads": 6, "kv_heads": 3},
            "all_to_all needs kv heads that are a multiple or a divisor of the 2 ranks",
        ),
        ({"algorithm": "hybrid"}, {}, "hybrid needs a ulysses_degree between 1 and 2"),
        (
            {"algorithm": "hybrid", "ulysses_degree": 3},
            {},
            "ulysses_degree must divide the 2 ranks .* and the 2 kv heads, got 3",
        ),
        ({"algorithm": "ring", "ulysses_degree": 2}, {}, "ulysses_degree is for algorithm=.hybrid., got 2 with 'ring'"),
        ({"window_size": (-2, 0)}, {}, "window_size must be at least 0, or -1"),
        ({"length": 9}, {}, "rank . of 2 has . of length=9 tokens in zigzag layout"),
        ({"dropout_p": 1.5}, {}, "dropout_p must be from 0 to 1"),
        ({"softcap": -1.0}, {}, "softcap must be finite and above 0"),
        ({"sink": torch.zeros(3)}, {}, r"sink must have shape \[4\]"),
        ({"cu_seqlens": torch.zeros(2)}, {}, "cu_seqlens must be an int32 or int64 tensor"),
        ({}, {"kv_heads": 3}, "k has 3 heads, which do not divide the 4 heads of q"),
        ({}, {"dtype": torch.float8_e4m3fn}, "q must be float32, float16, bfloat16 or float64"),
    ],
)
def test_bad_arguments_are_named_on_every_rank(options, change, message):
    for outcome in ranks(2).outcomes(refused, options, change):
        assert isinstance(outcome, Raised) and outcome.type in ("ValueError", "TypeError")
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(outcome.message)


def test_a_killed_peer_raises_everywhere():
    """Between the passes: a backward asks nobody before it sends."""
    group = Ranks(3)
    try:
        outcomes = group.outcomes(killed, 1)
    finally:
        group.close()
    assert outcomes[1].type == "Killed"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.type == "PeerError" and "ring_attention" in outcome.message and "rank" in outcome.message
