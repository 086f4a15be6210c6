"""The tensor-parallel GPT is the GPT."""

import pytest
import torch

from parallel_ops.models import GPT, ParallelGPT
from support import parallel_gpt as on_rank
from support.distributed import Raised, ranks


def check(results, want):
    loss, logits, grads, weights = want
    for got in results:
        torch.testing.assert_close(got[0], loss, rtol=1e-11, atol=0)
        torch.testing.assert_close(got[1], logits, rtol=1e-9, atol=1e-10)
        assert got[2].keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(got[2][name].reshape(grad.shape), grad, rtol=1e-9, atol=1e-10, msg=name)
            assert torch.equal(got[3][name], weights[name]), name


@pytest.mark.parametrize("variant", ["gelu", "llama"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_loss_logits_and_gradients_are_those_of_one_process(variant, sequence_parallel):
    want = on_rank.reference(variant, torch.float64)
    check([on_rank.step(0, variant, sequence_parallel, torch.float64)], want)
    for size in (2, 4):
        check(ranks(size).run(on_rank.step, variant, sequence_parallel, torch.float64), want)


def test_dropout_is_the_same_at_any_size():
    want = on_rank.step(0, "dropout", False, torch.float64)
    assert want[0] != on_rank.step(0, "gelu", False, torch.float64)[0]
    for size in (2, 4):
        for sequence_parallel in (False, True):
            check(ranks(size).run(on_rank.step, "dropout", sequence_parallel, torch.float64), want)


@pytest.mark.parametrize("variant", ["gelu", "llama"])
def test_state_dicts_are_interchangeable(variant):
    config = on_rank.VARIANTS[variant]
    tokens, _ = on_rank.sample(config)
    torch.manual_seed(5)
    parallel, whole, flat = ParallelGPT(config), GPT(config), GPT(config)
    assert {k: v.shape for k, v in parallel.state_dict().items()} == {k: v.shape for k, v in whole.state_dict().items()}
    for source, target in ((parallel, whole), (whole, parallel)):
        with torch.no_grad():
            source.layers[0].mlp.up.weight.add_(0.1)
        target.load_state_dict(source.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(parallel.parameters(), whole.parameters(), strict=True))
        torch.testing.assert_close(parallel(tokens), whole(tokens))
    # The halves of a gated projection as one dimension, as its parameter has them.
    flat.load_state_dict(dict(whole.named_parameters(remove_duplicate=False)))
    assert all(torch.equal(a, b) for a, b in zip(flat.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize("variant", ["gelu", "llama"])
def test_the_state_dict_of_several_ranks_loads_into_one_process(variant):
    """Gathered by torch's own function."""
    want = on_rank.reference(variant, torch.float64)[3]
    for state in ranks(2).run(on_rank.full_state, variant):
        model = GPT(on_rank.VARIANTS[variant]).double()
        model.load_state_dict(state)
        assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())


def test_tokens_that_do_not_split_are_named():
    for outcome in ranks(2).outcomes(on_rank.odd_length):
        assert isinstance(outcome, Raised) and outcome.type == "ValueError"
        assert "tokens must have a length that the 2 ranks can split evenly, got 7" in outcome.message
