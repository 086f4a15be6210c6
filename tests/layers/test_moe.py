"""``ParallelMoE``: on any mesh what one process computes, and that against a loop over the experts."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from parallel_ops.layers import ParallelMoE
from support.parallelism import expert_parallel as on_rank
from support.ranks.distributed import ranks

OPTIONS = [
    {"num_experts": 4, "top_k": 2},
    {"num_experts": 8, "top_k": 3, "shared_experts": 2, "score": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5},
    {"num_experts": 4, "top_k": 2, "capacity_factor": 4.0},
    {"num_experts": 4, "top_k": 2, "top_k_first": True, "router_bias": True, "bias": True, "swiglu_alpha": 1.702,
     "swiglu_limit": 0.9, "swiglu_up_offset": 1.0},
    {"num_experts": 8, "top_k": 2, "bias": True, "capacity_factor": 8.0},
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_selection_bias_keeps_its_bits_in_a_model_of_16_bits(dtype):
    torch.set_default_dtype(dtype)
    try:
        moe = ParallelMoE(12, 10, 4, 2, tp_mesh=None, score="sigmoid", selection_bias=True)
    finally:
        torch.set_default_dtype(torch.float32)
    bias = moe.router.selection_bias.fill_(0.5).add_(0.001).clone()
    assert bias.dtype is torch.float32
    for cast in (moe.float, lambda: moe.to(dtype), lambda: moe.to("cpu", dtype)):
        cast()
        assert torch.equal(moe.router.selection_bias, bias)
    assert moe.router.weight.dtype is moe(torch.randn(5, 3, 12, dtype=dtype)).dtype is dtype
    assert moe.double().router.selection_bias.dtype is torch.float64


def test_a_forward_on_the_meta_device_has_the_shape_alone():
    moe = ParallelMoE(12, 10, 4, 2, tp_mesh=None, shared_experts=1, device="meta")
    y = moe(torch.empty(5, 3, 12, device="meta"))
    assert (y.shape, y.device.type) == ((5, 3, 12), "meta")


@pytest.mark.parametrize("options", OPTIONS)
def test_one_process_is_a_loop_over_the_experts(options):
    torch.manual_seed(0)
    moe = ParallelMoE(12, 10, tp_mesh=None, init_method=torch.nn.init.normal_, dtype=torch.float64, **options)
    x = torch.randn(5, 3, 12, dtype=torch.float64)
    routing = moe.router(x.flatten(0, 1))
    want = torch.zeros(15, 12, dtype=torch.float64)
    for token, (experts, weights) in enumerate(zip(routing.experts.tolist(), routing.weights, strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            own = moe.experts
            biases = (None, None) if own.down_bias is None else (own.gate_up_bias[expert], own.down_bias[expert])
            gate, up = F.linear(x.flatten(0, 1)[token], own.gate_up[expert], biases[0]).chunk(2)
            if limit := options.get("swiglu_limit"):
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + options["swiglu_up_offset"]
            y = gate * torch.sigmoid(options.get("swiglu_alpha", 1.0) * gate) * up
            want[token] += weight * F.linear(y, own.down[expert], biases[1])
    if options.get("router_bias"):
        logits = F.linear(x.flatten(0, 1), moe.router.weight, moe.router.bias)
        chosen = logits.topk(options["top_k"])
        assert torch.equal(routing.experts, chosen.indices)
        torch.testing.assert_close(routing.weights, chosen.values.softmax(-1))
    if moe.shared is not None:
        want += moe.shared(x).flatten(0, 1)
    torch.testing.assert_close(moe(x), want.view(5, 3, 12))


@pytest.mark.parametrize("options", OPTIONS)
def test_experts_in_float8(options):
    """Within 3 times 2^-4, the rounding of e4m3, after three matmuls with clamps; no choice and no drop changes."""
    torch.manual_seed(0)
    given = {**options, "capacity_factor": options.get("capacity_factor") and 0.7}  # rows that no block divides
    moe = ParallelMoE(64, 32, tp_mesh=None, dtype=torch.bfloat16, **given)
    x, grad = torch.randn(2, 40, 3, 64).bfloat16()
    found = []
    for precision in ("bf16", "fp8_rowwise", "mxfp8"):
        moe.experts.precision, moe.experts.emulated = precision, True
        moe.reset_counts()
        moe.zero_grad()
        y = moe(own := x.clone().requires_grad_())
        y.backward(grad)
        found.append([y.detach(), own.grad, *(p.grad for p in moe.experts.parameters()), moe.load, moe.dropped])
    assert all((each[0] != found[0][0]).any() for each in found[1:])
    for values in zip(*found, strict=True):
        for value in values[1:]:
            if value is None or not value.is_floating_point():
                assert value is None or torch.equal(value, values[0])
            else:
                error = (value.double() - values[0].double()).norm() / values[0].double().norm()
                assert error < 3 * 2.0**-4


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("names", [("gate_up",), ("down",), ("gate_up", "down")])
def test_adapters_of_experts_are_a_part_of_their_weights(options, names):
    """``W + alpha / r B A``, by torch's autograd, which has the gradients of A and B from that of the weight."""
    torch.manual_seed(0)
    moe = ParallelMoE(12, 10, tp_mesh=None, dtype=torch.float64, init_method=torch.nn.init.normal_, **options)
    for name in names:
        moe.experts.add_lora(name, rank=3, alpha=1.5)
        torch.nn.init.normal_(moe.experts.lora[name].b)
    moe.experts.recompute = len(names) == 2
    x, grad = torch.randn(2, 5, 3, 12, dtype=torch.float64)
    y = moe(own := x.clone().requires_grad_())
    y.backward(grad)
    got = [own.grad, *(p.grad for p in moe.experts.lora.parameters())]
    whole = {f"experts.{n}": getattr(moe.experts, n) + 0.5 * (a.b @ a.a) for n, a in moe.experts.lora.items()}
    adapters, moe.experts.lora = list(moe.experts.lora.parameters()), torch.nn.ModuleDict()
    want = torch.func.functional_call(moe, whole, (x.requires_grad_(),))
    torch.testing.assert_close(y, want)
    for mine, theirs in zip(got, torch.autograd.grad(want, [x, *adapters], grad), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 4, "ep": 4}, {"tp": 4, "ep": 2}])
