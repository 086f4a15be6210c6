import dataclasses

import pytest
import torch

from parallel_ops.models import FUSED, GPT, PLAIN, GPTConfig
from parallel_ops.models import ops as model_ops
from parallel_ops.ops import bias_dropout_add_reference
from support.suite import DEVICES

CONFIG = GPTConfig(vocab_size=61, seq_length=24, layers=2, hidden=48, heads=3, ffn_hidden=80)
VARIANTS = {
    "gelu": CONFIG,
    "swiglu": dataclasses.replace(CONFIG, activation="swiglu"),
    "untied": dataclasses.replace(CONFIG, tied_embeddings=False),
    "llama": dataclasses.replace(CONFIG, activation="swiglu", positions="rotary", norm="rms_norm"),
}

variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
devices = pytest.mark.parametrize("device", DEVICES)


def build(config, ops, *, device="cpu", dtype=torch.float32, std=0.3):
    """A model of the seed's weights, made wide enough that the activations leave their linear range."""
    torch.manual_seed(0)
    config = dataclasses.replace(config, init_std=std)
    model = GPT(config, ops)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=std)
    return model.to(device, dtype)


def sample(config, device="cpu", batch=3, length=None):
    generator = torch.Generator().manual_seed(1)
    shape = (2, length or config.seq_length, batch)
    return torch.randint(config.vocab_size, shape, generator=generator).to(device).unbind()


def loss_and_gradients(model, tokens, targets):
    loss = model(tokens, targets)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def distance(values, oracle):
    return max((values[name].double() - oracle[name]).norm() / oracle[name].norm() for name in oracle)


@devices
@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_is_as_near_to_fp64_as_plain(device, config, dtype):
    tokens, targets = sample(config, device)
    results = {}
    for ops in (PLAIN, FUSED):
        loss, gradients = loss_and_gradients(build(config, ops, device=device, dtype=dtype), tokens, targets)
        assert loss.dtype is torch.float32
        results[ops] = {"loss": loss, **gradients}
    model = build(config, PLAIN, device=device, dtype=dtype).double()
    loss, gradients = loss_and_gradients(model, tokens, targets)
    oracle = {"loss": loss, **gradients}
    eps = torch.finfo(dtype).eps
    assert distance(results[FUSED], oracle) <= 2 * distance(results[PLAIN], oracle) + eps
    assert distance(results[PLAIN], oracle) < 50 * eps


@devices
@variants
def test_fused_equals_plain_in_fp64(device, config):
    tokens, targets = sample(config, device)
    plain, fused = (
        loss_and_gradients(build(config, ops, device=device, dtype=torch.float64), tokens, targets)
        for ops in (PLAIN, FUSED)
    )
    torch.testing.assert_close(fused, plain, rtol=1e-9, atol=1e-12)


@devices
def test_trains_under_autocast(device):
    tokens, targets = sample(CONFIG, device)
    losses = []
    for ops in (PLAIN, FUSED):
        model = build(CONFIG, ops, device=device, std=0.02)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss, gradients = loss_and_gradients(model, tokens, targets)
        assert all(gradient.dtype is torch.float32 for gradient in gradients.values())
        losses.append(loss)
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)


