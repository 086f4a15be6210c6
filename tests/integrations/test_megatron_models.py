"""Losses and gradient norms of Megatron's GPT and hybrid models on two ranks, with and without the drop-in."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from support.ranks.distributed import ranks

pytest.importorskip("megatron", reason="megatron-core is not installed")

from support.integrations import megatron as trained
from support.integrations import megatron_functions
from support.integrations.megatron import GATED, Case

SEQUENCE = {"sequence_parallel": True}
FUSED = {"gradient_accumulation_fusion": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LLAMA = GATED | {"normalization": "RMSNorm", "num_query_groups": 2, "qk_layernorm": True}
LATENT = GATED | {
    "multi_latent_attention": True, "normalization": "RMSNorm", "qk_layernorm": True, "rope_type": "rope",
    "q_lora_rank": 16, "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
BFLOAT16 = {"dtype": torch.bfloat16, "ddp": {"grad_reduce_in_fp32": False}}
EXPERTS = GATED | {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01
}  # fmt: skip
ALL_TO_ALL = {**EXPERTS, "moe_token_dispatcher_type": "alltoall"}
CASES = {
    "tensor parallel": {"tp": 2},
    "sequence parallel": {"tp": 2, "config": SEQUENCE},
    "fused gradients, overlapped reduction": {
        "tp": 2, "config": {**SEQUENCE, **FUSED}, "ddp": {"overlap_grad_reduce": True},
    },
    "gradients in bfloat16": {"tp": 2, "config": {**SEQUENCE, **FUSED}, **BFLOAT16},
    "residual in float32": {
        "tp": 2, "config": {**LLAMA, **SEQUENCE, "fp32_residual_connection": True}, **BFLOAT16,
    },
    "recomputed": {"tp": 2, "config": SEQUENCE | RECOMPUTED},
    "pipeline": {"pp": 2},
    "llama": {"tp": 2, "config": {**LLAMA, **SEQUENCE}, "model": {"position_embedding_type": "rope"}},
    "latent attention": {"tp": 2, "config": LATENT | SEQUENCE, "model": {"position_embedding_type": "rope"}},
    "window": {"tp": 2, "config": {"window_size": (3, 0)}},
    "more tokens predicted": {"tp": 2, "config": {**LLAMA, **SEQUENCE, "mtp_num_layers": 1}},
    "more tokens predicted, on the second stage": {"pp": 2, "config": {**ALL_TO_ALL, "mtp_num_layers": 1}},
    "experts by all-gather": {"ep": 2, "config": EXPERTS},
    "experts by all-to-all": {"ep": 2, "config": ALL_TO_ALL},
    "every rank has all experts": {"config": {**ALL_TO_ALL, "moe_router_pre_softmax": True}},
    "experts, sequence parallel": {"tp": 2, "ep": 2, "etp": 1, "config": ALL_TO_ALL | SEQUENCE},
    "experts that drop tokens": {"ep": 2, "config": {**ALL_TO_ALL, "moe_expert_capacity_factor": 0.6}},
    "experts by sigmoid with a bias": {
        "ep": 2, "config": {
            **ALL_TO_ALL, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none",
        },
    },
    "experts in the second layer, on the second stage": {
        "pp": 2, "config": {**ALL_TO_ALL, "moe_layer_freq": [0, 1], "qk_l2_norm": True},
    },
    "recomputed experts": {"ep": 2, "config": ALL_TO_ALL | RECOMPUTED},
}  # fmt: skip


# Each is near a case that stays.
LONG = {
    "recomputed experts", "experts that drop tokens", "every rank has all experts", "gradients in bfloat16", "window",
    "experts by all-gather", "recomputed", "fused gradients, overlapped reduction",
    "more tokens predicted, on the second stage",
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.runs] * (name in LONG)) for name in CASES])
def test_training_is_megatrons(name):
    cases = [Case(drop_in, **CASES[name]) for drop_in in ("stock", "apply", "spec")]
    close = 5e-3 if CASES[name].get("dtype") else 2e-6  # stock rounds scores and probabilities to bfloat16 too
    (losses, norms), *others = ranks(2).run(trained.train, *cases)[-1]
    for other_losses, other_norms in others:
        assert other_losses == pytest.approx(losses, rel=close)
        assert other_norms == pytest.approx(norms, rel=close)


ROPE = {"model": {"position_embedding_type": "rope"}}
# Experts are in the second layer: Megatron logs their losses in as many places as its first model has layers.
HYBRIDS = {
    "tensor parallel": {"tp": 2, "pattern": "*-*-"},
    "sequence parallel, more tokens predicted": {
        "tp": 2, "pattern": "*--*/*-", "config": {**LLAMA, **SEQUENCE, "mtp_num_layers": 1}, **ROPE,
    },
    "experts, sequence parallel": {
        "tp": 2, "ep": 2, "etp": 1, "pattern": "*E*-", "config": {**ALL_TO_ALL, **SEQUENCE, "qk_l2_norm": True},
    },
    "pipeline, more tokens predicted": {
        "pp": 2, "pattern": "*E|*-/*-/*-", "config": {**ALL_TO_ALL, "mtp_num_layers": 2},
    },
    "recomputed, by the backend's sums": {
        "tp": 2, "pattern": "*-*-", "config": SEQUENCE | RECOMPUTED, "grad_reduce": "backend",
    },
    "latent attention": {"tp": 2, "pattern": "+E+-", "config": {**ALL_TO_ALL, **LATENT, **SEQUENCE}, **ROPE},
}  # fmt: skip
HAS_HYBRIDS = importlib.util.find_spec("megatron.core.models.hybrid") is not None
since_018 = pytest.mark.skipif(not HAS_HYBRIDS, reason="Megatron has hybrid models of this kind since 0.18")


@since_018
@pytest.mark.parametrize("name", HYBRIDS)
def test_training_of_hybrids_is_megatrons(name):
    if name == "latent attention":
        pytest.importorskip("megatron.core.transformer.mla_qk_norm_config", reason="a layer of its own since 0.19")
    cases = [Case(drop_in, **HYBRIDS[name]) for drop_in in ("stock", "apply", "spec")]
    (losses, norms), *others = ranks(2).run(trained.train, *cases)[-1]
    for other_losses, other_norms in others:
        assert other_losses == pytest.approx(losses, rel=2e-6)
        assert other_norms == pytest.approx(norms, rel=2e-6)


@since_018
def test_hybrid_checkpoints_have_the_names_of_transformer_engine():
    """Megatron's own spec saves norms with the linears that it fuses them with, the norm before experts apart."""
    config = {**ALL_TO_ALL, **SEQUENCE}
    stock, ours = (
        ranks(2).run(trained.surface, Case(d, tp=2, ep=1, pattern="*-E", config=config))[0] for d in ("stock", "spec")
    )
    assert (ours[0], ours[2]) == (stock[0], stock[2])
    norms = {saved_as for key, (saved_as, *_) in ours[1].items() if "norm" in key}
    assert norms == {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_bias",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_bias",
        "decoder.layers.2.pre_mlp_layernorm.weight",
        "decoder.layers.2.pre_mlp_layernorm.bias",
        "decoder.final_norm.weight",
        "decoder.final_norm.bias",
    }


