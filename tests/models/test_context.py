"""The transformer over ranks that share each sequence."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.context_parallel import SequenceLayout, join_sequence
from parallel_ops.layers.core_attention import unfused
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.models.context import Context
from parallel_ops.models.experts import ExpertsConfig
from parallel_ops.models.latent import LatentAttentionConfig
from support.parallelism.layers import mesh_of
from support.ranks.distributed import Raised, ranks

CONFIG = TransformerConfig(
    vocab_size=31,
    seq_length=16,
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    positions="rotary",
    norm="rms_norm",
)


def model_of(context, layout="zigzag", **options):
    torch.manual_seed(0)
    return Transformer(dataclasses.replace(CONFIG, **options), cp_mesh=context, cp_layout=layout)


def text(length: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, of which the first half of the second sequence has none."""
    tokens, targets = torch.randint(31, (2, length, 2), generator=torch.Generator().manual_seed(length)).unbind()
    targets[: length // 2, 1] = -100
    return tokens, targets


def compare_gradients(alone: Transformer, shared: Transformer, group: ProcessGroup, case: str = "") -> None:
    """The mean over the ranks of a group is the gradient of one process."""
    for (name, wanted), got in zip(alone.named_parameters(), shared.parameters(), strict=True):
        grad = torch.zeros_like(got) if got.grad is None else got.grad
        torch.distributed.all_reduce(grad, group=group)
        torch.testing.assert_close(
            grad / group.size(), wanted.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{case} {n}: {m}"
        )


def compare(rank: int, layout: str, length: int, ranks: int, documents: list[int] | None, options: dict) -> None:
    """Loss, gradients and logits over ``ranks`` ranks are those of one."""
    mesh = mesh_of(dp_replicate=4 // ranks, cp=ranks)
    alone, shared = model_of(None, **options), model_of(mesh["cp"], layout, **options)
    tokens, targets = text(length)
    cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    if documents is not None:  # sdpa knows no documents: one at a time
        parts = [slice(a, b) for a, b in itertools.pairwise(documents) if b > a]
        places = torch.arange(length)
        logits = torch.cat([alone(tokens[part], positions=places[part]) for part in parts])
    else:
        logits = alone(tokens)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss = shared(tokens, targets, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    expected.backward()
    loss.backward()
    group = mesh["cp"].get_group()
    compare_gradients(alone, shared, group)
    whole = shared.sequence_layout(length, cu_seqlens)
    found = shared(tokens, cu_seqlens=cu_seqlens, layout=whole)
    torch.testing.assert_close(found, logits[whole.positions(mesh.rank("cp"))], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(join_sequence(found, group, cp_layout=whole), logits, rtol=1e-4, atol=1e-5)


def losses_of_layouts(rank: int) -> list[float]:
    """The loss in each layout, the balanced one twice, which "auto" takes here: documents, two windows, dropout."""
    mesh = mesh_of(cp=4)
    bounds = torch.tensor([0, 2, 90, 97, 128], dtype=torch.int32)
    tokens, targets = text(128)
    tokens, targets = tokens[:, :1], targets[:, :1]
    found = []
    for layout in ("zigzag", "striped", "contiguous", "balanced", "auto"):
        model = model_of(mesh["cp"], layout, window=(16, None), seq_length=128, dropout=0.1, attention_dropout=0.1)
        loss = model(tokens, targets, cu_seqlens=bounds, dropout_seed=3)
        loss.backward()
        gradient = model.tokens.weight.grad.clone()
        torch.distributed.all_reduce(gradient)
        found += [loss.item(), gradient.double().sum().item(), gradient.double().norm().item()]
    whole = model.sequence_layout(128, bounds)
    chosen = [model.sequence_layout(128, torch.tensor(b)).cp_layout for b in ([0, 128], [0, *range(15, 128, 16), 128])]
    assert chosen == ["zigzag", "contiguous"]
    assert whole is model.sequence_layout(128, bounds)
    for layout, message in (
        (SequenceLayout(64, 4), "layout must be of 128 tokens"),
        (None, "cu_seqlens must rise from 0"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, cu_seqlens=bounds if layout else bounds.flip(0), layout=layout)
    return found


def test_the_loss_does_not_depend_on_the_layout():
    for found in ranks(4).run(losses_of_layouts):
        losses, balanced = found[::3], found[-6:]
        assert losses == pytest.approx([losses[0]] * 5, rel=1e-6)
        assert found[2::3] == pytest.approx([found[2]] * 5, rel=1e-5)
        assert balanced[:3] == balanced[3:]


def compare_dropout(rank: int, layout: str, length: int, sizes: dict[str, int], options: dict) -> None:
    """Losses in training, and the gradient of the embedding, are those of one process: it drops the same elements."""
    mesh = mesh_of(**sizes)
    options = {"dropout": 0.4, "attention_dropout": 0.3, **options}
    alone = model_of(None, **options)
    torch.manual_seed(0)
    config, shards = alone.config, {"tp_mesh": mesh["tp"], "sequence_parallel": True}
    shared = Transformer(config, cp_mesh=mesh["cp"], cp_layout=layout, **(shards if mesh["tp"] is not None else {}))
    tokens, targets = text(length)
    losses = []
    for model in (alone, shared):
        torch.manual_seed(5)
        losses.append(model(tokens, targets))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    if mesh["tp"] is None:
        compare_gradients(alone, shared, mesh["cp"].get_group())


def wrong_length(rank: int) -> None:
    mesh = mesh_of(cp=2, tp=2)
    model = Transformer(CONFIG, tp_mesh=mesh["tp"], cp_mesh=mesh["cp"], sequence_parallel=True)
    model(torch.zeros(14, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("layout", "length", "size", "documents", "options"),
    [
        ("zigzag", 16, 4, None, {}),
        ("zigzag", 13, 4, None, {"positions": "learned", "norm": "layer_norm"}),
        ("zigzag", 5, 4, None, {"qk_norm": True}),  # fewer tokens than chunks
        ("striped", 13, 4, None, {"window": 3}),
        ("contiguous", 7, 2, None, {}),
        ("zigzag", 13, 4, None, {"attention_sinks": True}),
        ("striped", 7, 2, None, {"attention_sinks": True, "window": (3, None)}),
        ("contiguous", 13, 4, [0, 1, 12, 13], {"attention_sinks": True}),
        ("zigzag", 16, 2, [0, 3, 3, 9, 16], {}),
        ("striped", 13, 4, [0, 1, 12, 13], {}),
        ("balanced", 16, 4, None, {"positions": "learned"}),
        ("balanced", 61, 4, [0, 1, 40, 40, 61], {"attention_sinks": True, "window": (7, None), "seq_length": 61}),
    ],
)
def test_losses_gradients_and_logits_are_those_of_one_process(layout, length, size, documents, options):
    ranks(4).run(compare, layout, length, size, documents, options)


MODELS = {
    "learned": {"positions": "learned", "norm": "layer_norm"},
    "rotary": {},
    "latent": {
        "num_kv_heads": None, "bias": False,
        "latent": LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    },
    "experts": {
        "activation": "swiglu", "bias": False,
        "experts": ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=8, aux_loss=0.1),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_ranks_without_tokens(kind):
    """A sequence of three tokens or one on four ranks, in every layout."""
    ranks(4).run(short_sequences, MODELS[kind])


def short_sequences(rank, options):
    for layout, length in itertools.product(("zigzag", "striped", "contiguous", "balanced"), (1, 3)):
        alone, shared = model_of(None, **options), model_of(mesh_of(cp=4)["cp"], layout, **options)
        tokens, targets = text(length)
        losses = alone(tokens, targets), shared(tokens, targets)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        for loss in losses:
            loss.backward()
        compare_gradients(alone, shared, torch.distributed.group.WORLD, f"{layout}, {length} tokens:")


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_without_rows(kind):
    model = model_of(None, **MODELS[kind])
    tokens = torch.zeros(8, 0, dtype=torch.long)
    loss = model(tokens, tokens)
    loss.backward()
    assert loss.item() == 0 and model.eval()(tokens).shape == (8, 0, 31)
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("layout", "length", "sizes", "options"),
    [
        ("zigzag", 13, {"cp": 4}, {"positions": "learned"}),
        ("striped", 13, {"cp": 4}, {}),
        ("contiguous", 7, {"dp_replicate": 2, "cp": 2}, {}),
        ("zigzag", 16, {"cp": 2, "tp": 2}, {}),
        ("striped", 16, {"cp": 2, "tp": 2}, {"positions": "learned"}),
        ("balanced", 16, {"cp": 2, "tp": 2}, {"window": (3, None)}),
    ],
)
def test_dropout_is_that_of_one_process(layout, length, sizes, options):
    """Of the embedding, of probabilities and of what is added to the residual stream."""
    ranks(4).run(compare_dropout, layout, length, sizes, options)


def test_a_length_that_tensor_parallel_ranks_cannot_split():
    for outcome in ranks(4).outcomes(wrong_length):
        assert isinstance(outcome, Raised) and outcome.type == "ValueError"
        assert "2 ranks can split evenly in each of 2 shares, got 14" in outcome.message


def test_wrong_options():
    with pytest.raises(ValueError, match="cp_layout must be one of zigzag"):
        Transformer(CONFIG, cp_layout="spiral")
    with pytest.raises(TypeError, match="cu_seqlens must be None for this core"):
        Transformer(CONFIG, core_attention=unfused)(
            torch.zeros(4, 1, dtype=torch.int64), cu_seqlens=torch.tensor([0, 4])
        )


def test_lengths_need_not_wait_for_the_layout_of_a_batch():
    assert Context("Test", None, "auto", "ring").lengths(7) == (7,)
