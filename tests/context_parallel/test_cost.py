"""The formulas of the docstring against the exact count, the choice, and the planner that asks the same."""

import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from parallel_ops.context_parallel import cost, placement, selection, token_ranges
from parallel_ops.context_parallel.cost import Algorithm, Link
from parallel_ops.context_parallel.counts import AttentionShape, counts
from parallel_ops.planner import Plan, communication, presets

LLAMA = AttentionShape(length=65536, ranks=8, batch=1, heads=32, kv_heads=8, head_dim=128, itemsize=2)
NVLINK, NETWORK = Link(600e12, 370e9, 10e-6), Link(600e12, 45e9, 10e-6)


def changed(**options):
    return AttentionShape(**{**LLAMA.__dict__, **options})


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_formulas_of_the_docstring(layout, itemsize):
    shape = changed(causal=False, cp_layout=layout, itemsize=itemsize)
    p, n, b, h, g, d, w = 8, 8192, 1, 32, 8, 128, itemsize
    ring = (p - 1) * 2 * n * b * g * d * w, (p - 1) * 2 * n * b * g * d * (w + 4)
    assert cost.sent(shape, Algorithm(1, False)) == cost.sent(shape, Algorithm(1, True)) == [ring] * p
    exchange = n * b * (2 * (h + g) * d * w + 8 * h), n * b * (2 * (h + g) * d * w + 12 * h)
    assert cost.sent(shape, Algorithm(8, False)) == [tuple((p - 1) / p * size for size in exchange)] * p
    halves = [
        3 / 4 * e + r for e, r in zip(exchange, (2 * n * b * g * d * w, 2 * n * b * g * d * (w + 4)), strict=True)
    ]
    assert cost.sent(shape, Algorithm(4, False)) == [tuple(halves)] * p


