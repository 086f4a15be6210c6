"""The calls of docs/migration.md on attention and rotary embedding, against SDPA and other libraries' composites."""

import pytest
import torch
import torch.nn.functional as F

from parallel_ops import flash_attention, join_sequence, rotary_embedding, rotary_embedding_qk, split_sequence

B, H, KV, S, D = 2, 4, 2, 12, 16


def heads_first(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, h, S, D, generator=generator).to(dtype).requires_grad_() for h in (H, KV, KV)]


def sdpa(q, k, v, seen=None, **options):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True, **options)


def seen_by(left=-1, right=-1):
    apart = torch.arange(S) - torch.arange(S)[:, None]
    return (apart >= (-left if left >= 0 else -S)) & (apart <= (right if right >= 0 else S))


def check(got, want, leaves):
    torch.testing.assert_close(got, want)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(*(torch.autograd.grad(y, leaves, grad) for y in (got, want)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("tensor_format", ["bhsd", "bshd", "sbhd"])
@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {"is_causal": True}),
        ({"causal": True, "softmax_scale": 0.3}, {"is_causal": True, "scale": 0.3}),
        ({"causal": False}, {}),
        ({"causal": True, "window_size": (3, 0)}, {"seen": seen_by(3, 0)}),
        ({"causal": True, "window_size": (3, -1)}, {"seen": seen_by(3, 0)}),
        ({"causal": False, "window_size": (3, 2)}, {"seen": seen_by(3, 2)}),
        ({"causal": False, "window_size": (-1, 1)}, {"seen": seen_by(-1, 1)}),
        ({"window_size": (-1, -1), "softcap": None, "dropout_p": 0.0}, {"is_causal": True}),
    ],
)
def test_attention_in_every_format(tensor_format, options, theirs):
    leaves = heads_first()
    order = ["bhsd".index(axis) for axis in tensor_format]
    out = flash_attention(*(t.permute(order) for t in leaves), tensor_format=tensor_format, **options)
    check(out.permute([tensor_format.index(axis) for axis in "bhsd"]), sdpa(*leaves, **theirs), leaves)


def test_fewer_queries_than_keys():
    """FlashAttention's causal mask, Transformer Engine's "causal_bottom_right": the last query sees the last key."""
    q, k, v = heads_first()
    for queries in (1, 5):
        out = flash_attention(q[:, :, -queries:], k, v, tensor_format="bhsd")
        torch.testing.assert_close(out, sdpa(q, k, v, is_causal=True)[:, :, -queries:])
    with pytest.raises(ValueError, match="at least as many keys as queries"):
        flash_attention(q, k[:, :, 1:], v[:, :, 1:], tensor_format="bhsd")
    with pytest.raises(ValueError, match=r"None for no cap"):
        flash_attention(q, k, v, softcap=0.0, tensor_format="bhsd")


def test_packed_heads_and_sinks_of_zero():
    qkv = torch.randn(B, S, 3, H, D)
    q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
    out = flash_attention(*qkv.unbind(2), tensor_format="bshd", causal=False)
    torch.testing.assert_close(out.transpose(1, 2), sdpa(q, k, v))
    scores = q @ k.transpose(-1, -2) * D**-0.5
    off_by_one = scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))
    out = flash_attention(*qkv.unbind(2), tensor_format="bshd", causal=False, sink=torch.zeros(H))
    torch.testing.assert_close(out.transpose(1, 2), off_by_one @ v)


def test_packed_sequences_and_masks_as_ranges():
    q, k, v = (torch.randn(S, h, D) for h in (H, KV, KV))  # [t, h, d]
    cu_seqlens = torch.tensor([0, 5, S], dtype=torch.int32)
    out = flash_attention(*(t.unsqueeze(1) for t in (q, k, v)), cu_seqlens=cu_seqlens).squeeze(1)
    for start, end in ((0, 5), (5, S)):
        alone = sdpa(*(t[start:end].transpose(0, 1)[None] for t in (q, k, v)), is_causal=True)
        torch.testing.assert_close(out[start:end], alone[0].transpose(0, 1))
    q, k, v = heads_first()
    prefix = seen_by(-1, 0) | (torch.arange(S) < 4)
    first, last = torch.zeros(S, dtype=torch.int32), torch.arange(S, dtype=torch.int32).clamp(min=3)
    out = flash_attention(q, k, v, key_ranges=(first, last), tensor_format="bhsd")
    check(out, sdpa(q, k, v, prefix), (q, k, v))


def test_a_shape_of_another_format_is_told():
    q, k, v = heads_first()
    with pytest.raises(ValueError, match=r"tensor_format='sbhd'.*fit tensor_format='bhsd'"):
        flash_attention(q, k, v)
    with pytest.raises(TypeError, match=r"window_size must be \(left, right\).*is \(7, 0\)"):
        flash_attention(q, k, v, window_size=8, tensor_format="bhsd")


def test_megatrons_core_attention():
    leaves = heads_first()
    out = flash_attention(*(t.permute(2, 0, 1, 3) for t in leaves)).flatten(2)
    check(out, sdpa(*leaves, is_causal=True).permute(2, 0, 1, 3).flatten(2), leaves)


def half_rotated(x, cos, sin):
    """Transformers' formula: ``x cos + rotate_half(x) sin``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def test_rotary_embeddings_of_others():
    q, k, _ = (t.detach() for t in heads_first())
    angles = torch.arange(S)[:, None] * 100.0 ** (-torch.arange(D // 2) / (D // 2))
    twice = torch.cat([angles, angles], dim=-1)
    want = [half_rotated(t, twice.cos(), twice.sin()) for t in (q, k)]
    cos, sin = twice.cos()[None], twice.sin()[None]  # [1, s, d]
    torch.testing.assert_close(
        rotary_embedding_qk(q, k, cos[0], sin[0], doubled=True, tensor_format="bhsd"), tuple(want)
    )
    cos, sin = (t.expand(B, S, D) for t in (cos, sin))
    torch.testing.assert_close(rotary_embedding_qk(q, k, cos, sin, doubled=True, tensor_format="bhsd"), tuple(want))
    out = rotary_embedding(q.transpose(1, 2), angles.cos(), angles.sin(), tensor_format="bshd")
    torch.testing.assert_close(out.transpose(1, 2), want[0])
    megatron = rotary_embedding(q.permute(2, 0, 1, 3), twice[:, None, None], doubled=True)
    torch.testing.assert_close(megatron.permute(1, 2, 0, 3), want[0])
    engine = rotary_embedding(q.transpose(1, 2), twice[:, None, None], doubled=True, tensor_format="bshd")
    torch.testing.assert_close(engine.transpose(1, 2), want[0])
    packed = rotary_embedding(q[0].transpose(0, 1), twice[:, None, None], doubled=True, cu_seqlens=torch.tensor([0, S]))
    torch.testing.assert_close(packed.transpose(0, 1), want[0][0])


def test_a_sequence_is_split_and_joined():
    tokens = torch.arange(B * S).view(B, S)
    assert torch.equal(join_sequence(split_sequence(tokens, None, dim=1), None, dim=1), tokens)
