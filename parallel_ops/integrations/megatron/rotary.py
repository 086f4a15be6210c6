"""Megatron-core's rotary positions by this package's op; ``functions.py`` says what ``original`` and ``exact`` are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from parallel_ops import ops

Function = Callable[..., Any]


class _Angles:
    """Cosines and sines of Megatron's tables of angles, which have each angle twice.

    A table is made once for a sequence length and given to every layer of every step, so what was computed of it is
    kept as long as it lives, together with the answer whether its two halves are the same, which waits for the GPU.
    """

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def of(self, freqs: Tensor, interleaved: bool, mscale: float) -> tuple[Tensor, Tensor] | None:
        """``[s, b, R / 2]`` or ``[s, R / 2]`` each, in fp32; ``None`` where the halves differ."""
        kept = self._known.setdefault(freqs, {})
        key = (interleaved, mscale, 0 if freqs.is_inference() else freqs._version)
        if key not in kept:
            if freqs.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            kept[key] = self._computed(freqs, interleaved, mscale)
        return kept[key]

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
    """The rotated heads; ``None`` where the op cannot do it. ``split_pairs``: pairs lie side by side and go apart."""
    if freqs.dim() != 4 or freqs.shape[2] != 1 or freqs.shape[-1] % 2 or freqs.requires_grad:
        return None
    if torch.compiler.is_compiling() or not t.is_floating_point():
        return None
    angles = _angles.of(freqs, interleaved, mscale)
    if angles is None:
        return None
    cos, sin = (a.to(t.dtype) for a in angles) if exact else angles
    if cos.dim() == 3 and cos.shape[:2] != t.shape[:2]:
        return None
    if split_pairs:
        pairs, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
        t = torch.cat((pairs[..., ::2], pairs[..., 1::2], rest), dim=-1)
    return ops.rotary_embedding(t, cos, sin, interleaved=interleaved, **sequences)


# Of which a version has one or both.
_SPLIT_PAIRS = ("multi_latent_attention", "mla_rotary_interleaved")
_ROTARY_OPTIONS = {*_SPLIT_PAIRS, "mscale"}


def rotary(original: Function, exact: bool) -> Function:
    """Angles are used in fp32 (rounded to the dtype of the heads in the original)."""

    def _apply_rotary_pos_emb_bshd(
        t: Tensor, freqs: Tensor, rotary_interleaved: bool = False, *args: Any, **options: Any
    ) -> Tensor:
        out = None
        if not args and options.keys() <= _ROTARY_OPTIONS and t.dim() == 4 and t.shape[0] == freqs.shape[0]:
            split_pairs = any(options.get(name) for name in _SPLIT_PAIRS)
            out = _rotated(t, freqs, rotary_interleaved, split_pairs, options.get("mscale", 1.0), exact)
        return original(t, freqs, rotary_interleaved, *args, **options) if out is None else out

    return _apply_rotary_pos_emb_bshd


def packed_rotary(original: Function, exact: bool) -> Function:
    """The same of packed sequences, without a copy of their angles and without waiting for the GPU."""

    def _apply_rotary_pos_emb_thd(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, rotary_interleaved: bool = False, *args: Any, **options: Any
    ) -> Tensor:
        cp_group = options.get("cp_group")
        out = None
        if not args and options.keys() <= {*_ROTARY_OPTIONS, "cp_group"} and cp_group is not None:
            split_pairs = any(options.get(name) for name in _SPLIT_PAIRS)
            if cp_group.size() == 1 and t.dim() == 3 and freqs.dim() == 4 and freqs.shape[1] == 1:
                # A table as long as all sequences together has the angles of each token in its place.
                sequences = {} if freqs.shape[0] == t.shape[0] else {"cu_seqlens": cu_seqlens}
                out = _rotated(
                    t, freqs, rotary_interleaved, split_pairs, options.get("mscale", 1.0), exact, **sequences
                )
        return original(t, cu_seqlens, freqs, rotary_interleaved, *args, **options) if out is None else out

    return _apply_rotary_pos_emb_thd
