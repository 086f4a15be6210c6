"""Bounds of documents and ranges are made once for all layers and for the backward."""

import contextlib
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from parallel_ops import flash_attention
from parallel_ops._internal.token_range import TokenRange
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.ops.attention import cache, options, ranges
from parallel_ops.ops.attention.ranges import attention_bounds, document_ranges, range_bounds
from parallel_ops.triton_kernels import memory


@pytest.fixture
def searches(monkeypatch):
    """A list that gets an element whenever the ranges of documents are made."""
    found = []

    def counted(*arguments, **given):
        found.append(None)
        return document_ranges(*arguments, **given)

    monkeypatch.setattr(options, "document_ranges", counted)
    return found


@pytest.fixture
def places(monkeypatch):
    """A list that gets an element whenever the places of queries or keys are listed, which every mask needs."""
    found, original = [], ranges._places
    monkeypatch.setattr(ranges, "_places", lambda *a: found.append(None) or original(*a))
    return found


@pytest.fixture(autouse=True)
def nothing_made():
    cache._made.clear()


def bounds(cu_seqlens, **given):
    tokens = TokenRange(0, 64)
    found = options.AttentionOptions(cu_seqlens=cu_seqlens).ranges(64)
    return attention_bounds(tokens, tokens, right=0, ranges=found, **given)


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
    assert bounds(starts, left=7).spans is not first.spans
    assert torch.equal(bounds(starts, left=7).spans[0, 18:22], torch.tensor([11, 12, 20, 20], dtype=torch.int32))
    starts[1] = 30
    assert bounds(starts).spans[0, 25] == 0
    assert bounds(starts.clone()).spans is not bounds(starts).spans
    with torch.inference_mode():  # whose tensors have no version
        unversioned = torch.tensor([0, 20, 64])
        assert bounds(unversioned).spans is not bounds(unversioned).spans


def test_a_ring_makes_those_of_a_block_once(places):
    own, others = [TokenRange(32, 32)], [TokenRange(0, 32)]
    found = document_ranges(torch.tensor([0, 20, 64]))
    for from_keys in (False, True, True):
        range_bounds(own, others, None, 0, found, from_keys=from_keys)
    made = len(places)
    range_bounds(own, others, None, 0, found, from_keys=True)
    assert len(places) == made
    range_bounds(own, own, None, 0, found, from_keys=False)
    assert len(places) > made


def test_what_is_kept_is_little():
    alive = [torch.tensor([0, 20, 64]) for _ in range(30)]
    for starts in alive:
        bounds(starts)
    assert len(cache._made) <= 16
    for length in range(1, 5000):
        cache.once(starts, length, object)
    assert len(cache._made[id(starts)][2]) <= 4096


def test_nothing_is_kept_of_tensors_that_are_gone():
    starts = torch.tensor([0, 20, 64])
    bounds(starts)
    assert (key := id(starts)) in cache._made
    del starts
    assert key not in cache._made


@pytest.mark.parametrize(("stream", "graphs"), [(0, True), (7, False), (7, True)])
def test_what_is_kept_is_in_no_pool_of_inductors_graphs(monkeypatch, stream, graphs):
    """They have a stream and a thread's pool, which may hold nothing that outlives a run."""

    @contextlib.contextmanager
    def nothing(_):
        yield

    cuda = SimpleNamespace(current_stream=lambda _: stream, device=nothing, stream=nothing)
    monkeypatch.setattr(memory, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cache, "_stream", lambda _: stream)
    name = "torch._inductor.cudagraph_trees"
    monkeypatch.setitem(sys.modules, name, object()) if graphs else monkeypatch.delitem(sys.modules, name, False)
    starts = torch.tensor([0, 20, 64])
    made_by = cache.once(starts, "thread", threading.get_ident)
    assert (made_by != threading.get_ident()) == (stream == 7 and graphs)
    assert cache.once(starts, "thread", object) == made_by


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


def test_values_known_on_the_host():
    """The meta device stands for a GPU, whose values cannot be had without waiting."""
    host = torch.tensor([0, 20, 64])
    starts = torch.empty(3, dtype=torch.int64, device="meta")
    assert cache.known_on_host(host) is host and cache.known_on_host(starts) is None
    cache.know_on_host(starts, host)
    for _ in range(20):  # more tensors than results are kept of
        cache.know_on_host(torch.empty(3, device="meta"), host)
    assert cache.on_host(starts) is cache.on_host(starts.detach()) is host
    assert cache.known_on_host(starts[1:]) is None
    assert options.AttentionOptions(cu_seqlens=starts).known_on_host
    assert not options.AttentionOptions(cu_seqlens=starts, key_ranges=starts[1:]).known_on_host
    starts.add_(1)
    assert cache.known_on_host(starts) is None
