import functools
import importlib
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import load_balancing_loss, route
from parallel_ops.ops import route_reference
from support.numerics import suite
from support.numerics.experts import spread_logits
from support.numerics.suite import DEVICES, DTYPES, randn, refused, refuses

pytestmark = pytest.mark.parametrize("device", DEVICES)
ops = torch.ops.parallel_ops
DEEPSEEK = {"score": "sigmoid", "groups": 8, "top_groups": 4, "scale": 2.5}
KINDS = {
    "mixtral": {},
    "olmoe": {"normalize": False},
    "gpt-oss": {"top_k_first": True},
    "deepseek-v3": DEEPSEEK,
    "sigmoid of the chosen": {"score": "sigmoid", "top_k_first": True, "normalize": False},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def differentiable(f, top_k, **options):
    """``f`` as a function of the logits alone, with the outputs that have gradients."""

    def run(logits):
        r = f(logits, top_k, **options)
        return r.weights, r.score_sums, r.z_sum

    return run


def grads_of(t, k, n, dtype, device="cpu"):
    flat = randn(t * k + n + 1, dtype=dtype, device=device).detach()
    return [flat[: t * k].view(t, k), flat[t * k : -1], flat[-1]]


@given(
    t=st.integers(0, 70),
    groups=st.sampled_from([(1, 1), (4, 1), (4, 3), (8, 4)]),
    size=st.integers(1, 20),
    k=st.integers(1, 12),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    score=st.sampled_from(["softmax", "sigmoid"]),
    top_k_first=st.booleans(),
    normalize=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_numerics_of_any_options(device, t, groups, size, k, dtype, score, top_k_first, normalize, biased, seed):
    groups, top_groups = groups
    n = groups * size
    k = min(k, top_groups * size)
    logits = spread_logits(t, n, dtype=dtype, seed=seed, device=device)
    # Whole steps: sums with them are as far apart in fp32 as in fp64.
    bias = 8.0 * torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(device) if biased else None
    options = {
        "score": score, "top_k_first": top_k_first, "normalize": normalize, "scale": 2.5, "bias": bias,
        "groups": groups, "top_groups": top_groups,
    }  # fmt: skip
    acc = torch.float64 if dtype is torch.float64 else torch.float32
    ours, theirs = (differentiable(f, k, **options) for f in (route, route_reference))
    # Both normalise in fp32, by an order of sums of their own; the fp64 oracle is the reference itself.
    slack = 64 if dtype is torch.float64 else 4
    suite.check_numerics(ours, theirs, [logits], grads_of(t, k, n, acc, device), slack_ulps=slack)
    a, b = route(logits, k, **options), route_reference(logits.double(), k, **options)
    assert torch.equal(a.experts, b.experts) and torch.equal(a.load, b.load)
    assert (a.experts.dtype, a.load.dtype, a.weights.dtype) == (torch.int64, torch.int32, acc)


@given(
    t=st.integers(1, 40),
    n=st.sampled_from([2, 8, 60, 64, 100, 257, 1024]),
    k=st.integers(1, 10),
    kind=st.sampled_from(sorted(KINDS)),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_the_largest_are_chosen_from_any_logits(device, t, n, k, kind, scale, dtype, seed):
    """With ties and saturated scores: none left out is larger than one chosen, and equal ones go by index."""
    k = min(k, n)
    logits = randn(t, n, dtype=dtype, device=device, seed=seed, scale=scale).detach()
    options = {key: value for key, value in KINDS[kind].items() if "groups" not in key}
    r = route(logits, k, **options)
    score = logits.float() if options.get("top_k_first") else route_scores(logits.double(), options)
    chosen = score.gather(1, r.experts)
    rest = score.scatter(1, r.experts, -torch.inf)
    tolerance = 1e-6 * chosen.abs() + 1e-37  # scores of fp32
    assert (chosen[:, 1:] <= chosen[:, :-1] + tolerance[:, :-1]).all()
    assert (rest.amax(1) <= chosen[:, -1] + tolerance[:, -1]).all()
    assert all(len(set(row)) == k for row in r.experts.tolist())
    assert r.load.sum() == t * k
    assert torch.equal(r.load, torch.bincount(r.experts.flatten(), minlength=n).int())
    expected = route_weights(logits.double(), r.experts, options)
    torch.testing.assert_close(r.weights.double(), expected, rtol=2e-6, atol=1e-12)
    equal = logits.gather(1, r.experts)
    tied = equal[:, 1:] == equal[:, :-1]
    assert (r.experts[:, 1:] > r.experts[:, :-1])[tied].all()


def route_scores(x, options):
    return x.sigmoid() if options.get("score") == "sigmoid" else x.softmax(-1)


def route_weights(x, experts, options):
    if options.get("top_k_first") and options.get("score") != "sigmoid":
        return x.gather(1, experts).softmax(-1)
    weights = route_scores(x, options).gather(1, experts)
    if options.get("normalize", True):
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * options.get("scale", 1.0)


ROUTERS = {
    "mixtral": ("MixtralTopKRouter", {}),
    "qwen3_moe": ("Qwen3MoeTopKRouter", {}),
    "olmoe": ("OlmoeTopKRouter", {"normalize": False}),
    "gpt_oss": ("GptOssTopKRouter", {"top_k_first": True}),
    "deepseek_v3": ("DeepseekV3TopkRouter", DEEPSEEK),
}


@pytest.mark.parametrize("model", ROUTERS)
def test_as_the_models_of_transformers(device, model):
    pytest.importorskip("transformers")
    name, options = ROUTERS[model]
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    if not hasattr(module, name):
        pytest.skip(f"this version of Transformers has no {name}")
    config = SimpleNamespace(
        num_experts_per_tok=6, num_local_experts=64, num_experts=64, n_routed_experts=64, hidden_size=64, n_group=8,
        topk_group=4, norm_topk_prob=model != "olmoe", routed_scaling_factor=2.5,
    )  # fmt: skip
    router = getattr(module, name)(config).to(device)
    with torch.no_grad():
        router.weight.copy_(torch.eye(64))
    if model == "deepseek_v3":
        bias = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(device)
        router.e_score_correction_bias.copy_(bias)
        options = {**options, "bias": bias}
    x = spread_logits(50, 64, dtype=torch.float32, device=device)
    grad = randn(50, 6, dtype=torch.float32, device=device).detach()
    logits, weights, experts = router(x)
    (theirs,) = torch.autograd.grad(weights, x, grad)
    by_expert = experts.sort(dim=1)  # DeepSeek's are in no order
    ours = route(logits.detach().requires_grad_(), 6, **options)
    mine = ours.experts.sort(dim=1)
    assert torch.equal(mine.values, by_expert.values)
    torch.testing.assert_close(ours.weights.gather(1, mine.indices), weights.gather(1, by_expert.indices))
    y = x.detach().requires_grad_()
    grad = grad.gather(1, by_expert.indices).scatter(1, mine.indices, grad.gather(1, by_expert.indices))
    (dx,) = torch.autograd.grad(route(y, 6, **options).weights, y, grad)
    torch.testing.assert_close(dx, theirs, rtol=1e-4, atol=1e-7)


def test_load_balancing_loss_is_that_of_mixtral(device):
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    x = randn(40, 16, dtype=torch.float32, device=device)
    r = route(x, 3)
    ours, theirs = load_balancing_loss(r.load, r.score_sums, 40, 3), load_balancing_loss_func((x,), 16, 3)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(torch.autograd.grad(ours, x), torch.autograd.grad(theirs, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-8)
    balanced = load_balancing_loss(torch.full((8,), 15), torch.full((8,), 5.0), 40, 3)
    assert balanced.item() == pytest.approx(3.0)  # top_k, at perfect balance
    with pytest.raises(ValueError, match=r"load_balancing_loss: load and score_sums must have one shape \[n\]"):
        load_balancing_loss(r.load[1:], r.score_sums, 40, 3)
    with pytest.raises(ValueError, match=r"load_balancing_loss: tokens and top_k must be at least 1, got 0 and 3"):
        load_balancing_loss(r.load, r.score_sums, 0, 3)


def test_ties_go_to_the_lower_index(device):
    for options in KINDS.values():
        r = route(torch.zeros(3, 16, device=device), 4, **options)
        assert r.experts.tolist() == [[0, 1, 2, 3]] * 3
    x = torch.tensor([[0.0, -0.0, 1.0, 1.0, -0.0, 0.0]], device=device)
    assert route(x, 5, top_k_first=True).experts.tolist() == [[2, 3, 0, 1, 4]]


def test_nan_and_infinity(device):
    x = torch.arange(16.0, device=device).repeat(5, 1)
    x[1, 3] = torch.nan
    x[2, 4:] = -torch.inf
    x[3] = -torch.inf
    x[4, 5] = torch.inf
    for options in KINDS.values():
        ours, theirs = (f(x.clone(), 6, **options) for f in (route, route_reference))
        torch.testing.assert_close(tuple(ours), tuple(theirs), equal_nan=True, rtol=1e-5, atol=0)
        assert ours.weights[0].isfinite().all() and ours.weights[1].isnan().any()
        assert all(len(set(row)) == 6 and min(row) >= 0 and max(row) < 16 for row in ours.experts.tolist())
    assert route(x, 6, score="sigmoid").experts[1, 0] == 3  # a NaN counts as the largest


def test_scores_that_are_all_zero_are_defined(device):
    x = torch.full((2, 8), -200.0, device=device).requires_grad_()
    r = route(x, 3, score="sigmoid")
    assert r.weights.tolist() == [[0.0] * 3] * 2
    assert r.score_sums.tolist() == [0.0] * 8
    (dx,) = torch.autograd.grad(r.weights.sum() + r.score_sums.sum(), x)
    assert dx.tolist() == [[0.0] * 8] * 2


@kinds
def test_gradient_matches_finite_differences(device, kind):
    x = spread_logits(3, 16, dtype=torch.float64, device=device)
    suite.check_gradient(differentiable(route, 4, **KINDS[kind]), [x])


def test_custom_op_contract(device):
    x, bias = spread_logits(6, 8, dtype=torch.float32, device=device), torch.randn(8, device=device)
    suite.check_op(ops.route.default, [x, bias, 3, True, 4, 2, False, True, 2.5])
    suite.check_op(ops.route.default, [x.detach().t(), None, 2, False, 1, 1, True, True, 1.0])
    suite.check_second_derivative_raises(differentiable(route, 3), [x])


@kinds
def test_same_bits_on_every_run_and_thread_count(device, kind):
    x = spread_logits(3000, 64, dtype=torch.bfloat16, device=device)
    grad = grads_of(3000, 6, 64, torch.float32, device)
    suite.check_deterministic(differentiable(route, 6, **KINDS[kind]), [x], grad)


def test_any_strides_give_the_same_bits(device):
    x = spread_logits(30, 40, dtype=torch.float32, device=device)
    grad = grads_of(30, 5, 40, torch.float32, device)
    expected = suite.forward_backward(differentiable(route, 5), [x], grad)
    for name, layout in suite.layouts(x).items():
        for g in suite.layouts(grad[0]).values():
            got = suite.forward_backward(differentiable(route, 5), [layout], [g, *grad[1:]])
            if device == "cuda" and name == "offset":  # threads hold other columns where nothing is aligned
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
            else:
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), name


def test_gradients_of_some_outputs_alone(device):
    """Together they are the gradient of all."""
    x = spread_logits(20, 16, dtype=torch.float64, device=device)
    grads = grads_of(20, 4, 16, torch.float64, device)
    for options in KINDS.values():
        outputs = differentiable(route, 4, **options)(x)
        parts = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for y, g in zip(outputs, grads, strict=True)]
        torch.testing.assert_close(sum(parts), torch.autograd.grad(outputs, x, grads)[0])


def test_compiles_to_one_graph_for_all_sizes(device):
    cases = [[spread_logits(t, 16, dtype=torch.float32, device=device)] for t in (4, 6)]
    suite.check_compiles(differentiable(route, 3, **DEEPSEEK), cases)


def test_fp32_under_autocast(device):
    x = spread_logits(6, 8, dtype=torch.bfloat16, device=device)
    expected = route(x, 3)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = route(x, 3)
    assert got.weights.dtype is torch.float32
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(("t", "n", "k"), [(0, 4, 2), (1, 1, 1), (1, 4096, 16), (70000, 2, 2), (5, 300, 300)])
def test_extreme_shapes(device, t, n, k):
    x = spread_logits(t, n, dtype=torch.float32, device=device)
    # Sums of 70,000 probabilities: the order of summation shows.
    suite.check_numerics(
        differentiable(route, k), differentiable(route_reference, k), [x], grads_of(t, k, n, torch.float32, device),
        slack_ulps=16,
    )  # fmt: skip


def test_bad_arguments_are_named(device):
    x = torch.randn(4, 8, device=device)
    wrong = functools.partial(refuses, route)
    wrong(TypeError, "logits must be a tensor, got list", [1.0], 1)
    wrong(TypeError, "top_k must be an int, got float", x, 2.0)
    wrong(ValueError, r"logits must be \[t, n\] with at least one expert, got \[4, 2, 4\]", x.view(4, 2, 4), 2)
    wrong(ValueError, "top_k must be from 1 to 8, the 8 experts, got 9", x, 9)
    wrong(ValueError, "top_k must be from 1 to 8, the 8 experts, got 0", x, 0)
    few = "top_k must be from 1 to 4, the 4 experts of the best 2 groups, got 5"
    wrong(ValueError, few, x, 5, groups=4, top_groups=2)
    wrong(ValueError, "groups must divide the 8 experts, got 3", x, 2, groups=3)
    wrong(ValueError, "top_groups must be from 1 to groups, 4, got 5", x, 2, groups=4, top_groups=5)
    wrong(ValueError, r"bias must be \[8\], one for each expert, got \[7\]", x, 2, bias=x[0, :7])
    wrong(ValueError, "score must be 'softmax' or 'sigmoid', got 'relu'", x, 2, score="relu")


def test_direct_calls_of_the_op_cannot_read_out_of_bounds(device):
    x = torch.randn(4, 8)
    refuses(ops.route, RuntimeError, "top_k must be at least 1", x, None, 9, False, 1, 1, False, True, 1.0)
    rest, experts, backward = (None, None, False, False, True, 1.0), torch.full((4, 1), 8), ops.route_backward
    refused(RuntimeError, "route_backward: experts holds 8 of 8", backward, x, experts, None, *rest)
    refused(RuntimeError, "route_backward: grad_weights must have the shape", backward, x, 0 * experts, x, *rest)