@devices
def test_with_the_same_masks_dropout_agrees_too(device, monkeypatch):
    config = dataclasses.replace(CONFIG, dropout=0.25)
    seeded = dataclasses.replace(PLAIN, bias_dropout_add=bias_dropout_add_reference)
    monkeypatch.setattr(model_ops.torch.nn.functional, "dropout", lambda x, *_: x)  # of the embeddings
    results = []
    for ops in (seeded, FUSED):
        seeds = iter(range(2 * config.layers))
        op = ops.bias_dropout_add
        with_seed = lambda *a, op=op, seeds=seeds, **k: op(*a, seed=next(seeds), **k)  # noqa: E731
        model = build(config, dataclasses.replace(ops, bias_dropout_add=with_seed), device=device)
        results.append(loss_and_gradients(model, *sample(config, device)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("ops", [PLAIN, FUSED], ids=["plain", "fused"])
def test_dropout_acts_in_training_only(ops):
    model = build(dataclasses.replace(CONFIG, dropout=0.5), ops)
    tokens, _ = sample(CONFIG)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@variants
def test_shapes_and_state_dict_do_not_depend_on_the_ops(config):
    plain, fused = build(config, PLAIN), build(config, FUSED, std=0.1)
    fused.load_state_dict(plain.state_dict())
    for length in (1, 7, config.seq_length):
        tokens, _ = sample(config, batch=2, length=length)
        logits = fused(tokens)
        assert logits.shape == (length, 2, config.vocab_size)
        torch.testing.assert_close(logits, plain(tokens), rtol=1e-4, atol=1e-4)
    assert (fused.head.weight is fused.tokens.weight) == config.tied_embeddings


@pytest.mark.parametrize("ops", [PLAIN, FUSED], ids=["plain", "fused"])
def test_rotary_positions_are_seen(ops):
    model = build(dataclasses.replace(CONFIG, positions="rotary"), ops)
    tokens, _ = sample(CONFIG)
    # One token everywhere: attention has the same values to mix at any distance, so all positions agree.
    same = model(torch.full_like(tokens, 7))
    torch.testing.assert_close(same, same[:1].expand_as(same), rtol=1e-4, atol=1e-4)
    # Two orders of the same past differ, as they would not without positions.
    swapped = tokens.clone()
    swapped[[2, 9]] = swapped[[9, 2]]
    assert not torch.allclose(model(tokens)[20], model(swapped)[20], rtol=1e-3, atol=1e-3)


def test_the_seed_sets_the_weights():
    models = []
    for ops in (PLAIN, FUSED):
        torch.manual_seed(3)
        models.append(GPT(dataclasses.replace(CONFIG, hidden=192), ops).state_dict())
    for name, weight in models[0].items():
        assert torch.equal(weight, models[1][name]), name
    assert models[0]["layers.0.mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert models[0]["layers.0.mlp.out.weight"].std().item() == pytest.approx(0.01, rel=0.05)  # 0.02 / sqrt(2 * 2)
    assert not models[0]["layers.0.mlp.up.bias"].any()


@variants
@pytest.mark.parametrize("ops", [PLAIN, FUSED], ids=["plain", "fused"])
def test_no_token_sees_its_future(ops, config):
    model = build(config, ops)
    tokens, _ = sample(CONFIG)
    changed = tokens.clone()
    changed[10:] = (changed[10:] + 1) % CONFIG.vocab_size
    assert torch.equal(model(tokens)[:10], model(changed)[:10])
    assert not torch.equal(model(tokens)[10:], model(changed)[10:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, r"hidden \(48\) must be a multiple of heads \(5\)"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"ffn_hidden": 0}, "ffn_hidden must be at least 1, got 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"dropout": float("nan")}, "dropout must be at least 0"),
        ({"activation": "relu"}, "activation must be 'gelu' or 'swiglu', got 'relu'"),
        ({"positions": "alibi"}, "positions must be 'learned' or 'rotary', got 'alibi'"),
        ({"norm": None}, "norm must be 'layer_norm' or 'rms_norm', got None"),
        ({"heads": 16, "positions": "rotary"}, "rotary positions need an even head size, got 3"),
        ({"rotary_base": 0.0}, "rotary_base must be positive, got 0.0"),
    ],
)
def test_bad_configurations_are_named(change, message):
    with pytest.raises(ValueError, match=f"GPTConfig: {message}"):
        dataclasses.replace(CONFIG, **change)


def test_bad_tokens_are_named():
    model = GPT(CONFIG, PLAIN)
    with pytest.raises(ValueError, match=r"tokens must have shape \[s, b\] with s from 1 to 24, got \[25, 1\]"):
        model(torch.zeros(25, 1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"tokens must have shape"):
        model(torch.zeros(5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"targets must have shape \[5, 1\], got \[4, 1\]"):
        model(torch.zeros(5, 1, dtype=torch.long), torch.zeros(4, 1, dtype=torch.long))
