"""The calls of docs/migration.md, "Losses", against what the other library computes, in plain PyTorch."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallel_ops import (
    cross_entropy,
    dpo_loss,
    grpo_loss,
    linear_cross_entropy,
    linear_kl_divergence,
    linear_log_probs,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_log_probs,
)
from support.ranks.distributed import ranks

S, B, H, V = 5, 2, 6, 12


def logits_and_target():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(S, B, V, generator=generator), torch.randint(V, (S, B), generator=generator)


def megatron(logits, target, smoothing):
    """A loss per token; the share of smoothing goes to the other V - 1 classes."""
    log_p = logits.log_softmax(-1)
    at_target = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    others = (log_p.sum(-1) - at_target) / (V - 1)
    return -(1 - smoothing) * at_target - smoothing * others


def of_megatron(rank):
    logits, target = logits_and_target()
    shard = logits.chunk(2, dim=-1)[rank] * 1
    padded = target.clone()
    padded[0, 0] = -1
    options = {"group": dist.group.WORLD, "reduction": "none", "ignore_out_of_range": True, "inplace_backward": True}
    return [vocab_parallel_cross_entropy(shard, padded, label_smoothing=e * V / (V - 1), **options) for e in (0.0, 0.1)]


def test_megatrons_loss_per_token():
    logits, target = logits_and_target()
    for losses in ranks(2).run(of_megatron):
        for loss, smoothing in zip(losses, (0.0, 0.1), strict=True):
            expected = megatron(logits, target, smoothing)
            expected[0, 0] = 0.0
            torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ligers_cross_entropy(reduction):
    """input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap."""
    logits, target = (t.flatten(0, 1) for t in logits_and_target())
    weight = torch.rand(V)
    target[3] = -1
    z = 5.0 * torch.tanh(logits / 5.0)
    kept = (target != -1).float()
    options = {"ignore_index": -1, "label_smoothing": 0.1, "reduction": reduction}
    expected = F.cross_entropy(z, target, weight, **options)
    got = cross_entropy(logits, target, class_weight=weight, softcap=5.0, **options)
    torch.testing.assert_close(got, expected)
    squares = kept * z.logsumexp(-1).square()
    more = {"mean": squares.sum() / kept.sum(), "sum": squares.sum(), "none": squares}[reduction]
    got = cross_entropy(logits, target, z_loss=1e-2, softcap=5.0, **options)
    torch.testing.assert_close(got, F.cross_entropy(z, target, **options) + 1e-2 * more)
    if reduction == "mean":  # of both by the sum of weights, unlike Liger's
        more = squares.sum() / weight[target[target != -1]].sum()
    got = cross_entropy(logits, target, class_weight=weight, z_loss=1e-2, softcap=5.0, **options)
    torch.testing.assert_close(got, expected + 1e-2 * more)


def test_ligers_linear_cross_entropy():
    """input, weight, target, bias."""
    _, target = logits_and_target()
    hidden, weight, bias = torch.randn(S, B, H), torch.randn(V, H), torch.randn(V)
    got = linear_cross_entropy(hidden, weight, target, bias=bias)
    torch.testing.assert_close(got, F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, 1), target.flatten()))


@pytest.mark.parametrize("reduce_loss", [False, True])
def test_transformer_engines_cross_entropy(reduce_loss):
    """inp [b, s, V], target [b, s], label_smoothing, reduce_loss, dist_process_group, ignore_idx."""
    logits, target = (t.transpose(0, 1) for t in logits_and_target())
    got = vocab_parallel_cross_entropy(
        logits, target, label_smoothing=0.1, reduction="mean" if reduce_loss else "none", group=None, ignore_index=-100
    )
    reduction = "mean" if reduce_loss else "none"
    expected = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), label_smoothing=0.1, reduction=reduction
    )  # fmt: skip
    torch.testing.assert_close(got, expected.view(got.shape))


def of_verl(rank, hidden, weight, tokens):
    shard = weight.chunk(2)[rank]
    return list(vocab_parallel_linear_log_probs(hidden, shard, tokens, temperature=0.7, group=dist.group.WORLD))


def test_log_probs_and_entropy_from_hidden_states():
    _, tokens = logits_and_target()
    hidden, weight = torch.randn(S, B, H), torch.randn(V, H)
    distribution = torch.distributions.Categorical(logits=hidden @ weight.T / 0.7)
    results = [list(linear_log_probs(hidden, weight, tokens, temperature=0.7))]
    for log_probs, entropy in results + ranks(2).run(of_verl, hidden, weight, tokens):
        torch.testing.assert_close(log_probs, distribution.log_prob(tokens), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-4, atol=1e-5)


def test_ligers_distillation_and_preferences():
    """Of hidden states ``[b, s, H]`` and labels that are shifted already, -100 where they do not count."""
    labels = logits_and_target()[1].transpose(0, 1).clone()
    labels[0, 3:] = -100
    kept = labels != -100
    weight, teacher_weight = torch.randn(V, H), torch.randn(V, 4)
    hidden, teacher = torch.randn(B, S, H), torch.randn(B, S, 4)
    student, of_teacher = (F.log_softmax(x @ w.T / 2.0, -1) for x, w in ((hidden, weight), (teacher, teacher_weight)))
    kl = (of_teacher.exp() * (of_teacher - student)).sum(-1)[kept].sum() / kept.sum()
    got = linear_kl_divergence(hidden, weight, teacher, teacher_weight=teacher_weight, temperature=2.0)
    torch.testing.assert_close(got[kept].mean(), kl)

    policy, reference = (torch.randn(2 * B, S, H) for _ in range(2))  # the chosen answers, then the rejected ones
    labels, kept = labels.repeat(2, 1), kept.repeat(2, 1)
    found, expected = [], []
    for x in (policy, reference):
        log_p = (x @ weight.T).log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        expected.append((log_p * kept).sum(-1).chunk(2))
        found.append(linear_log_probs(x, weight, labels, entropy=False).log_probs.sum(-1).chunk(2))
    (chosen, rejected), (of_chosen, of_rejected) = expected
    loss = -F.logsigmoid(0.2 * ((chosen - of_chosen) - (rejected - of_rejected))).sum() / B
    torch.testing.assert_close(dpo_loss(*found[0], *found[1], beta=0.2), loss)


@pytest.mark.parametrize("loss_type", ["bnpo", "grpo"])
def test_ligers_grpo(loss_type):
    log_probs, old, reference = (-torch.rand(B, S) for _ in range(3))
    advantages, mask = torch.tensor([1.0, -2.0]), torch.arange(S) < torch.tensor([[S], [3]])
    ratio = (log_probs - old).exp()
    loss = -torch.min(ratio * advantages[:, None], ratio.clamp(0.9, 1.3) * advantages[:, None])
    loss = loss + 0.04 * ((reference - log_probs).exp() - (reference - log_probs) - 1.0)
    sums, counts = (loss * mask).sum(-1), mask.sum(-1)
    expected = sums.sum() / counts.sum() if loss_type == "bnpo" else (sums / counts).sum() / B
    got = grpo_loss(
        log_probs, old, advantages, mask=mask, reference_log_probs=reference, clip_low=0.1, clip_high=0.3,
        kl_weight=0.04, token_dim=1, mean="token" if loss_type == "bnpo" else "sequence",
    )  # fmt: skip
    torch.testing.assert_close(got, expected)
