"""The calls of docs/migration.md, "Experts", against what Megatron-core and Transformer Engine compute."""

import pytest
import torch
import torch.nn.functional as F

from parallel_ops import grouped_linear, load_balancing_loss, permute, route, sort_by_expert, unpermute

T, N, K, H = 10, 6, 2, 4


def logits():
    return torch.randn(T, N, generator=torch.Generator().manual_seed(0))


def dense(routing):
    """Megatron's ``probs`` and ``routing_map``."""
    chosen = torch.zeros(T, N, dtype=torch.bool).scatter(1, routing.experts.long(), True)
    return torch.zeros(T, N).scatter(1, routing.experts.long(), routing.weights), chosen


def of_megatron(scores, choice=None, *, of_chosen=None, scale=1.0, topk=K):
    top = (scores if choice is None else choice).topk(topk, dim=1).indices
    weights = scores.gather(1, top)
    weights = weights if of_chosen is None else of_chosen(weights)
    return torch.zeros(T, N).scatter(1, top, weights * scale), torch.zeros(T, N, dtype=torch.bool).scatter(1, top, True)


BIAS = torch.linspace(-0.5, 0.5, N)
ROUTERS = {
    "softmax of the chosen": ({"top_k_first": True}, lambda x: of_megatron(x, of_chosen=lambda w: w.softmax(-1))),
    "use_pre_softmax": ({"normalize": False, "scale": 2.5}, lambda x: of_megatron(x.softmax(-1), scale=2.5)),
    "sigmoid": (
        {"score": "sigmoid", "bias": BIAS},
        lambda x: of_megatron(x.sigmoid(), x.sigmoid() + BIAS, of_chosen=lambda w: w / w.sum(-1, keepdim=True)),
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name):
    options, expected = ROUTERS[name]
    for got, want in zip(dense(route(logits(), K, **options)), expected(logits()), strict=True):
        torch.testing.assert_close(got, want)
    if name == "sigmoid":
        options = {**options, "normalize": False}
        got, want = (
            dense(route(logits(), 1, **options)),
            of_megatron(logits().sigmoid(), logits().sigmoid() + BIAS, topk=1),
        )
        torch.testing.assert_close(got[0], want[0])


def test_auxiliary_losses():
    x = logits()
    routing, probs = route(x, K, top_k_first=True), x.softmax(-1)
    switch = (probs.sum(0) * dense(routing)[1].sum(0)).sum() * (N * 0.1 / (T * T * K))
    torch.testing.assert_close(load_balancing_loss(routing.load, routing.score_sums, T, K) * 0.1 / K, switch)
    torch.testing.assert_close(routing.z_sum / T * 0.1, x.logsumexp(-1).square().mean() * 0.1)


def test_tokens_by_expert_and_back():
    x, routing = torch.randn(T, H), route(logits(), K, top_k_first=True)
    probs, chosen = dense(routing)
    experts, tokens = chosen.T.nonzero(as_tuple=True)  # by expert, then by token
    order = sort_by_expert(routing.experts, N)
    rows = permute(x, order)
    torch.testing.assert_close(rows, x[tokens])
    weight, m_splits = torch.randn(N, 3, H), chosen.sum(0).tolist()
    y = grouped_linear(rows, weight, torch.tensor(m_splits).cumsum(0))
    torch.testing.assert_close(
        y, torch.cat([F.linear(r, w) for r, w in zip(rows.split(m_splits), weight, strict=True)])
    )
    back = torch.zeros(T, 3).index_add(0, tokens, y * probs[tokens, experts].unsqueeze(-1))
    torch.testing.assert_close(unpermute(y, order, routing.weights), back)
    padded = sort_by_expert(routing.experts, N, multiple=4).offs
    assert padded.tolist() == [*torch.tensor([-(-n // 4) * 4 for n in m_splits]).cumsum(0)]
