"""The ops of experts on a GPU where their kernels are not enabled: PyTorch's ops, with the same results."""

import importlib
import itertools

import pytest
import torch

import parallel_ops
from support.numerics.experts import random_experts, spread_logits
from support.numerics.suite import randn

# Each op and its file share a name.
order, permutation, routing = (
    importlib.import_module(f"parallel_ops.ops.experts.{n}") for n in ("order", "permute", "route")
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_route(dtype, score):
    generator = torch.Generator().manual_seed(0)
    for first, normalize, (groups, kept) in itertools.product((False, True), (False, True), ((1, 1), (4, 2))):
        logits = spread_logits(40, 16, dtype=dtype, device="cpu").detach()
        options = {"groups": groups, "top_groups": kept, "top_k_first": first, "normalize": normalize, "scale": 1.7}
        arguments = (score == "sigmoid", groups, kept, first, normalize, 1.7)
        true = parallel_ops.route(logits, 3, score=score, **options)
        found = routing.forward(logits, None, 3, *arguments)
        for a, b in zip(found, (true.weights, true.score_sums, true.z_sum, true.experts, true.load), strict=True):
            assert a.is_contiguous()
            torch.testing.assert_close(a, b)
        grads = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in found[:3]]
        for given in itertools.product((True, False), repeat=3):
            some = [g if keep else None for g, keep in zip(grads, given, strict=True)]
            rest = (score == "sigmoid", first, normalize, 1.7)
            torch.testing.assert_close(
                routing.gradients(logits, true.experts, *some, *rest),
                routing._backward(logits, true.experts, *some, *rest),
            )


@pytest.mark.parametrize(("capacity", "multiple"), [(None, 1), (None, 4), (8, 4), (6, 1), (0, 1)])
def test_order_permute_and_unpermute(capacity, multiple):
    for tokens in (0, 1, 30):
        experts = random_experts(tokens, 3, 6, device="cpu") if tokens else torch.empty(0, 3, dtype=torch.int64)
        if tokens > 1:
            experts[0, 1] = -1  # a slot without an expert
        true = parallel_ops.sort_by_expert(experts, 6, capacity=capacity, multiple=multiple)
        for a, b in zip(order.forward(experts, 6, capacity, multiple), true, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
        rows, places = true.rows, true.places
        for dtype in (torch.float32, torch.bfloat16):
            x = randn(tokens, 8, dtype=dtype, device="cpu").detach()
            y = randn(len(rows), 8, dtype=dtype, device="cpu", seed=1).detach()
            torch.testing.assert_close(permutation.permute_forward(x, rows, places), parallel_ops.permute(x, true))
            for weights in (None, torch.rand(tokens, 3).to(dtype), torch.rand(tokens, 3)):
                torch.testing.assert_close(
                    permutation.unpermute_forward(y, rows, places, weights), parallel_ops.unpermute(y, true, weights)
                )
                for saved, needs_y in itertools.product((None, y), (True, False)):
                    call = (x, saved, rows, places, weights, needs_y)
                    torch.testing.assert_close(
                        permutation.unpermute_gradients(*call), permutation._unpermute_backward(*call)
                    )


def test_features_are_off_until_they_are_enabled():
    from parallel_ops.triton_kernels import experimental

    before = [name for name in experimental.FEATURES if experimental.is_enabled(name)]
    assert before == []
    try:
        parallel_ops.enable_experimental("expert_kernels")
        assert experimental.is_enabled("expert_kernels") and not experimental.is_enabled("sum_partials")
        with pytest.raises(
            ValueError, match="enable_experimental: unknown feature 'kernels'; there are expert_kernels"
        ):
            parallel_ops.enable_experimental("kernels")
        assert experimental.is_enabled("expert_kernels")
    finally:
        parallel_ops.enable_experimental()
    assert not experimental.is_enabled("expert_kernels")
