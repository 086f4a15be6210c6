"""DPO and GRPO losses against the sums of their papers, token by token, in fp64."""

import math

import pytest
import torch

from parallel_ops import dpo_loss, grpo_loss


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_dpo(label_smoothing):
    values = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    loss = dpo_loss(*values, beta=0.3, label_smoothing=label_smoothing)
    expected = 0.0
    for c, r, rc, rr in zip(*(v.tolist() for v in values), strict=True):
        margin = 0.3 * ((c - r) - (rc - rr))
        expected -= (1 - label_smoothing) * math.log(sigmoid(margin)) + label_smoothing * math.log(sigmoid(-margin))
    assert float(loss.detach()) == pytest.approx(expected / 5)
    loss.backward()
    assert values[0].grad.abs().sum() > 0 and values[2].grad is None and values[3].grad is None
    assert torch.autograd.gradcheck(lambda c, r: dpo_loss(c, r, *values[2:], beta=0.3), values[:2])


def grpo(log_probs, old, advantages, mask, reference, low, high, weight, mean):
    """``[s, b]`` tensors, one token after the other."""
    s, b = log_probs.shape
    totals, counts = [0.0] * b, [0] * b
    for t in range(s):
        for i in range(b):
            if mask[t, i]:
                lp, a = float(log_probs[t, i].detach()), float(advantages[i])
                ratio, further = math.exp(lp - float(old[t, i])), float(reference[t, i]) - lp
                surrogate = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
                totals[i] += -surrogate + weight * (math.exp(further) - further - 1)
                counts[i] += 1
    if mean == "token":
        return sum(totals) / max(1, sum(counts))
    return sum(total / max(1, count) for total, count in zip(totals, counts, strict=True)) / b


@pytest.mark.parametrize("mean", ["token", "sequence"])
@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_grpo(mean, weight):
    """Clipped on both sides, with sequences of several lengths and one without a token that counts."""
    torch.manual_seed(0)
    log_probs = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    old, reference = (torch.randn(7, 4, dtype=torch.float64) for _ in range(2))
    advantages, mask = (
        torch.tensor([1.0, -2.0, 0.5, 3.0]).double(),
        torch.arange(7)[:, None] < torch.tensor([7, 3, 1, 0]),
    )
    options = {"clip_low": 0.2, "clip_high": 0.3, "kl_weight": weight, "mean": mean}
    loss = grpo_loss(log_probs, old, advantages, mask=mask, reference_log_probs=reference, **options)
    expected = grpo(log_probs, old, advantages, mask, reference, 0.2, 0.3, weight, mean)
    assert float(loss.detach()) == pytest.approx(expected)
    loss.backward()
    assert (log_probs.grad[~mask] == 0).all() and log_probs.grad[mask].abs().sum() > 0
    turned = grpo_loss(
        log_probs.detach().T, old.T, advantages, mask=mask.T, reference_log_probs=reference.T, token_dim=1, **options
    )
    each = grpo_loss(
        log_probs.detach(), old, advantages.expand(7, 4), mask=mask, reference_log_probs=reference, **options
    )  # fmt: skip
    assert float(turned) == pytest.approx(expected) and float(each) == pytest.approx(expected)


def test_what_does_not_count_may_be_anything():
    log_probs, old = torch.zeros(2, 1, requires_grad=True), torch.tensor([[0.0], [-torch.inf]])
    loss = grpo_loss(log_probs, old, torch.ones(1), mask=torch.tensor([[True], [False]]))
    loss.backward()
    assert loss == -1 and log_probs.grad.flatten().tolist() == [-1.0, 0.0]
    nothing = grpo_loss(log_probs, old, torch.ones(1), mask=torch.zeros(2, 1, dtype=torch.bool))
    assert nothing == 0
    for mean in ("token", "sequence"):
        assert grpo_loss(torch.zeros(3, 0), torch.zeros(3, 0), torch.zeros(0), mean=mean) == 0


def test_bad_arguments_are_named():
    x, a = torch.zeros(3, 2), torch.zeros(2)
    for match, call in (
        ("old_log_probs must have the shape of log_probs", lambda: grpo_loss(x, x.T, a)),
        ("advantages must have the shape of log_probs", lambda: grpo_loss(x, x, torch.zeros(3))),
        ("mask must be bool", lambda: grpo_loss(x, x, a, mask=x)),
        ("mean must be 'token' or 'sequence', got 'all'", lambda: grpo_loss(x, x, a, mean="all")),
        ("clip_low must be from 0 to 1", lambda: grpo_loss(x, x, a, clip_low=1.5)),
        ("kl_weight needs reference_log_probs", lambda: grpo_loss(x, x, a, kl_weight=0.1)),
        ("log_probs must have two dimensions", lambda: grpo_loss(a, a, a)),
        ("dpo_loss: rejected must have the shape of chosen", lambda: dpo_loss(a, x, a, a)),
        ("beta must be above 0", lambda: dpo_loss(a, a, a, a, beta=0.0)),
        ("label_smoothing must be from 0 to below 0.5", lambda: dpo_loss(a, a, a, a, label_smoothing=0.5)),
    ):
        with pytest.raises(ValueError, match=match):
            call()
