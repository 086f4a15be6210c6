"""Bounds of documents are made once for all layers and for the backward."""

import pytest
import torch

from parallel_ops import flash_attention
from parallel_ops._internal.token_range import TokenRange
from parallel_ops.context_parallel.schedule import blocks
from parallel_ops.context_parallel.schedule.blocks import Options, _within_documents
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.ops.attention import block, documents
from parallel_ops.ops.attention.block import attention_bounds


@pytest.fixture
def searches(monkeypatch):
    """A list that gets an element for each search by which bounds are made."""
    found = []

    def counted(*arguments, **options):
        found.append(None)
        return original(*arguments, **options)

    original = block.document_bounds
    for module in (block, blocks):
        monkeypatch.setattr(module, "document_bounds", counted)
    return found


@pytest.fixture(autouse=True)
def nothing_made():
    documents._made.clear()


def bounds(cu_seqlens, length=64, **options):
    tokens = TokenRange(0, length)
    return attention_bounds(tokens, tokens, causal=True, cu_seqlens=cu_seqlens, **options)


def test_once_a_call_of_a_model(searches):
    model = Transformer(TransformerConfig(vocab_size=32, seq_length=64, num_layers=3, hidden_size=32, num_heads=2))
    tokens = torch.randint(32, (64, 1))
    for calls in (1, 2):
        starts = torch.tensor([0, 20, 64])
        model(tokens, tokens, cu_seqlens=starts).backward()
        assert len(searches) == calls


def test_another_mask_and_other_values():
    starts = torch.tensor([0, 20, 64])
    first = bounds(starts)
    assert bounds(starts).spans is first.spans
    assert bounds(starts, window=8).spans is not first.spans
    assert torch.equal(bounds(starts, window=8).spans[0, 18:22], torch.tensor([11, 12, 20, 20], dtype=torch.int32))
    starts[1] = 30
    assert bounds(starts).spans[0, 25] == 0
    assert bounds(starts.clone()).spans is not bounds(starts).spans
    with torch.inference_mode():  # whose tensors have no version
        unversioned = torch.tensor([0, 20, 64])
        assert bounds(unversioned).spans is not bounds(unversioned).spans


def test_a_ring_makes_those_of_a_block_once(searches):
    starts = torch.tensor([0, 20, 64])
    options = Options(True, None, 1.0, 0.0, 0.0, None, starts)
    own, others = [TokenRange(32, 32)], [TokenRange(0, 32)]
    for from_keys in (False, True, True):
        _within_documents(own, others, options, from_keys)
    assert len(searches) == 2  # one for each side
    _within_documents(own, own, options, False)
    assert len(searches) == 3


def test_what_is_kept_is_little():
    for _ in range(10):
        bounds(torch.tensor([0, 20, 64]))
    assert len(documents._made) <= 4
    starts = torch.tensor([0, 20, 64])
    for length in range(1, 600):
        documents.once(starts, length, object)
    assert len(documents._made[id(starts)][2]) <= 512


def test_another_tensor_at_the_same_place_in_memory():
    for end in (20, 30, 40):
        starts = torch.tensor([0, end, 64])
        assert bounds(starts).spans[0, 63] == end
        del starts


def test_values_that_change_between_calls():
    q, k, v = (torch.randn(64, 1, 2, 16) for _ in range(3))
    starts = torch.tensor([0, 20, 64])
    before = flash_attention(q, k, v, cu_seqlens=starts)
    starts[1] = 40
    assert torch.equal(flash_attention(q, k, v, cu_seqlens=starts), flash_attention(q, k, v, cu_seqlens=starts.clone()))
    assert not torch.equal(flash_attention(q, k, v, cu_seqlens=starts), before)
