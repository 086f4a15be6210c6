"""The formulas of the docstring against the exact count, the choice, and the planner that asks the same."""

import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from parallel_ops.context_parallel import cost, placement, selection, token_ranges
from parallel_ops.context_parallel.cost import Algorithm, AttentionShape, Link
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
    """From that many tokens a rank, a step's arithmetic takes as long as what it sends."""
    shape = changed(causal=causal, itemsize=itemsize)
    for found, share in zip(cost.hiding_tokens(shape, bandwidth=45e9, flops=600e12), (1.0, 2.5), strict=True):
        area = found**2 / (2 if causal else 1)
        arithmetic = share * 4 * 32 * 128 * area / 600e12
        step = cost.keys_sent(found, found, 2 * 8 * 128, itemsize)
        assert arithmetic == pytest.approx((step.forward if share == 1.0 else step.backward) / 45e9)
    if causal and itemsize == 2:  # overlap of Llama's heads on H100s: about 0.8 K tokens by NVLink, 6.7 K by network
        assert cost.hiding_tokens(shape, bandwidth=370e9, flops=600e12).forward == pytest.approx(811, abs=1)
        assert cost.hiding_tokens(shape, bandwidth=45e9, flops=600e12).forward == pytest.approx(6667, abs=1)
    for options in ({"window_size": (4, 0)}, {"documents": True}, {"cp_layout": "contiguous", "causal": True}):
        with pytest.raises(ValueError, match="no such length"):
            cost.hiding_tokens(changed(**options), bandwidth=1.0, flops=1.0)


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
            areas, rows = cost.counts(replace(shape, documents=documents), u)
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
