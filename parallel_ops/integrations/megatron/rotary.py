"""Replacements of Megatron-core's rotary positions; ``original`` and ``exact`` are explained in ``functions.py``."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from parallel_ops import ops
from parallel_ops.integrations.megatron._options import given
from parallel_ops.integrations.megatron.functions import Function


class _Angles:
    """Cosines and sines of Megatron's tables of angles, which have each angle twice.

    Megatron makes a table once for a sequence length and passes it to every layer of every step. So its cosines and
    sines are cached as long as the table lives, with the check that its two halves are equal, which synchronises with
    the GPU.
    """

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def get(self, freqs: Tensor, interleaved: bool, mscale: float) -> tuple[Tensor, Tensor] | None:
        """``[s, b, R / 2]`` or ``[s, R / 2]`` each, in fp32; ``None`` if the halves differ."""
        cached = self._known.setdefault(freqs, {})
        key = (interleaved, mscale, 0 if freqs.is_inference() else freqs._version)
        if key not in cached:
            if freqs.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            cached[key] = self._computed(freqs, interleaved, mscale)
        return cached[key]

    @staticmethod
    def _computed(freqs: Tensor, interleaved: bool, mscale: float) -> tuple[Tensor, Tensor] | None:
        once, again = (freqs[..., ::2], freqs[..., 1::2]) if interleaved else freqs.chunk(2, dim=-1)
        if not torch.equal(once, again):
            return None
        once = once.squeeze(2).detach().float()
        once = once.squeeze(1) if once.shape[1] == 1 else once
        return torch.cos(once) * mscale, torch.sin(once) * mscale


_angles = _Angles()


def _rotated(
    t: Tensor, freqs: Tensor, interleaved: bool, split_pairs: bool, mscale: float, exact: bool, **sequences: Any
) -> Tensor | None:
    """The rotated heads; ``None`` if the op does not support the call. ``split_pairs``: pairs are adjacent in ``t`` and
    are moved half a head apart."""
    if freqs.dim() != 4 or freqs.shape[2] != 1 or freqs.shape[-1] % 2 or freqs.requires_grad:
        return None
    if torch.compiler.is_compiling() or not t.is_floating_point():
        return None
    angles = _angles.get(freqs, interleaved, mscale)
    if angles is None:
        return None
    cos, sin = (a.to(t.dtype) for a in angles) if exact else angles
    if cos.dim() == 3 and cos.shape[:2] != t.shape[:2]:
        return None
    if split_pairs:
        pairs, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
        t = torch.cat((pairs[..., ::2], pairs[..., 1::2], rest), dim=-1)
    return ops.rotary_embedding(t, cos, sin, interleaved=interleaved, **sequences)


# A version has one or both of these.
_SPLIT_PAIRS = ("multi_latent_attention", "mla_rotary_interleaved")
_ROTARY_OPTIONS = {*_SPLIT_PAIRS, "mscale"}
# The last saves Megatron's own function a synchronisation.
_PACKED_OPTIONS = {*_ROTARY_OPTIONS, "cp_group", "max_seqlen"}


def rotary(original: Function, exact: bool) -> Function:
    """Rotation with fp32 angles (the original rounds them to the dtype of the heads)."""

    def _apply_rotary_pos_emb_bshd(
        t: Tensor, freqs: Tensor, rotary_interleaved: bool = False, *args: Any, **options: Any
    ) -> Tensor:
        out = None
        if not args and not given(options, _ROTARY_OPTIONS) and t.dim() == 4 and t.shape[0] == freqs.shape[0]:
            split_pairs = any(options.get(name) for name in _SPLIT_PAIRS)
            out = _rotated(t, freqs, rotary_interleaved, split_pairs, options.get("mscale", 1.0), exact)
        return original(t, freqs, rotary_interleaved, *args, **options) if out is None else out

    return _apply_rotary_pos_emb_bshd


def packed_rotary(original: Function, exact: bool) -> Function:
    """``rotary`` for packed sequences, without a copy of their angles or a synchronisation with the GPU."""

    def _apply_rotary_pos_emb_thd(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, rotary_interleaved: bool = False, *args: Any, **options: Any
    ) -> Tensor:
        cp_group = options.get("cp_group")
        out = None
        if not args and not given(options, _PACKED_OPTIONS) and cp_group is not None:
            split_pairs = any(options.get(name) for name in _SPLIT_PAIRS)
            if cp_group.size() == 1 and t.dim() == 3 and freqs.dim() == 4 and freqs.shape[1] == 1:
                # A table as long as all sequences together has one row for each token.
                sequences = {} if freqs.shape[0] == t.shape[0] else {"cu_seqlens": cu_seqlens}
                out = _rotated(
                    t, freqs, rotary_interleaved, split_pairs, options.get("mscale", 1.0), exact, **sequences
                )
        return original(t, cu_seqlens, freqs, rotary_interleaved, *args, **options) if out is None else out

    return _apply_rotary_pos_emb_thd
