"""The transformer is the same model on any mesh, and does what its configuration says."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from parallel_ops.layers.core_attention import unfused
from parallel_ops.models import Llama3Scaling, Transformer, YarnScaling
from parallel_ops.models.experts import ExpertsConfig
from support.parallelism import transformer as on_rank
from support.parallelism.transformer import CONFIGS, GPT2, LLAMA, sample
from support.ranks.distributed import Raised, ranks


def build(config, **options):
    torch.manual_seed(0)
    return Transformer(config, dtype=torch.float64, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_logits_weights_and_gradients_are_the_same_on_any_mesh(name):
    """Two key heads: with four ranks they are shared. The vocabulary of 61 does not split evenly."""
    want = on_rank.step(0, name, False)
    assert want["gradients"].keys() == want["weights"].keys()
    for size in (2, 4):
        for sequence_parallel in (False, True):
            for got in ranks(size).run(on_rank.step, name, sequence_parallel):
                torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-11, atol=0)
                torch.testing.assert_close(got["logits"], want["logits"], rtol=1e-9, atol=1e-10)
                assert got["weights"].keys() == want["weights"].keys()
                for key, weight in want["weights"].items():
                    assert torch.equal(got["weights"][key], weight), key
                    torch.testing.assert_close(
                        got["gradients"][key], want["gradients"][key], rtol=1e-9, atol=1e-10, msg=key
                    )


def test_fully_sharded_it_is_the_same_model_too():
    torch.manual_seed(0)
    model = Transformer(LLAMA)
    weights = on_rank.state(model)
    loss = model(*sample(batch=4))
    loss.backward()
    for got in (got for tp in (1, 2) for got in ranks(4).run(on_rank.sharded_step, "llama", tp, None)):
        torch.testing.assert_close(got["loss"], loss.detach())
        for key, grad in on_rank.gradients(model).items():
            assert torch.equal(got["weights"][key], weights[key]), key
            torch.testing.assert_close(got["gradients"][key], grad, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_stage_draws_what_the_whole_model_draws(name):
    want = build(CONFIGS[name]).state_dict()
    for part in (on_rank.drawn_part(0, name), *ranks(2).run(on_rank.drawn_part, name)):
        assert 0 < len(part) < len(want)
        assert all(torch.equal(weight, want[key]) for key, weight in part.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_built_in_the_context_of_the_meta_device(name):
    with torch.device("meta"):
        model = build(CONFIGS[name])
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    want = build(CONFIGS[name]).state_dict()
    assert all(torch.equal(weight, want[key]) for key, weight in model.state_dict().items())


def test_recomputation_does_not_change_what_is_drawn():
    want, model = build(LLAMA).state_dict(), build(LLAMA)
    for number, layer in model.layers.items():
        model.layers[number] = checkpoint_wrapper(layer)
    torch.manual_seed(0)
    model.reset_parameters()
    assert all(torch.equal(weight, want[name]) for name, weight in model.state_dict().items())


def test_stages_one_after_another_are_the_whole_model():
    model, first, last = (build(LLAMA) for _ in range(3))
    first.norm = first.head = last.tokens = None
    del first.layers["1"], last.layers["0"]
    tokens, targets = sample()
    torch.testing.assert_close(last(first(tokens), targets), model(tokens, targets), rtol=0, atol=0)


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(0)
    weights = Transformer(dataclasses.replace(GPT2, hidden_size=192, init_std=0.02)).state_dict()
    after = torch.rand(1)
    torch.manual_seed(0)
    Transformer(dataclasses.replace(GPT2, num_layers=5))
    assert torch.equal(after, torch.rand(1))
    assert weights["tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["layers.0.mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    for narrow in ("mlp.down", "attention.out"):
        assert weights[f"layers.0.{narrow}.weight"].std().item() == pytest.approx(0.01, rel=0.05)  # 0.02 / sqrt(2 * 2)
    assert not torch.equal(weights["layers.0.mlp.up.weight"], weights["layers.1.mlp.up.weight"])
    for key, weight in weights.items():
        assert not key.endswith("bias") or not weight.any(), key
        assert "norm" not in key or key.endswith("bias") or weight.eq(1).all(), key


def test_the_loss_is_the_mean_cross_entropy_of_the_targets_that_count():
    model = build(LLAMA)
    tokens, targets = sample()
    targets[3:7] = -100
    want = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "sinks"])
def test_no_token_sees_its_future(name):
    model = build(CONFIGS[name]).eval()
    tokens, _ = sample()
    changed = tokens.clone()
    changed[10:] = (changed[10:] + 1) % 61
    assert torch.equal(model(tokens)[:10], model(changed)[:10])
    assert not torch.equal(model(tokens)[10:], model(changed)[10:])


def test_windows_of_layers_add_up():
    """Token 20 sees 4 back in the second layer, which saw 2 back in the first: 6 in all, itself included 7."""
    model = build(dataclasses.replace(LLAMA, window=(3, 5)))
    tokens, _ = sample()
    seen = []
    for place in range(24):
        changed = tokens.clone()
        changed[place] = (changed[place] + 1) % 61
        seen.append(not torch.equal(model(changed)[20], model(tokens)[20]))
    assert [place for place, is_seen in enumerate(seen) if is_seen] == list(range(14, 21))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_positions_may_be_given(name):
    model, (tokens, _) = build(CONFIGS[name]).eval(), sample(12)
    rows = torch.arange(12)
    want = model(tokens)
    for positions in (rows, rows[:, None].expand(12, 3)):
        torch.testing.assert_close(model(tokens, positions=positions), want, rtol=1e-12, atol=1e-12)
    later = model(tokens, positions=rows + 7)
    if name == "llama":  # rotary: only distances count
        torch.testing.assert_close(later, want, rtol=1e-4, atol=1e-4)
    else:
        assert not torch.allclose(later, want, rtol=1e-2, atol=1e-2)
    assert not torch.allclose(model(tokens, positions=rows.flip(0)), want, rtol=1e-2, atol=1e-2)


def test_dropout_acts_in_training_only():
    model, (tokens, _) = build(CONFIGS["dropout"]), sample()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, r"hidden_size \(48\) must be a multiple of num_heads \(5\)"),
        ({"num_kv_heads": 3}, r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ({"num_layers": 0}, "num_layers must be an int of at least 1, got 0"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size must be an int of at least 1, got 0"),
        ({"vocab_size": None}, "vocab_size must be an int of at least 1, got None"),
        ({"window": 0}, "window must be an int of at least 1, got 0"),
        ({"window": (3,)}, "window must have a value for each of the 2 layers, got 1"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"attention_dropout": float("nan")}, "attention_dropout must be at least 0"),
        ({"activation": "relu"}, "activation must be one of 'gelu', 'gelu_exact', 'swiglu', got 'relu'"),
        ({"positions": "alibi"}, "positions must be one of 'learned', 'rotary', got 'alibi'"),
        ({"norm": None}, "norm must be one of 'layer_norm', 'rms_norm', got None"),
        ({"head_dim": 3, "positions": "rotary"}, "rotary positions need an even head size, got 3"),
        ({"rotary_base": 0.0}, "rotary_base must be positive, got 0.0"),
        ({"rotary_scaling": LLAMA.rotary_scaling}, "rotary_scaling needs positions='rotary'"),
        (
            {"rotary_scaling": YarnScaling(factor=2, original_length=8), "positions": "rotary", "rotary_base": 1.0},
            "rotary_base must be above 1 with YarnScaling, got 1.0",
        ),
        (
            {"experts": ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=8)},
            r"experts need activation='swiglu' and bias=False; attention_bias and experts\.bias add biases",
        ),
    ],
)
def test_bad_configurations_are_named(change, message):
    with pytest.raises(ValueError, match=f"TransformerConfig: {message}"):
        dataclasses.replace(GPT2, **change)


def test_bad_scalings_are_named():
    with pytest.raises(ValueError, match="factor must be positive, got 0"):
        Llama3Scaling(factor=0, low_frequency=1, high_frequency=4, original_length=8)
    with pytest.raises(ValueError, match=r"high_frequency \(1\) must be above low_frequency \(1\)"):
        Llama3Scaling(factor=2, low_frequency=1, high_frequency=1, original_length=8)
    for change, message in (
        ({"factor": 0.9}, "factor must be at least 1, got 0.9"),
        ({"factor": float("inf")}, "factor must be at least 1, got inf"),
        ({"beta_fast": 1.0}, "beta_fast must be above beta_slow and both above 0, got 1.0 and 1.0"),
        ({"beta_slow": 0.0}, "beta_fast must be above beta_slow and both above 0, got 32.0 and 0.0"),
        ({"original_length": 6}, "original_length must be above 2 pi beta_slow, .* got 6"),
        ({"attention_factor": 0.0}, r"attention_factor must be positive, got 0\.0"),
        ({"mscale": -1.0}, r"mscale must be at least 0, got -1\.0"),
        ({"mscale_all_dim": float("nan")}, "mscale_all_dim must be at least 0, got nan"),
    ):
        with pytest.raises(ValueError, match=f"YarnScaling: {message}"):
            YarnScaling(**{"factor": 2.0, "original_length": 8} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu_limit": 0.0}, r"swiglu_limit must be positive and finite, or None for no limit, got 0\.0"),
        ({"swiglu_limit": float("inf")}, "swiglu_limit must be positive and finite"),
        ({"swiglu_alpha": float("nan")}, "swiglu_alpha must be finite, got nan"),
        ({"swiglu_up_offset": float("inf")}, "swiglu_up_offset must be finite, got inf"),
        ({"bias": True, "shared_experts": 1}, "shared_experts must be 0 with bias or with options of SwiGLU"),
        ({"swiglu_alpha": 2.0, "shared_experts": 1}, "shared_experts must be 0 with bias or with options of SwiGLU"),
    ],
)
def test_bad_experts_are_named(change, message):
    with pytest.raises(ValueError, match=f"ExpertsConfig: {message}"):
        ExpertsConfig(**{"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8} | change)


def test_what_cannot_have_sinks_says_so():
    with pytest.raises(ValueError, match="ParallelSelfAttention: sink needs a core_attention that takes one, such as"):
        build(CONFIGS["sinks"], core_attention=unfused)


def test_biases_of_the_parts_alone():
    """Those of attention, of its queries, keys and values, and of experts, which are zeros at first."""
    experts = ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=8, bias=True, router_bias=True)
    cases = [
        ({"attention_bias": True}, {"q", "k", "v", "out"}),
        ({"attention_bias": True, "qkv_bias": False}, {"out"}),
        ({"qkv_bias": True}, {"q", "k", "v"}),
        ({"bias": True, "attention_bias": False}, {"gate", "up", "down"}),
        ({"experts": experts}, {"gate_up_bias", "down_bias", "router"}),
    ]
    for options, names in cases:
        weights = build(dataclasses.replace(LLAMA, **options)).state_dict()
        found = {name for name in weights if name.endswith("bias")}
        assert {name.removesuffix(".bias").rpartition(".")[2] for name in found} == names
        assert not any(weights[name].any() for name in found)


def test_bad_input_is_named():
    model = build(GPT2)
    tokens = torch.zeros(5, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"tokens must have shape \[s, b\] with s from 1 to 24, got \[25, 1\]"):
        model(torch.zeros(25, 1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"tokens must have shape"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"targets must have shape \[5, 1\], got \[4, 1\]"):
        model(tokens, tokens[:4])
    with pytest.raises(ValueError, match=r"positions must have shape \[5\] or \[5, 1\], got \[4\]"):
        model(tokens, positions=torch.arange(4))
    for outcome in ranks(2).outcomes(on_rank.odd_length):
        assert isinstance(outcome, Raised) and outcome.type == "ValueError"
        assert "tokens must have a length that the 2 ranks can split evenly, got 7" in outcome.message
