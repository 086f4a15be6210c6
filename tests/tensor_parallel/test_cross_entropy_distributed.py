"""vocab_parallel_cross_entropy over gloo groups of 2, 3 and 4 ranks."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_ops.ops import cross_entropy_reference
from support.numerics import suite, vocab_parallel
from support.numerics.suite import DTYPES, randn
from support.numerics.vocab_parallel import sharded_cross_entropy, targets
from support.ranks.distributed import Raised, ranks

groups = pytest.mark.parametrize("shards", [2, 3, 4])


@groups
@settings(max_examples=20)
@given(
    shape=st.sampled_from([(1,), (5,), (2, 3), (4, 1, 2)]),
    vocab=st.sampled_from([4, 11, 64, 1030, 4099]),
    dtype=st.sampled_from(DTYPES),
    options=st.fixed_dictionaries(
        {
            "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
            "z_loss": st.sampled_from([0.0, 1e-2]),
            "softcap": st.sampled_from([None, 4.0]),
            "reduction": st.sampled_from(["none", "mean", "sum"]),
        }
    ),
    inplace=st.booleans(),
    scale=st.sampled_from([1.0, 10.0]),
    seed=st.integers(0, 1000),
)
def test_numerics_of_every_option(shards, shape, vocab, dtype, options, inplace, scale, seed):
    logits = randn(*shape, vocab, dtype=dtype, seed=seed, scale=scale)
    target = targets(shape, vocab, seed=seed)
    ours = sharded_cross_entropy(shards, inplace_backward=inplace, **options)
    reference = functools.partial(cross_entropy_reference, **options)
    suite.check_numerics(ours, reference, [logits, target], slack_ulps=4)


@groups
def test_targets_on_the_edges_of_shards(shards):
    sizes = vocab_parallel.sizes_of(13, shards)
    edges = sorted({e for end in torch.tensor(sizes).cumsum(0).tolist() for e in (end - 1, end) if e < 13} | {0})
    logits, target = randn(len(edges), 13, dtype=torch.float32), torch.tensor(edges)
    for smoothing in (0.0, 0.3):
        reference = functools.partial(cross_entropy_reference, label_smoothing=smoothing)
        ours = sharded_cross_entropy(shards, label_smoothing=smoothing)
        suite.check_numerics(ours, reference, [logits, target], slack_ulps=4)
        suite.check_numerics(ours, reference, [logits, target.int()], slack_ulps=4)


@groups
def test_padded_vocabulary(shards):
    """-inf columns, a whole shard of them too: as if they were not there, under smoothing as well."""
    logits, target = randn(6, 9, dtype=torch.float32), targets((6,), 9)
    for sizes in ([9, *[4] * (shards - 1)], vocab_parallel.sizes_of(16, shards)):
        for options in ({}, {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.1}):
            padding = torch.full((6, sum(sizes) - 9), -torch.inf)

            def ours(x, t, sizes=sizes, options=options, padding=padding):
                return sharded_cross_entropy(shards, sizes, **options)(torch.cat([x, padding], dim=-1), t)

            reference = functools.partial(cross_entropy_reference, **options)
            suite.check_numerics(ours, reference, [logits, target], slack_ulps=4)


@groups
def test_all_ignored_is_zero(shards):
    logits, target = randn(3, 8, dtype=torch.bfloat16), torch.full((3,), -100)
    loss, gradient = suite.forward_backward(
        sharded_cross_entropy(shards, label_smoothing=0.1, z_loss=0.1), [logits, target]
    )
    assert loss == 0 and (gradient == 0).all()


@groups
def test_very_large_logits(shards):
    logits, target = randn(4, 400, dtype=torch.float32, scale=5e3), targets((4,), 400)
    for options in ({"reduction": "none"}, {"label_smoothing": 0.1}):
        reference = functools.partial(cross_entropy_reference, **options)
        suite.check_numerics(sharded_cross_entropy(shards, **options), reference, [logits, target], slack_ulps=4)


@groups
def test_integer_logits_give_the_unsharded_gradient_exactly(shards):
    """One column far above the rest: probabilities are exactly 0 and 1, so that sums cannot differ by rounding."""
    logits = torch.zeros(5, 12).scatter_(1, torch.arange(5)[:, None], 200.0).requires_grad_()
    target = torch.tensor([0, 3, 2, 11, 4])
    sharded = suite.forward_backward(sharded_cross_entropy(shards, reduction="sum"), [logits, target])
    whole = suite.forward_backward(functools.partial(cross_entropy_reference, reduction="sum"), [logits, target])
    assert all(torch.equal(a, b) for a, b in zip(sharded, whole, strict=True))


def test_one_agreement_and_one_gather_for_any_number_of_rows():
    for rows, options in ((6, {}), (12_000, {}), (6, {"label_smoothing": 0.1, "inplace_backward": True})):
        for sent in ranks(2).run(functools.partial(vocab_parallel.messages, **options), rows):
            assert sent == ["consistency", "primitives"]


def test_a_shard_may_change_its_size():
    logits, target = randn(4, 10, dtype=torch.float32), targets((4,), 10)
    for sizes in ([5, 5], [5, 5], [6, 4], [5, 5], [4, 6]):
        ours = sharded_cross_entropy(2, sizes)
        suite.check_numerics(ours, cross_entropy_reference, [logits, target], slack_ulps=4)
    wider = randn(4, 11, dtype=torch.float32)
    suite.check_numerics(sharded_cross_entropy(2, [5, 6]), cross_entropy_reference, [wider, target], slack_ulps=4)


@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_to_one_graph(inplace):
    logits, target = randn(5, 9, dtype=torch.float32).detach(), targets((5,), 9, ignored=0.5)
    options = {"label_smoothing": 0.1, "inplace_backward": inplace}
    for pairs in ranks(2).run(vocab_parallel.compiled, logits, target, [4, 5], options):
        for eager, compiled in zip(*pairs, strict=True):
            torch.testing.assert_close(eager, compiled, rtol=1e-6, atol=1e-7)


def check_all_raise(outcomes, message):
    assert all(isinstance(o, Raised) and o.type == "ValueError" for o in outcomes), outcomes
    assert any(message in o.message for o in outcomes), [o.message for o in outcomes]


@groups
def test_disagreement_raises_on_every_rank(shards):
    group = ranks(shards)
    logits, target = randn(3, 5 * shards, dtype=torch.float32), targets((3,), 5 * shards)
    known = sharded_cross_entropy(shards, [5] * shards)
    for _ in range(2):  # with the layout unknown, then known
        check_all_raise(group.outcomes(vocab_parallel.mismatched_rows, [*range(2, 2 + shards)]), "make different calls")
        check_all_raise(group.outcomes(vocab_parallel.wrong_shape_on_one_rank, 1), "target must have shape [3]")
        check_all_raise(group.outcomes(vocab_parallel.differing_options), "make different calls")
        suite.check_numerics(known, cross_entropy_reference, [logits, target], slack_ulps=4)  # the group still works


@groups
@pytest.mark.parametrize("value", [-1, 20, 2**40])
def test_a_wrong_target_raises_on_every_rank(shards, value):
    message = f"target {value} in row 3"
    check_all_raise(ranks(shards).outcomes(vocab_parallel.wrong_target, None, value), message)
    outcomes = ranks(shards).outcomes(vocab_parallel.wrong_target, shards - 1, value)  # on one rank alone
    check_all_raise(outcomes, f"{message} (on rank {shards - 1})")


@groups
def test_ranks_that_do_not_wait_for_the_device_ask_at_the_first_call_of_a_kind(shards):
    rows, cols = [8, 8, 9, 9, 9, 9], [5, 5, 5, 5, 6, 5]
    names = ["agree", "agree", "differ", "agree", "agree", "agree"]
    for results in ranks(shards).run(vocab_parallel.as_on_cuda, rows, cols, names):
        assert [count for _, count in results] == [2, 1, 1, 2, 2, 1]  # a vocabulary of another size is asked about too
        for (loss, _), n, width in zip(results, rows, cols, strict=True):
            if isinstance(loss, str):
                assert "make different calls" in loss and "rank 0: 10 rows" in loss
            else:
                logits = torch.eye(n, shards * width)
                expected = torch.nn.functional.cross_entropy(logits, torch.arange(n) % width, reduction="none")
                torch.testing.assert_close(loss, expected)