@since_018
def test_layers_of_hybrids():
    from megatron.core.models.hybrid import hybrid_layer_specs

    from parallel_ops.integrations import megatron
    from parallel_ops.integrations.megatron import modules

    config = SimpleNamespace(qk_layernorm=False, qk_l2_norm=False, normalization="RMSNorm", moe_grouped_gemm=False)
    ours, stock = megatron.hybrid_stack_spec(config).submodules, hybrid_layer_specs.hybrid_stack_spec.submodules
    assert ours.attention_layer.submodules.self_attention.submodules.linear_proj is modules.RowParallelLinear
    assert ours.mtp_block_spec.submodules.layer_specs[0].submodules.eh_proj is modules.ColumnParallelLinear
    for name in ("mamba_layer", "gdn_layer", "dsa_layer"):
        assert getattr(ours, name) is getattr(stock, name)
    with pytest.raises(ValueError, match="grad_reduce must be"):
        megatron.hybrid_stack_spec(config, grad_reduce="exact")


@pytest.mark.skipif(HAS_HYBRIDS, reason="of versions without it")
def test_versions_without_hybrids_are_named():
    from parallel_ops.integrations import megatron

    with pytest.raises(RuntimeError, match=r"megatron-core 0\.1\d\..* has no HybridModel"):
        megatron.hybrid_stack_spec(None)


