"""Balanced placements: area and rows against dense masks, and how good they are on documents, video and windows."""

import numpy as np
import pytest
from numpy.typing import NDArray

from parallel_ops.context_parallel import placement
from parallel_ops.context_parallel.token_ranges import lengths, shard_ranges

Ranges = NDArray[np.int32]


def packed(edges: NDArray[np.int64], causal: bool = True) -> Ranges:
    document = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    last = np.arange(edges[-1]) if causal else edges[document + 1] - 1
    return np.stack([edges[document], last]).astype(np.int32)


def lognormal(length: int, seed: int) -> Ranges:
    """Documents of 500 tokens in the median, with sigma 1.5."""
    sizes = np.random.default_rng(seed).lognormal(np.log(500), 1.5, length // 100).astype(np.int64) + 1
    edges = np.concatenate([[0], sizes.cumsum()])
    return packed(np.append(edges[edges < length], length))


def windowed(ranges: Ranges, width: int) -> Ranges:
    return np.stack([np.maximum(ranges[0], np.arange(ranges.shape[1]) - width + 1), ranges[1]])


def test_area_and_rows_are_those_of_dense_masks() -> None:
    rng = np.random.default_rng(0)
    for _ in range(150):
        length, ranks = int(rng.integers(0, 120)), int(rng.integers(1, 9))
        edges = np.unique([0, length, *rng.integers(0, length + 1, 4)])
        exact = rng.random() < 0.7
        ranges = packed(edges, rng.random() < 0.5) if length else np.zeros((2, 0), np.int32)
        if not exact:
            ranges = np.sort([rng.integers(0, length + 1, length), rng.integers(-1, max(length, 1), length)])
        keys = np.arange(length)
        mask = (keys >= ranges[0][:, None]) & (keys <= ranges[1][:, None])
        balanced = placement.balanced([ranges], ranks)
        for layout in (balanced, "zigzag", "contiguous"):
            owner = np.full(length, -1)
            for rank in range(ranks):
                for part in shard_ranges(layout, length, ranks, rank):
                    owner[part.start : part.last + 1] = rank
            assert (owner >= 0).all()
            assert (placement.area(ranges, layout, ranks) == np.bincount(owner, mask.sum(1), ranks)).all()
            seen = np.stack([mask[owner == rank].any(0) for rank in range(ranks)])
            want = np.stack([seen[:, owner == rank].sum(1) for rank in range(ranks)]) * (1 - np.eye(ranks, dtype=int))
            got = placement.rows_sent(ranges, layout, ranks)
            assert (got == want).all() if exact else (got >= want).all()
            assert (got <= np.bincount(owner, minlength=ranks)[:, None]).all()
            if ranks % 2 == 0 and exact:  # to nodes of two ranks
                seen = np.stack([mask[owner // 2 == node].any(0) for node in range(ranks // 2)])
                want = np.stack([seen[:, owner == rank].sum(1) for rank in range(ranks)])
                want[np.arange(ranks), np.arange(ranks) // 2] = 0
                assert (placement.rows_sent(ranges, layout, ranks, 2) == want).all()


def test_documents_in_closed_form_are_their_ranges() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        sizes = rng.integers(0, 60, rng.integers(1, 7))
        sizes[0] += 1
        left, right = (None if n == 3 else (0, 4, 50)[n] for n in rng.integers(0, 4, 2))
        length, ranks = int(sizes.sum()), int(rng.integers(1, 6))
        starts, ends = (np.repeat(edge, sizes) for edge in (sizes.cumsum() - sizes, sizes.cumsum() - 1))
        array = placement.cut(np.stack([starts, ends]), left, right)
        documents, places = placement.Documents(sizes, left, right), np.arange(length)
        assert documents.length == length and (np.stack(documents.bounds(places)) == array).all()
        edges = np.unique([0, length, *rng.integers(0, length + 1, 4)])
        assert (documents.areas(edges) == np.add.reduceat(array[1] - array[0] + 1, edges[:-1])).all()
        layout = placement.balanced([documents], ranks)
        assert layout == placement.balanced([array], ranks)
        for each in (layout, "zigzag", "contiguous", "striped"):
            assert (placement.area(documents, each, ranks) == placement.area(array, each, ranks)).all()
        assert (placement.rows_sent(documents, layout, ranks) == placement.rows_sent(array, layout, ranks)).all()


@pytest.mark.parametrize("length", [0, 1, 7, 64, 1000, 4099])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_tokens_of_ranks_are_equal_to_a_chunk_and_independent_of_the_mask(length: int, ranks: int) -> None:
    full = np.stack([np.zeros(length), np.full(length, length - 1)]).astype(np.int32)
    causal = np.stack([np.zeros(length), np.arange(length)]).astype(np.int32)
    layout = placement.balanced([causal], ranks)
    assert layout == placement.balanced([causal.copy()], ranks)
    tokens = lengths(layout, length, ranks)
    assert sum(tokens) == length
    assert tokens == lengths(placement.balanced([full], ranks), length, ranks)
    chunk = length // len(layout.split(","))
    assert max(tokens) - min(tokens) <= max(chunk, ranks)


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("case", ["documents 128K", "documents 1M", "video 1M", "causal", "window and full"])
def test_largest_area_is_near_the_mean(case: str, ranks: int) -> None:
    length = 1 << (20 if "1M" in case else 17)
    causal = packed(np.array([0, length]))
    frames = packed(np.arange(0, length + 1, 4096), causal=False) * np.array([[0], [1]])
    masks = {
        "documents 128K": [lognormal(length, 0)],
        "documents 1M": [lognormal(length, 1)],
        "video 1M": [frames],
        "causal": [causal],
        "window and full": [windowed(lognormal(length, 2), 4096), lognormal(length, 2)],
    }[case]
    layout = placement.balanced(masks, ranks)
    loads = sum(placement.area(mask, layout, ranks) for mask in masks)
    assert loads.max() <= (1.02 if ranks == 8 else 1.05) * loads.mean()
    rows = sum(int(placement.rows_sent(mask, layout, ranks).sum()) for mask in masks)
    zigzag_ring = sum(placement.rows_sent(causal, "zigzag", ranks).sum() for _ in masks)
    if "documents" in case:
        assert rows <= 0.5 * zigzag_ring
        assert placement.area(masks[0], "zigzag", ranks).max() > 1.2 * loads.mean()
    if case == "causal":
        assert rows == zigzag_ring


def test_weights_count_layers_of_a_kind() -> None:
    full = lognormal(1 << 14, 3)
    window = windowed(full, 64)
    assert placement.balanced([window, full], 4, weights=[3, 1]) == placement.balanced([window] * 3 + [full], 4)


def test_rows_of_a_striped_layout_are_refused() -> None:
    with pytest.raises(ValueError, match="rows_sent: layout must have chunks of adjacent tokens, got 'striped'"):
        placement.rows_sent(packed(np.array([0, 8])), "striped", 2)