@pytest.mark.parametrize("m", [2, 4])
def test_of_two_levels_the_slow_one_carries_a_copy_a_node(m):
    p, own = 8, 2 * 8192 * 8 * 128 * 2
    shape = changed(causal=False, ranks_per_node=m)
    for between, inside in cost.sent_by_level(shape, Algorithm(1, False)):
        assert between == ((p // m - 1) * own, 3 * (p // m - 1) * own)
        assert inside == ((m - 1) * p // m * own, 3 * (m - 1) * p // m * own)
    # Heads that ranks of a node exchange stay inside; a ring across nodes of as many ranks has one level.
    for between, inside in cost.sent_by_level(shape, Algorithm(m, False)):
        assert between.forward == (p // m - 1) * own and inside.forward > 0
    links = NETWORK, NETWORK._replace(inside=NVLINK.bandwidth)
    flat, two = (
        cost.seconds(replace(changed(length=16384), ranks_per_node=n), Algorithm(1, False), links[n > 1])
        for n in (1, m)
    )
    assert two < flat / 1.5


def test_a_slow_link_takes_a_less_even_layout():
    rng, documents = random.Random(2), []
    while (left := 131072 - sum(documents)) > 0:
        documents.append(min(round(rng.lognormvariate(6.2, 1.5)), left))
    shape = changed(length=131072, documents=tuple(documents))
    slow, none = (selection.select_layout([(1, shape)], None, link).cp_layout for link in (NETWORK, None))
    (even, _), (chosen, _) = (counts(replace(shape, cp_layout=layout), 1) for layout in (none, slow))
    assert max(chosen) > 1.1 * max(even) and slow not in ("zigzag", "contiguous")
    best = [
        min(cost.seconds(replace(shape, cp_layout=layout), way, NETWORK) for way in cost.algorithms(shape))
        for layout in (slow, none, "zigzag", "contiguous")
    ]
    assert best[0] == min(best) < 0.95 * best[1]


def test_a_causal_mask_saves_a_quarter_in_zigzag_and_half_in_contiguous_layout():
    whole = sum(s.forward for s in cost.sent(changed(causal=False), Algorithm(1, False)))
    for layout, share in (("zigzag", 3 / 4), ("contiguous", 1 / 2)):
        sent = [s.forward for s in cost.sent(changed(cp_layout=layout), Algorithm(1, False))]
        assert sum(sent) == share * whole and max(sent) == whole / 8
    # Striped, nearly all of it: of each pair of ranks one does not need the last token of the other.
    striped = [s.forward for s in cost.sent(changed(cp_layout="striped"), Algorithm(1, False))]
    assert whole - sum(striped) == 28 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_length_that_hides_the_transfer(causal, itemsize):
    """From that many tokens a rank, by the formulas of the docstring, a step's arithmetic takes as long as it sends."""
    h, g, w, f, b, half = 32, 8, itemsize, 600e12, 45e9, 1 if causal else 2
    for backward, n in enumerate((w * g * f / (h * b) / half, 2 * (w + 4) * g * f / (5 * h * b) / half)):
        area = n**2 / (2 if causal else 1)
        arithmetic = (2.5 if backward else 1.0) * 4 * h * 128 * area / f
        assert arithmetic == pytest.approx(cost.keys_sent(n, n, 2 * g * 128, w)[backward] / b)
    if causal and itemsize == 2:  # Llama's heads on H100s: about 0.8 K tokens by NVLink, 6.7 K by network
        assert w * g * f / (h * 370e9) == pytest.approx(811, abs=1) and w * g * f / (h * b) == pytest.approx(
            6667, abs=1
        )


def test_the_choice_and_its_reason():
    long, why, _ = selection.select(changed(length=8 * 32768), NVLINK)
    assert long == Algorithm(1, False) and why.startswith("ring: fastest") and "all_to_all" in why and "MiB sent" in why
    # Where the ring cannot hide, heads change hands, if there are enough.
    assert selection.select(changed(length=8 * 1024), NETWORK).algorithm.ulysses_degree > 1
    assert selection.select(
        changed(length=8 * 1024, heads=8, kv_heads=1, documents=True), NETWORK
    ).algorithm == Algorithm(1, True)
    # Nothing is known of a CPU: the fewest bytes.
    for shape in (LLAMA, changed(kv_heads=32), changed(kv_heads=1)):
        chosen = selection.select(shape, None).algorithm
        most = {way: max(sum(s) for s in cost.sent(shape, way)) for way in cost.algorithms(shape)}
        assert most[chosen] == min(most.values())
    assert cost.algorithms(changed(kv_heads=6)) == [Algorithm(1, False), Algorithm(1, True), Algorithm(2, False)]


def mixed(length, seed):
    """Lengths of documents, one of them long, that make up a sequence."""
    rng = random.Random(seed)
    found = [length // rng.choice([2, 4, 50])]
    while sum(found) < length:
        found.append(min(rng.randrange(length // 20), length - sum(found)))
    rng.shuffle(found)
    return tuple(found)


@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (True, (9, 0)), (False, (-1, -1))])
@pytest.mark.parametrize("u", [1, 2])
def test_documents_are_counted_pair_by_pair(u, causal, window):
    for seed, length in enumerate((61, 160) if u == 1 else (64, 160)):
        documents = mixed(length, seed)
        own = np.repeat(np.arange(len(documents)), documents)
        q, k = np.arange(length)[:, None], np.arange(length)[None]
        mask = own[:, None] == own[None]
        mask &= (k <= q) if causal else True
        mask &= (q - k <= window[0]) if window[0] >= 0 else True
        ranges = np.stack([mask.argmax(1), length - 1 - mask[:, ::-1].argmax(1)])
        for layout in ("zigzag", "contiguous", "striped", placement.balanced([ranges], 4)):
            shape = changed(length=length, ranks=4, cp_layout=layout, causal=causal, window_size=window)
            areas, rows = counts(replace(shape, documents=documents), u)
            step = 1 if layout == "striped" else u
            shards = [token_ranges.shard_ranges(layout, length, 4, i * step, u) for i in range(4 // u)]
            places = [[t for part in one for t in range(part.start, part.last + 1, part.step)] for one in shards]
            assert areas == [mask[own].sum() for own in places]
            for i, source in enumerate(places):
                for j, target in enumerate(places):
                    seen = mask[np.ix_(target, source)].any(0).sum()
                    assert rows[i][j] == (0 if i == j else len(source) if layout == "striped" else seen)
    with pytest.raises(ValueError, match="documents must be lengths of 61 tokens in all, got 60"):
        changed(length=61, documents=(30, 30))


def test_the_layout_of_documents():
    """One sequence takes zigzag, which sends least where areas are even; documents what balances and sends least."""
    whole, short, long = (65536,), (*(500,) * 131, 36), (32768, *(512,) * 64)
    for link in (None, NETWORK):
        for documents, expected in ((whole, "zigzag"), (short, "contiguous"), (long, "balanced")):
            ranges = placement.ranges_of(documents, None, 0)
            layouts = ("zigzag", "contiguous", placement.balanced([ranges], 8))
            kinds = [(3, changed(documents=documents, kv_heads=1)), (1, changed(documents=documents, kv_heads=1))]
            found = selection.select_layout(kinds, layouts, link)
            name = found.cp_layout if found.cp_layout in layouts[:2] else "balanced"
            assert name == expected and found.reason.startswith(f"{expected} "), found.reason
            assert found == selection.select_layout(kinds, layouts, link)
    # Of documents that end where shards do nothing is sent, so nothing beats a ring.
    alone = changed(documents=(512,) * 128, cp_layout="contiguous")
    assert max(map(sum, cost.sent(alone, Algorithm(1, False)))) == 0
    assert selection.select(alone, NETWORK).algorithm == Algorithm(1, False)


def test_gathering_more_than_memory_has_is_not_chosen():
    few = {"heads": 8, "kv_heads": 1, "documents": True}
    assert selection.select(changed(length=8 * 1024, **few), NETWORK).algorithm.all_gather
    assert not selection.select(changed(length=2**24, **few), NETWORK).algorithm.all_gather


@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
def test_the_planner_counts_what_every_rank_sends(kind):
    model = presets.model("llama3-8b")
    plan = Plan(cp=8, global_batch=1, cp_kind=kind)
    found = [t for t in communication(model, presets.cluster("h100x8"), plan) if t.group == "cp"]
    shape = AttentionShape(
        length=model.seq_length, ranks=8, batch=1, heads=model.num_heads, kv_heads=model.num_kv_heads,
        head_dim=model.head_dim, itemsize=2,
    )  # fmt: skip
    for sent in cost.sent(shape, Algorithm(1 if kind == "ring" else 8, False)):
        assert sum(t.bytes for t in found) == pytest.approx(model.num_layers * sum(sent))


def test_the_cost_needs_no_torch():
    code = "import sys, parallel_ops.context_parallel.cost; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
