"""Tokens on their way to the experts of all ranks and back, against the same on one process."""

import pytest
import torch

from parallel_ops.expert_parallel import AuxiliaryLosses, update_selection_bias
from parallel_ops.ops import load_balancing_loss, route
from support.parallelism import expert_parallel as on_rank
from support.ranks.distributed import ranks


def expected(got, capacity):
    """Each token's sum over its experts, of which a capacity drops those that come too late."""
    x, experts, weights = (got[name] for name in ("x", "experts", "weights"))
    factors = (experts + 1) * weights
    if capacity is not None:
        seen = {}
        for token, row in enumerate(experts.tolist()):
            for j, expert in enumerate(row):
                seen[expert] = seen.get(expert, 0) + 1
                if seen[expert] > capacity:
                    factors[token, j] = 0
    kept = factors != 0
    out = x * factors.sum(1, keepdim=True)
    dx = got["grad"] * factors.sum(1, keepdim=True)
    dweights = (got["grad"] * x).sum(1, keepdim=True) * (experts + 1) * kept
    return out, dx, dweights


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tokens_find_their_experts_and_the_way_back(size, pytestconfig):
    for trial in range(pytestconfig.getoption("trials") or 6):
        num_experts, top_k = (8, 4, 12)[trial % 3], (2, 1, 4)[trial % 3]
        capacity = (None, None, 3, None, 0, 1)[trial % 6]
        held = num_experts // size  # in any trial the experts of a rank are all its chunks, or one, or a half
        chunks = 1 if size == 1 else (held, 1, held // 2 if held % 2 == 0 else held)[(trial + trial // 3) % 3]
        arguments = trial, num_experts, top_k, capacity, chunks
        found = ranks(size).run(on_rank.sent, *arguments) if size > 1 else [on_rank.sent(0, *arguments)]
        for got in found:
            for name, want in zip(("out", "dx", "dweights"), expected(got, capacity), strict=True):
                torch.testing.assert_close(
                    got[name], want, rtol=1e-5, atol=1e-5, msg=lambda m, n=name, t=trial: f"{t} {n}: {m}"
                )
        if capacity is None:
            assert sum(int(got["rows"]) for got in found) == sum(got["experts"].numel() for got in found)


@pytest.mark.parametrize("chunks", [1, 2])
def test_exchanges_end_with_their_backward(chunks):
    assert ranks(2).run(on_rank.left_behind, chunks) == [0, 0]


def test_ranks_of_another_capacity():
    for outcome in ranks(2).outcomes(on_rank.of_another_capacity):
        assert outcome.type == "ValueError" and "capacity=3" in outcome.message and "capacity=4" in outcome.message


def test_gradients_of_the_losses_are_those_of_their_formulas():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 40, 6, generator=generator, dtype=torch.float64)
    for over_model in (False, True):
        given, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        losses = AuxiliaryLosses(0.3, 0.05, over_model=over_model)
        total = torch.zeros((), dtype=torch.float64)
        for layer in given:
            routing = route(layer, 2)
            total = losses.attach(total, routing, routing.load)
        loss = losses.follow(total)
        (2.5 * loss).backward()
        routings = [route(layer, 2) for layer in plain]
        z = sum(r.z_sum for r in routings) / 40
        if over_model:
            load, scores = sum(r.load for r in routings) / 3, sum(r.score_sums for r in routings) / 3
            aux = load_balancing_loss(load, scores, 40, 2)
        else:
            aux = sum(load_balancing_loss(r.load, r.score_sums, 40, 2) for r in routings)
        want = 0.3 * aux + 0.05 * z
        (2.5 * want).backward()
        torch.testing.assert_close(given.grad, plain.grad)
        torch.testing.assert_close(losses.value(2), want.detach())


def test_losses_without_a_scale():
    logits = torch.randn(4, 3, requires_grad=True)
    routing = route(logits, 1)
    losses = AuxiliaryLosses(0.1)
    with pytest.raises(RuntimeError, match="need a scale, or the loss that they belong to"):
        losses.attach(routing.weights.sum(), routing, routing.load).backward()


def test_the_bias_moves_towards_equal_loads():
    bias = torch.zeros(4)
    update_selection_bias(bias, torch.tensor([10, 0, 5, 5]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
