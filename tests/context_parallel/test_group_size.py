"""Documents of a batch in groups of ranks: every document once, groups aligned, ranks equally loaded."""

import math
import random

import pytest

from parallel_ops.context_parallel.group_size import group_documents, sizes_of


def drawn(tokens, sigma, longest, seed):
    rng, out = random.Random(seed), []
    while sum(out) < tokens:
        length = int(rng.lognormvariate(math.log(500), sigma))
        out.append(min(max(1, length), longest, tokens - sum(out)))
    return out


def check(lengths, ranks, found):
    assert sorted(i for group in found.groups for i in group.documents) == list(range(len(lengths)))
    place = 0
    for group in found.groups:
        assert group.first == place and (group.size == ranks or group.first % group.size == 0)
        assert group.size in (*sizes_of(ranks), ranks)
        assert any(lengths[i] for i in group.documents) and list(group.documents) == sorted(group.documents)
        place += group.size
    assert place == ranks


def test_any_documents_are_shared_out():
    rng = random.Random(0)
    for _ in range(100):
        ranks = rng.choice([1, 2, 3, 4, 6, 8, 12, 32])
        lengths = [rng.choice([0, 1, 2, 7, 100, 5000]) for _ in range(rng.randrange(1, 40))] + [3]
        found = group_documents(lengths, ranks, pair=rng.choice([0.0, 1e-5, 1e-3]))
        check(lengths, ranks, found)
        assert found.load > 1 - 1e-9 and found.tokens > 1 - 1e-9


@pytest.mark.parametrize(("ranks", "load"), [(8, 1.03), (64, 1.03)])
def test_ranks_are_equally_loaded(ranks, load):
    """Many documents a rank; work and tokens of the most loaded rank, of the mean."""
    for seed in range(3):
        lengths = drawn(ranks * 16384, 1.5, 8 * 16384, seed)
        found = group_documents(lengths, ranks, pair=3e-5)
        check(lengths, ranks, found)
        assert found.load < load and found.tokens <= 1.1 + 1e-9


def test_long_documents_have_many_ranks_and_short_ones_one():
    lengths = [16384] + [64] * 256 * 3
    found = group_documents(lengths, 16, pair=1e-5)
    assert found.groups[0].size == 8 and 0 in found.groups[0].documents
    assert {group.size for group in found.groups[1:]} == {1}
    # As many as the mean allows, all of them for one document; of three ranks no power of two is a part but one.
    assert [group.size for group in group_documents([4096], 8, pair=1e-5).groups] == [8]
    assert [group.size for group in group_documents([4096], 3, pair=1e-5).groups] == [3]
    assert [group.size for group in group_documents([64] * 8, 8, pair=1e-5).groups] == [1] * 8


def test_bad_input_names_its_argument():
    for lengths, ranks, error in (([], 2, "lengths"), ([0], 2, "lengths"), ([3, -1], 2, "lengths"), ([3], 0, "ranks")):
        with pytest.raises(ValueError, match=error):
            group_documents(lengths, ranks, pair=0.0)
