"""Why a kernel of another library cannot do a call of attention: what it refuses, and what it is known to do wrong."""

from typing import NamedTuple

import torch

from parallel_ops.ops.attention import fa4

_HALF = (torch.float16, torch.bfloat16)


class Call(NamedTuple):
    """Properties of a call that decide which kernels can compute it.

    Attributes:
        device: type of the device. capability: 90 for compute capability 9.0; 0 on CPUs.
        ranges: ``key_ranges``, which also stand for documents within them.
        shifted: queries and keys whose first tokens are not at the same place, under a causal mask.
        aligned: memory and strides of heads are multiples of 16 bytes, as torch's kernels read them.
    """

    device: str
    capability: int
    dtype: torch.dtype
    batch: int
    d: int
    d_v: int
    causal: bool
    shifted: bool = False
    window: bool = False
    documents: bool = False
    ranges: bool = False
    softcap: bool = False
    dropout: bool = False
    positive_scale: bool = True
    empty: bool = False
    aligned: bool = True


def refusal(backend: str, call: Call) -> str | None:
    """Why ``backend`` cannot do the call; ``None`` if it can."""
    on_cpu = call.device == "cpu"
    if backend == "triton":
        return "q is on a CPU" if on_cpu else None
    theirs = backend == "fa4"
    for has, what in (
        (call.softcap and not theirs, "a soft cap"),
        (call.dropout, "dropout, whose mask is this package's"),
        (call.causal and call.shifted and not theirs, "causal attention with sq different from sk"),
        (not call.causal and call.window and not theirs, "a window that is not causal"),
        (not call.causal and call.window and call.shifted, "a window on both sides with sq different from sk"),
        (call.ranges, "key_ranges"),
        (not call.positive_scale, "a scale of 0 or less"),
        (call.empty, "empty tensors"),
    ):
        if has:
            return f"it does not take {what}"
    if backend == "cudnn":
        return _cudnn_refusal(call, on_cpu)
    return _fa4_refusal(call, on_cpu) if theirs else _flash_refusal(call, on_cpu)


def _fa4_refusal(call: Call, on_cpu: bool) -> str | None:
    if fa4.installed() is None:
        return f"{fa4.DISTRIBUTION} is not installed (pip install {fa4.DISTRIBUTION})"
    if on_cpu or call.capability < 90:
        return "it needs a GPU of compute capability 9.0 or later"
    if call.documents and call.batch != 1:
        return f"it takes cu_seqlens with a batch of 1, got {call.batch}"
    fits, what = _fa4_widths(call.capability // 10, call.d, call.d_v)
    if not fits:
        return f"on compute capability {call.capability / 10} heads must have {what}, got {call.d} and {call.d_v}"
    return _halves_refusal(call)


def _fa4_widths(generation: int, d: int, d_v: int) -> tuple[bool, str]:
    if generation == 9:
        # Of other widths dq is wrong (flash-attention#2896), and narrower values do not compile (#2087).
        return d == d_v and d % 32 == 0 and d <= 256, "32, 64, ... 256 dimensions"
    if generation in (10, 11):
        # Gradients of 256 dimensions were wrong (TransformerEngine#3216, flash-attention#2541), and dv where values are
        # narrower than a tile (#2552).
        fits = (d, d_v) in ((192, 128), (128, 64)) or (d == d_v and d % 8 == 0 and d <= 128)
        return fits, "a multiple of 8 dimensions, at most 128, or 192 and 128"
    return d == d_v and d in (64, 128), "64 or 128 dimensions"  # flash-attention#2268


def _cudnn_refusal(call: Call, on_cpu: bool) -> str | None:
    if on_cpu or call.capability < 80:
        return "it needs a GPU of compute capability 8.0 or later"
    if call.window or call.documents:
        return f"it does not take {'windows' if call.window else 'cu_seqlens'}"
    return _halves_refusal(call) or _width_refusal(call, 128)


def _flash_refusal(call: Call, on_cpu: bool) -> str | None:
    if call.d != call.d_v:
        return f"it takes values as wide as keys, got {call.d_v} and {call.d}"
    if on_cpu:
        return "on CPUs it takes neither windows nor cu_seqlens" if call.window or call.documents else None
    if call.capability < 80:
        return "it needs a GPU of compute capability 8.0 or later"
    if call.documents and call.batch != 1:
        return f"it takes cu_seqlens with a batch of 1, got {call.batch}"
    # FlashAttention-2's backward of wider heads needs more shared memory than other GPUs have.
    roomy = call.capability == 80 or call.capability // 10 in (9, 10)
    return _halves_refusal(call) or _width_refusal(call, 256 if roomy else 128)


def _halves_refusal(call: Call) -> str | None:
    if call.dtype not in _HALF:
        return f"it takes float16 and bfloat16, got {call.dtype}"
    return None if call.aligned else "tensors and their strides must be multiples of 16 bytes"


def _width_refusal(call: Call, most: int) -> str | None:
    if call.d % 8 or call.d_v % 8 or max(call.d, call.d_v) > most:
        return f"heads must have a multiple of 8 dimensions, at most {most}, got {call.d} and {call.d_v}"
    return None
