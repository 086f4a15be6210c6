"""The transformer over ranks that share each sequence."""

import pytest
import torch

from parallel_ops.layers.core_attention import unfused
from parallel_ops.models import Transformer
from support import context
from support.distributed import Raised, ranks


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
    ],
)
def test_losses_gradients_and_logits_are_those_of_one_process(layout, length, size, documents, options):
    ranks(4).run(context.compare, layout, length, size, documents, options)


@pytest.mark.parametrize(
    ("layout", "length", "sizes", "options"),
    [
        ("zigzag", 13, {"cp": 4}, {"positions": "learned"}),
        ("striped", 13, {"cp": 4}, {}),
        ("contiguous", 7, {"dp_replicate": 2, "cp": 2}, {}),
        ("zigzag", 16, {"cp": 2, "tp": 2}, {}),
        ("striped", 16, {"cp": 2, "tp": 2}, {"positions": "learned"}),
    ],
)
def test_dropout_is_that_of_one_process(layout, length, sizes, options):
    """Of the embedding, of probabilities and of what is added to the residual stream."""
    ranks(4).run(context.compare_dropout, layout, length, sizes, options)


def test_ranks_drop_independently():
    for same, kept in ranks(4).run(context.dropout):
        assert same == pytest.approx(0.5, abs=0.15) and kept == pytest.approx(0.5, abs=0.15)


def test_a_length_that_tensor_parallel_ranks_cannot_split():
    for outcome in ranks(4).outcomes(context.wrong_length):
        assert isinstance(outcome, Raised) and outcome.type == "ValueError"
        assert "2 ranks can split evenly in each of 2 shares, got 14" in outcome.message


def test_wrong_options():
    with pytest.raises(ValueError, match="kind must be one of zigzag"):
        Transformer(context.CONFIG, layout="spiral")
    with pytest.raises(TypeError, match="cu_seqlens must be None for this core"):
        Transformer(context.CONFIG, core_attention=unfused)(
            torch.zeros(4, 1, dtype=torch.int64), cu_seqlens=torch.tensor([0, 4])
        )
