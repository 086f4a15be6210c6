"""ring_attention over gloo groups of 2, 3 and 4 ranks, against full attention in fp64."""

import pytest
import torch

from parallel_ops import flash_attention, ring_attention
from support import context_parallel_ranks as on_rank
from support.context_parallel import Case, joined, oracle
from support.distributed import Raised, Ranks, ranks

groups = pytest.mark.parametrize("size", [2, 3, 4])
LAYOUTS = ("zigzag", "striped", "contiguous")


def cases_of(size):
    """Every layout and way; odd lengths, fewer tokens than ranks, grouped queries, and every option."""
    documents = (0, 3, 7, 0, 1, 8)
    for layout in LAYOUTS:
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
            yield Case(19, window=6, sink=True, softcap=2.0, dropout_p=0.3, documents=documents, **options)


@groups
def test_outputs_and_gradients_are_those_of_the_whole_sequence(size):
    cases = list(cases_of(size))
    results = ranks(size).run(on_rank.cases, cases)
    for case, of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        for got, want in zip(joined(case, of_ranks), oracle(case, case.tensors()), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=lambda m: f"{case}: {m}")  # noqa: B023


def test_the_dropout_mask_is_the_same_on_any_number_of_ranks():
    """Values that show the mask: v is one, so each output is the sum of what was kept."""
    case = Case(23, heads=4, kv_heads=4, dropout_p=0.5)
    whole = [joined(case, [r[0] for r in ranks(size).run(on_rank.cases, [case])]) for size in (2, 3, 4)]
    for other in whole[1:]:
        torch.testing.assert_close(other, whole[0], rtol=1e-9, atol=1e-11)
    assert not torch.allclose(whole[0][0], oracle(Case(23, heads=4, kv_heads=4), case.tensors())[0])


@pytest.mark.parametrize("algorithm", ["ring", "hybrid", "all_gather"])
def test_every_run_has_the_same_bits(algorithm):
    way = {"hybrid": {"ulysses_degree": 2}, "all_gather": {"all_gather": True}}.get(algorithm, {})
    for results in ranks(4).run(on_rank.repeated, Case(33, heads=4, kv_heads=2, head_dim=16, **way), 3):
        for again in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(again, results[0], strict=True))


@pytest.mark.parametrize("algorithm", ["ring", "all_to_all"])
@pytest.mark.parametrize(("how", "recomputed"), [("reentrant", True), ("plain", True), ("selective", False)])
def test_activation_checkpointing(algorithm, how, recomputed):
    """Dropout included; a policy that saves the op runs it once."""
    for plain, again, posted in ranks(2).run(on_rank.checkpointed, how, algorithm):
        assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
        assert (posted > 0) == recomputed


@pytest.mark.parametrize("algorithm", ["all_to_all", "auto", "ring"])
def test_compiles_to_one_graph_for_any_length(algorithm):
    for results in ranks(2).run(on_rank.compiled, algorithm):
        for eager, compiled in zip(results[::2], results[1::2], strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["ring", "all_to_all", "all_gather"])
def test_custom_op_contract(algorithm):
    ranks(2).run(on_rank.opcheck, algorithm)


def test_autocast_runs_in_its_dtype():
    for auto, cast in ranks(2).run(on_rank.with_autocast):
        assert auto[0].dtype is torch.bfloat16 and torch.equal(auto[0], cast[0])
        assert all(got.dtype is torch.float32 for got in auto[1:])
        assert all(torch.equal(got, want.float()) for got, want in zip(auto[1:], cast[1:], strict=True))


def test_two_rings_at_once_on_ranks_apart():
    case = on_rank.SUB_GROUP_CASE
    results = ranks(4).run(on_rank.sub_groups)
    for pair in (results[::2], results[1::2]):
        for got, want in zip(joined(case, pair), oracle(case, case.tensors()), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@groups
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("tokens", "make different calls"),
        ("heads", "make different calls"),
        ("layout", "in striped"),
        ("algorithm", "all_gather in zigzag"),
        ("window", "window=5"),
        ("seed", "seed=1"),
        ("documents", "documents=(0, 4, "),
        ("documents too short", "cu_seqlens must rise from 0 to"),
        ("documents that fall", "cu_seqlens must rise from 0 to"),
        ("length", "rejected its arguments"),
        ("one bad argument", "rejected its arguments: ring_attention: window must be at least 1"),
        ("gradients", "requires_grad=False"),
    ],
)
def test_disagreement_raises_on_every_rank(size, what, message):
    outcomes = ranks(size).outcomes(on_rank.mismatched, what)
    assert all(isinstance(o, Raised) and o.type == "ValueError" for o in outcomes), outcomes
    assert any(message in o.message for o in outcomes), [o.message for o in outcomes]
    ranks(size).run(on_rank.goes_on)


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"layout": "blocks"}, {}, "layout must be one of zigzag, striped, contiguous, got 'blocks'"),
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
        ({"window": 4, "causal": False}, {}, "window needs causal=True"),
        ({"window": 0}, {}, "window must be at least 1"),
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
    for outcome in ranks(2).outcomes(on_rank.refused, options, change):
        assert isinstance(outcome, Raised) and outcome.type in ("ValueError", "TypeError")
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(outcome.message)


def test_the_reference_means_the_same():
    for op, reference in ranks(2).run(on_rank.by_reference):
        torch.testing.assert_close(op, reference, rtol=1e-10, atol=1e-12)


class TestOneRank:
    def test_is_flash_attention(self):
        q, k, v = on_rank.inputs(0)
        options = {"window": 3, "sink": torch.ones(4), "dropout_p": 0.2, "seed": 5}
        got = ring_attention(q, k, v, group=None, layout="striped", algorithm="hybrid", length=4, **options)
        assert torch.equal(got, flash_attention(q, k, v, **options))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"layout": "blocks"}, ValueError, "layout must be one of"),
            ({"algorithm": "usp"}, ValueError, "algorithm must be one of"),
            ({"length": 5}, ValueError, "rank 0 of 1 has 5 of length=5 tokens in zigzag layout, but q has 4"),
            ({"length": 4.0}, TypeError, "length must be an int or None, got float"),
            ({"ulysses_degree": 1}, ValueError, "ulysses_degree is for algorithm"),
            (
                {"ulysses_degree": "all", "algorithm": "hybrid"},
                TypeError,
                "ulysses_degree must be an int or None, got str",
            ),
            ({"group": "cp"}, TypeError, "group must be None or a torch.distributed.ProcessGroup"),
        ],
    )
    def test_bad_arguments_are_named(self, options, error, message):
        with pytest.raises(error, match=message):
            ring_attention(*on_rank.inputs(0), **{"group": None, **options})


def test_why_an_algorithm_was_chosen():
    for why in ranks(2).run(on_rank.why):
        assert why.startswith("ring: sends least") and "all_gather" in why and "all_to_all" in why


def test_a_killed_peer_raises_everywhere():
    """Between the passes: a backward asks nobody before it sends."""
    group = Ranks(3)
    try:
        outcomes = group.outcomes(on_rank.killed, 1)
    finally:
        group.close()
    assert outcomes[1].type == "Killed"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.type == "PeerError" and "ring_attention" in outcome.message and "rank" in outcome.message
