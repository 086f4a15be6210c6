"""Attention by flash-attn-4 (CuTe), in this package's layout and with the logsumexp of each query.

The functions below its ``autograd.Function`` are called, as ``torch.nn.attention``'s FA4 does, since the backward here
takes the output and the logsumexp of all blocks. ``installed`` reads the version without importing the package, which
compiles. Source: Dao-AILab/flash-attention, ``flash_attn/cute/interface.py`` of 4.0.0b36; Zadouri et al.,
arXiv:2603.05451.
"""

import functools
import importlib
import importlib.metadata
import re
from typing import Any

import torch
from torch import Tensor

from parallel_ops.ops.attention.options import AttentionOptions

DISTRIBUTION, _INTERFACE = "flash-attn-4", "flash_attn.cute.interface"


@functools.cache
def installed() -> tuple[int, ...] | None:
    """The version, a beta's number last: (4, 0, 0, 36) for 4.0.0b36; ``None`` if it is not installed."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:4])
    return numbers if re.search(r"[a-z]", version) else (*numbers[:3], 1_000_000)  # a release is after its betas


def forward(options: AttentionOptions, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """See ``torch_kernels.forward``."""
    q, k, v = (_theirs(options, t) for t in (q, k, v))
    out, lse, *_ = _interface()._flash_attn_fwd(
        q, k, v, softcap=options.softcap or None, return_lse=True, **_keywords(options)
    )
    return _ours(options, out), lse.unsqueeze(0) if options.cu_seqlens is not None else lse


def backward(
    options: AttentionOptions, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``torch_kernels.backward``."""
    q, k, v, out, grad = (_theirs(options, t) for t in (q, k, v, out, grad))
    dq, dk, dv = _interface()._flash_attn_bwd(
        q, k, v, out, grad, lse.squeeze(0) if options.cu_seqlens is not None else lse, softcap=options.softcap,
        deterministic=torch.are_deterministic_algorithms_enabled(), **_keywords(options),
    )  # fmt: skip
    return _ours(options, dq), _ours(options, dk), _ours(options, dv)


def _keywords(options: AttentionOptions) -> dict[str, Any]:
    bounds = None if options.cu_seqlens is None else options.cu_seqlens.to(torch.int32)
    # Without the longest document, which the host does not know, it takes all tokens for the bound.
    return {
        "softmax_scale": options.softmax_scale, "causal": options.causal, "window_size_left": options.left,
        "window_size_right": options.right, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds,
    }  # fmt: skip


def _theirs(options: AttentionOptions, t: Tensor) -> Tensor:
    """``[s, b, h, d]`` as its ``[b, s, h, d]``, or ``[s, h, d]`` of documents."""
    return t.squeeze(1) if options.cu_seqlens is not None else t.transpose(0, 1)


def _ours(options: AttentionOptions, t: Tensor) -> Tensor:
    return t.unsqueeze(1) if options.cu_seqlens is not None else t.transpose(0, 1)


@functools.cache
def _interface() -> Any:
    return importlib.import_module(_INTERFACE)