def test_any_mesh_is_one_process(options, sequence_parallel, sizes):
    want = on_rank.layer(0, {}, options, False, 3)
    for got in ranks(sizes["tp"]).run(on_rank.layer, sizes, options, sequence_parallel, 3):
        part = got["part"]
        close = {"rtol": 2e-5, "atol": 2e-5}
        torch.testing.assert_close(got["y"], want["y"][part], **close)
        torch.testing.assert_close(got["dx"], want["dx"][part], **close)
        for name, grad in want["grads"].items():
            torch.testing.assert_close(got["grads"][name], grad, msg=lambda m, name=name: f"{name}: {m}", **close)


def test_initialisation_does_not_depend_on_the_mesh():
    options = {"num_experts": 8, "top_k": 2}
    want = on_rank.layer(0, {}, options, False, 5)
    # The same weights give the same loads and the same gradients of weights.
    got = ranks(4).run(on_rank.layer, {"tp": 4, "ep": 4}, options, True, 5)
    torch.testing.assert_close(sum(part["load"] for part in got), want["load"])


def test_capacity_drops_the_last_tokens_and_counts_them():
    torch.manual_seed(0)
    moe = ParallelMoE(12, 10, 4, 2, tp_mesh=None, capacity_factor=0.5, init_method=torch.nn.init.normal_)
    x = torch.randn(16, 1, 12, requires_grad=True)
    moe(x).sum().backward()
    load = moe.load
    assert int(moe.dropped) == int((load - 4).clamp(min=0).sum()) > 0
    # Not in an evaluation, where a token is independent of the others.
    torch.testing.assert_close(moe.eval()(x)[-4:], moe(x[-4:]))
    none = ParallelMoE(12, 10, 4, 2, tp_mesh=None, capacity_factor=0.0)
    y = none(x)
    y.sum().backward()
    assert not y.any() and none.experts.down.grad is not None and not none.experts.down.grad.any()
    biased = ParallelMoE(12, 10, 4, 2, tp_mesh=None, capacity_factor=0.5, bias=True)
    biased(x).sum().backward()  # every row that was not dropped has a weight, padding has none
    kept, taken, routing = torch.zeros(4), [0] * 4, biased.router(x.flatten(0, 1))
    for experts, weights in zip(routing.experts.tolist(), routing.weights.tolist(), strict=True):
        for expert, weight in zip(experts, weights, strict=True):
            taken[expert] += 1
            kept[expert] += weight * (taken[expert] <= 4)
    torch.testing.assert_close(biased.experts.down_bias.grad, kept[:, None].expand(4, 12))


