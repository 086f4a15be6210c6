"""The formulas of the docstring against the exact count, the choice, and the planner that asks the same."""

import subprocess
import sys

import pytest

from parallel_ops.context_parallel import cost
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
    long, why = cost.select(changed(length=8 * 32768), NVLINK)
    assert long == Algorithm(1, False) and why.startswith("ring: fastest") and "all_to_all" in why and "MiB sent" in why
    # Where the ring cannot hide, heads change hands, if there are enough.
    assert cost.select(changed(length=8 * 1024), NETWORK).algorithm.ulysses_degree > 1
    assert cost.select(changed(length=8 * 1024, heads=8, kv_heads=1, documents=True), NETWORK).algorithm == Algorithm(
        1, True
    )
    # Nothing is known of a CPU: the fewest bytes.
    for shape in (LLAMA, changed(kv_heads=32), changed(kv_heads=1)):
        chosen = cost.select(shape, None).algorithm
        most = {way: max(sum(s) for s in cost.sent(shape, way)) for way in cost.algorithms(shape)}
        assert most[chosen] == min(most.values())
    assert cost.algorithms(changed(kv_heads=6)) == [Algorithm(1, False), Algorithm(1, True), Algorithm(2, False)]


def test_gathering_more_than_memory_has_is_not_chosen():
    few = {"heads": 8, "kv_heads": 1, "documents": True}
    assert cost.select(changed(length=8 * 1024, **few), NETWORK).algorithm.all_gather
    assert not cost.select(changed(length=2**24, **few), NETWORK).algorithm.all_gather


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
