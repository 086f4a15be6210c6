"""A checkpoint of the model and its optimizer, saved by two ranks, goes on anywhere."""

import pytest
import torch

from parallel_ops.models import GPT, ParallelGPT
from support import parallel_gpt as on_rank
from support.distributed import ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SAVED, END = 3, 7


@pytest.mark.parametrize("variant", ["gelu", "llama"])
def test_training_goes_on_as_if_it_had_not_stopped(variant, tmp_path):
    path = str(tmp_path)
    steps = range(SAVED, END)
    uninterrupted = ranks(2).run(on_rank.go_on, variant, ParallelGPT, range(END), None, path, SAVED)[0]
    losses, end = uninterrupted[0][SAVED:], uninterrupted[1]
    assert losses[-1] < uninterrupted[0][0]
    # The same ranks: the same bits.
    for got, weights in ranks(2).run(on_rank.go_on, variant, ParallelGPT, steps, path, None, 0):
        assert got == losses
        assert weights.keys() == end.keys() and all(torch.equal(value, end[name]) for name, value in weights.items())
    # Other sizes add in another order: a few units of fp64's 2e-16. Only a key's bias, whose gradient would be zero but
    # for that, moves by more, since Adam divides the one by the other; the loss does not depend on it.
    others = [on_rank.go_on(0, variant, kind, steps, path, None, 0) for kind in (GPT, ParallelGPT)]
    others += ranks(4).run(on_rank.go_on, variant, ParallelGPT, steps, path, None, 0)
    for got, weights in others:
        assert got == pytest.approx(losses, rel=1e-13, abs=0)
        torch.testing.assert_close(weights, end, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("variant", ["gelu", "llama"])
def test_a_checkpoint_of_one_process_goes_on_at_four_ranks(variant, tmp_path):
    path = str(tmp_path)
    uninterrupted = on_rank.go_on(0, variant, GPT, range(END), None, path, SAVED)[0]
    for got, _ in ranks(4).run(on_rank.go_on, variant, ParallelGPT, range(SAVED, END), path, None, 0):
        assert got == pytest.approx(uninterrupted[SAVED:], rel=1e-13, abs=0)