@pytest.mark.parametrize("name", ["sequence parallel", "gradients in bfloat16", "llama"])
def test_training_by_the_backends_sums_is_megatrons(name):
    cases = [Case("stock", **CASES[name]), Case("spec", grad_reduce="backend", **CASES[name])]
    close = 5e-3 if CASES[name].get("dtype") else 2e-6
    (losses, norms), ours = ranks(2).run(trained.train, *cases)[-1]
    assert ours[0] == pytest.approx(losses, rel=close)
    assert ours[1] == pytest.approx(norms, rel=close)


def test_unknown_reductions_of_a_spec_are_named():
    from parallel_ops.integrations import megatron

    for build in (megatron.ParallelOpsSpecProvider, megatron.gpt_layer_spec):
        with pytest.raises(ValueError, match="grad_reduce must be 'fp32' or 'backend', got 'exact'"):
            build(grad_reduce="exact")


def test_deferred_embedding_gradients():
    """Megatron's own layers fail with the flag, so the comparison is with gradients that are not deferred."""
    alike = {"pp": 2, "model": {"share_embeddings_and_output_weights": False}}
    defer = {**FUSED, "defer_embedding_wgrad_compute": True}
    cases = [Case("stock", config=FUSED, **alike), Case("spec", config=defer, **alike)]
    stock, deferred = ranks(2).run(trained.train, *cases)[-1]
    assert deferred[0] == pytest.approx(stock[0], rel=2e-6)
    assert deferred[1] == pytest.approx(stock[1], rel=2e-6)


@pytest.mark.parametrize(
    ("position", "pattern"), [("rope", None), ("learned_absolute", None), pytest.param("rope", "*-*-", marks=since_018)]
)
def test_context_parallel_is_the_whole_sequence(position, pattern):
    """Megatron has it with Transformer Engine only, so the comparison is with the whole sequence on each rank."""
    alike = {"model": {"position_embedding_type": position}, "pattern": pattern}
    cases = [Case("stock", **alike), Case("spec", cp=2, **alike)]
    stock, shared = zip(*ranks(2).run(trained.train, *cases), strict=True)
    losses = [sum(of_ranks) / 2 for of_ranks in zip(*(losses for losses, _ in shared), strict=True)]
    assert losses == pytest.approx(stock[0][0], rel=2e-6)
    assert shared[0][1] == pytest.approx(stock[0][1], rel=2e-6)


def test_parameters_and_checkpoints_look_as_megatrons():
    config = {**SEQUENCE, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    stock, ours = (ranks(2).run(trained.surface, Case(d, tp=2, config=config)) for d in ("stock", "spec"))
    assert ours == stock


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropies(fused, label_smoothing):
    if fused and label_smoothing:
        pytest.skip("the fused loss has no label smoothing")
    for results, inside, all_reduces in ranks(2).run(megatron_functions.losses_of_shards, label_smoothing, fused):
        of_stock = 2 if fused else 3
        assert all_reduces == [of_stock, 0, of_stock]  # stock, ours, exact
        for of_ours, right in zip(results["ours"], results["right"], strict=True):
            torch.testing.assert_close(of_ours.double(), right, rtol=1e-5, atol=1e-6)
        for of_exact, of_stock in zip(results["exact"], results["stock"], strict=True):
            assert torch.equal(of_exact, of_stock)
        if not label_smoothing:  # which stock spreads over each rank's part
            loss, gradient = results["stock"]
            torch.testing.assert_close(results["ours"][0][inside], loss[inside])
            off = (gradient - results["right"][1])[inside].abs().max()
            assert off > 1e-4 if fused else off < 1e-5  # the fused one rounds its gradient to bfloat16


ATTENTIONS = [
    {},
    {"num_query_groups": 2},
    {"window_size": (3, 0)},
    {"apply_query_key_layer_scaling": True},
    {"window_size": (3, 2)},
    {"softmax_type": "off-by-one"},
]


@pytest.mark.parametrize("options", [{}, {"mask": True}, {"mask": True, "type": "padding"}, {"packed": True}], ids=str)
def test_core_attention(options):
    # Windows that reach forward take no packed sequences.
    configs = [c for c in ATTENTIONS if not (c.get("window_size") == (3, 2) and options.get("packed"))]
    found, _ = ranks(2).run(megatron_functions.attention, options, [Case("stock", config=config) for config in configs])
    for config, (stock, ours) in zip(configs, found, strict=True):
        for of_stock, of_ours in zip(stock, ours, strict=True):
            torch.testing.assert_close(of_ours, of_stock, rtol=1e-4, atol=1e-5, msg=lambda m, c=config: f"{c}: {m}")
