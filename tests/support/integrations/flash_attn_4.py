"""A stand-in of ``flash_attn.cute.interface``, flash-attn-4 4.0.0b36, on CPUs in fp32.

Its asserts are those of the real functions, its parameters are compared with the real source
(``tests/ops/attention/test_allow_list.py``). Rows of no document are left as they were, NaN here. A tensor whose
elements of a head are not adjacent is copied there, and would be misread here: so it raises.
"""

import torch


def _visible(sq, sk, causal, left, right):
    """Aligned at the last query and the last key."""
    right = 0 if causal else right
    apart = torch.arange(sk) - torch.arange(sq)[:, None] - (sk - sq)
    here = torch.ones(sq, sk, dtype=torch.bool)
    here = here if left is None else here & (apart >= -left)
    return here if right is None else here & (apart <= right)


def _check(q, k, v, cu_seqlens):
    assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype, "inputs must be half"
    assert all(t.stride(-1) == 1 for t in (q, k, v))
    assert q.shape[-2] % k.shape[-2] == 0, "num_head must be divisible by num_head_kv"
    for bounds in cu_seqlens:
        if bounds is not None:
            assert bounds.dtype == torch.int32, "cu_seqlens_q, cu_seqlens_k must be int32"
            assert bounds.stride(0) == 1
    assert q.dim() == (4 if cu_seqlens[0] is None else 3)


def _documents(q, k, cu_q, cu_k):
    """Slices of batch, queries and keys."""
    if cu_q is None:
        return [(b, slice(None), slice(None)) for b in range(q.shape[0])]
    spans = [zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True) for cu in (cu_q, cu_k)]
    return [(None, slice(*a), slice(*b)) for a, b in zip(*spans, strict=True)]


def _scores(q, k, scale, softcap, here):
    heads = q.shape[1]
    k = k.float().repeat_interleave(heads // k.shape[1], 1)
    raw = torch.einsum("ihd,jhd->hij", q.float(), k) * scale
    s = softcap * torch.tanh(raw / softcap) if softcap else raw
    slope = 1 - (s / softcap) ** 2 if softcap else torch.ones_like(s)
    return s.masked_fill(~here, -torch.inf), slope, k


def _flash_attn_fwd(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, softmax_scale=None, causal=False, softcap=None,
    window_size_left=None, window_size_right=None, return_lse=False,
):  # fmt: skip
    _check(q, k, v, (cu_seqlens_q, cu_seqlens_k))
    assert return_lse
    out = q.new_full((*q.shape[:-1], v.shape[-1]), torch.nan)
    heads = q.shape[-2]
    shape = (q.shape[0], heads, q.shape[1]) if cu_seqlens_q is None else (heads, q.shape[0])
    lse = torch.full(shape, torch.nan)
    for b, i, j in _documents(q, k, cu_seqlens_q, cu_seqlens_k):
        q_b, k_b, v_b, out_b, lse_b = (t if b is None else t[b] for t in (q, k, v, out, lse))
        here = _visible(q_b[i].shape[0], k_b[j].shape[0], causal, window_size_left, window_size_right)
        s, *_ = _scores(q_b[i], k_b[j], softmax_scale, softcap, here)
        lse_b[:, i] = torch.logsumexp(s, -1)
        p = torch.exp(s - lse_b[:, i, None]).nan_to_num(0.0)
        values = v_b[j].float().repeat_interleave(heads // v.shape[-2], 1)
        out_b[i] = torch.einsum("hij,jhd->ihd", p, values).to(q.dtype)
    return out, lse, None, None, None


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, deterministic=False,
):  # fmt: skip
    _check(q, k, v, (cu_seqlens_q, cu_seqlens_k))
    assert out.dtype == dout.dtype == q.dtype and out.shape == dout.shape == (*q.shape[:-1], v.shape[-1])
    heads = q.shape[-2]
    assert lse.dtype == torch.float32, "lse must be float32"
    assert lse.shape == ((q.shape[0], heads, q.shape[1]) if cu_seqlens_q is None else (heads, q.shape[0]))
    gradients = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    for b, i, j in _documents(q, k, cu_seqlens_q, cu_seqlens_k):
        q_b, k_b, v_b, out_b, dout_b, lse_b, dq_b, dk_b, dv_b = (
            t if b is None else t[b] for t in (q, k, v, out, dout, lse, *gradients)
        )
        here = _visible(q_b[i].shape[0], k_b[j].shape[0], causal, window_size_left, window_size_right)
        s, slope, wide = _scores(q_b[i], k_b[j], softmax_scale, softcap, here)
        p = torch.exp(s - lse_b[:, i, None]).nan_to_num(0.0)
        group = heads // k.shape[-2]
        values, g = v_b[j].float().repeat_interleave(group, 1), dout_b[i].float()
        delta = (g * out_b[i].float()).sum(-1).T[..., None]
        ds = p * (torch.einsum("ihd,jhd->hij", g, values) - delta) * slope * softmax_scale
        dq_b[i] = torch.einsum("hij,jhd->ihd", ds, wide).to(q.dtype)
        of_k = torch.einsum("hij,ihd->jhd", ds, q_b[i].float())
        of_v = torch.einsum("hij,ihd->jhd", p, g)
        dk_b[j] = of_k.unflatten(1, (-1, group)).sum(2).to(q.dtype)
        dv_b[j] = of_v.unflatten(1, (-1, group)).sum(2).to(q.dtype)
    return tuple(gradients)