def test_what_it_refuses():
    with pytest.raises(ValueError, match="x must be"):
        ParallelMoE(12, 10, 4, 2, tp_mesh=None)(torch.randn(3, 11))
    for outcome in ranks(4).outcomes(on_rank.layer, {"tp": 4, "ep": 4}, {"num_experts": 6, "top_k": 2}, True, 0):
        assert "num_experts must be a multiple of the size of the mesh, got 6 for 4 ranks" in outcome.message


def test_the_shared_expert_is_computed_while_rows_travel():
    """Rows and weights leave, the shared MLP is computed, both arrive; in the backward their gradients do so too."""
    for events in ranks(2).run(on_rank.order_of_events):
        split = events.index("backward")
        assert events[:split] == ["send", "send", "shared", "wait", "wait", "compute", "send", "wait"]
        # The results' gradients go first, and are waited for at once: the experts need them.
        assert events[split + 1 : split + 3] == ["send", "wait"]
        assert events[split + 3 :] == ["send", "send", "shared backward", "wait", "wait"]


def test_chunks_of_experts_are_computed_while_others_travel():
    for events in ranks(2).run(on_rank.order_of_events, 2):
        split = events.index("backward")
        there, chunk = ["send"] * 4, ["wait", "wait", "compute", "send"]  # rows and weights of both chunks
        assert events[:split] == [*there, "shared", *chunk, *chunk, "wait", "wait"]
        # The gradients of what came back last go first.
        back = ["send", "send", "wait", "send", "send", "wait", "send", "send", "shared backward", *["wait"] * 4]
        assert events[split + 1 :] == back


def test_any_number_of_chunks_gives_the_same_result():
    options = {"num_experts": 12, "top_k": 3}
    for more in ({}, {"capacity_factor": 0.8, "bias": True}):
        want = ranks(2).run(on_rank.layer, {"tp": 2, "ep": 2}, {**options, **more}, True, 3)
        for chunks in (2, 5, 6):  # of five the next smaller that divides is three
            got = ranks(2).run(on_rank.layer, {"tp": 2, "ep": 2}, {**options, **more, "overlap": chunks}, True, 3)
            for a, b in zip(got, want, strict=True):
                # The bits of a small matmul depend on where a CPU's memory has its factors.
                close = {"rtol": 1e-6, "atol": 5e-6}
                for name in ("y", "dx"):
                    torch.testing.assert_close(a[name], b[name], **close)
                for name, grad in b["grads"].items():
                    torch.testing.assert_close(a["grads"][name], grad, **close)


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_shard": 4, "ep": 2},
        {"dp_shard": 2, "tp": 2, "ep": 4},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("explicit", [True, False], ids=["shard_experts", "fully_shard alone"])
def test_experts_in_a_loop_of_ones_own(sizes, explicit):
    want = on_rank.own_loop(0, {})
    for got in ranks(4).run(on_rank.own_loop, sizes, explicit):
        assert got.keys() == want.keys()
        for name, grad in want.items():
            torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "recomputed by reentrance"])
def test_compiles_to_one_graph_that_counts_its_forwards(reentrant):
    torch.manual_seed(0)
    moe, x, found = ParallelMoE(12, 10, 4, 2, tp_mesh=None, capacity_factor=0.5), torch.randn(5, 3, 12), []
    for run in (moe, torch.compile(moe, fullgraph=True, backend="aot_eager")):
        moe.reset_counts()
        for _ in range(2):
            own = x.clone().requires_grad_()
            y = run(own) if reentrant is None else checkpoint(run, own, use_reentrant=reentrant)
            y.square().sum().backward()
        found.append((y.detach(), own.grad, moe.load, moe.dropped))
    assert found[0][2].sum() == 2 * 5 * 3 * 2 and found[0][3] > 0
    torch.testing.assert_close(found[1], found[0])
