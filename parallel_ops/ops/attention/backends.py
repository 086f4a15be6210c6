"""Which kernels compute a call of attention: this package's, torch's or flash-attn-4's.

    backend    what it is                                  calls that it takes
    triton     this package's kernels on CUDA              all
    flash      torch's flash attention: FlashAttention-2,  float16 and bfloat16; d = d_v, a multiple of 8, at most 256
               or what ``torch.nn.attention.               (128 on GPUs other than compute capability 8.0, 9.x and
               activate_flash_attention_impl`` put in      10.x); full and, with sq = sk, causal; a window; documents of
               its place. On CPUs torch's own              a batch of 1. On CPUs any dtype, full or causal
    cudnn      cuDNN's attention, as torch calls it        float16 and bfloat16; d and d_v multiples of 8, at most 128;
                                                           full and, with sq = sk, causal
    fa4        flash-attn-4, if it is installed            float16 and bfloat16; compute capability 9.0 or later; heads
               (``fa4.py``)                                as ``refusals.py`` says; any window, a soft cap; documents
                                                           of a batch of 1

Others take neither this package's dropout, whose mask does not depend on how the call is sharded, nor ``key_ranges``,
and torch's no soft cap. A sink is added to the result of any.

``auto`` takes the first row of ``allow_list.py`` that a call fits. Else it is torch's own choice for its
``scaled_dot_product_attention`` where that is flash or cuDNN, and else this package's kernels. It follows
``torch.nn.attention.sdpa_kernel``: a caller who forbids flash attention gets neither torch's nor flash-attn-4's.
FlashAttention-2 itself is not taken on GPUs of compute capability 9.x, where the Triton kernels are faster forward and
as fast backward (316 and 455, 284 and 284 TFLOP/s on an H100 at 1 x 8192 x 32 x 8 x 128, docs/performance.md). On CPUs
``auto`` is this package's kernels.

torch's backwards add to dq by atomics, in another order on each run. With ``torch.use_deterministic_algorithms(True)``
``auto`` is therefore this package's kernels, which give the same bits on every run, or flash-attn-4's deterministic
backward where a row says so.

With the logger ``parallel_ops.attention`` at level DEBUG each choice is logged.
"""

import functools
import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from parallel_ops.ops.attention import fa4
from parallel_ops.ops.attention.allow_list import CAUSAL, DOCUMENTS, FULL, WINDOW, allowed
from parallel_ops.ops.attention.options import BACKENDS, AttentionOptions
from parallel_ops.ops.attention.refusals import Call, refusal

logger = logging.getLogger("parallel_ops.attention")

_OF_TORCH = {int(SDPBackend.FLASH_ATTENTION.value): "flash", int(SDPBackend.CUDNN_ATTENTION.value): "cudnn"}


# Cache of backend choices, by call and state of torch; choosing takes the host longer than a launch. Cleared when full.
_MOST_CHOICES = 1024
_chosen: dict[tuple[object, ...], str] = {}
_priorities: Callable[[], list[int]] | None = getattr(torch._C, "_get_sdp_priority_order", None)
_enabled: tuple[Callable[[], bool], ...] = (
    torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled, torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)  # fmt: skip


def listed(call: Call, *, deterministic: bool, flash: bool) -> str | None:
    """The backend that the allow-list gives the call.

    Args:
        deterministic: whether every run must give the same bits.
        flash: whether the caller lets torch take flash attention.
    """
    if call.device != "cuda" or not flash or call.softcap:
        return None
    masks = {CAUSAL if call.causal else FULL} | {
        mask for mask, has in ((WINDOW, call.window), (DOCUMENTS, call.documents)) if has
    }
    rows = allowed(
        call.capability, (call.d, call.d_v), masks, deterministic=deterministic, version=fa4.installed()
    )  # fmt: skip
    narrowed = call.window or call.documents  # else torch chooses between its own
    fits = (b for b in rows if (b == "fa4" or narrowed) and refusal(b, call) is None)
    return next(fits, None)


def select(call: Call, preferred: str | None, *, deterministic: bool, replaced: bool) -> str:
    """The backend of ``auto`` for a call that ``listed`` does not know.

    Args:
        preferred: "flash" or "cudnn" if torch takes it for this shape without window and documents.
        deterministic: whether every run must give the same bits.
        replaced: whether another implementation than FlashAttention-2 is behind "flash".
    """
    if call.device != "cuda" or deterministic or preferred is None or not _may_be_torchs(call):
        return "triton"
    if call.window or call.documents:
        preferred = "flash"
    slow = not replaced and (call.window or call.documents or call.capability // 10 == 9)
    if preferred == "flash" and slow:
        return "triton"
    return "triton" if refusal(preferred, call) else preferred


def _may_be_torchs(call: Call) -> bool:
    return refusal("flash", call) is None or refusal("cudnn", call) is None


def resolve(options: AttentionOptions, q: Tensor, k: Tensor, v: Tensor) -> str:
    """The backend of a call; ``"triton"`` is this package's kernels, on CPUs too."""
    backend = options.backend
    if backend == "triton" or (backend == "auto" and not q.is_cuda):
        return "triton"
    log, state = logger.isEnabledFor(logging.DEBUG), _state_of_torch()
    signature: tuple[object, ...] = (
        options.cu_seqlens is None, options.key_ranges is None, options.dropout_seed is None, options[4:], state,
        *[(t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15) for t in (q, k, v)],
    )  # fmt: skip
    known = None if log or state is None else _chosen.get(signature)
    if known is not None:
        return known
    call = describe(options, q, k, v, aligned=not q.is_cuda or _aligned(q, k, v))
    if backend == "auto":
        deterministic, replaced = torch.are_deterministic_algorithms_enabled(), _replaced()
        first = listed(call, deterministic=deterministic, flash=torch._C._get_flash_sdp_enabled())
        asked = (
            first is None
            and not deterministic
            and _may_be_torchs(call)
            and (replaced or not (call.window or call.documents))
        )
        preferred = _preferred(q, k, v, options) if asked else None
        chosen = first or select(call, preferred, deterministic=deterministic, replaced=replaced)
    else:
        chosen = "triton" if refusal(backend, call) else backend
    if log:
        logger.debug("%s: %s for %s", backend, chosen, call)
    if state is not None:
        if len(_chosen) >= _MOST_CHOICES:
            _chosen.clear()
        _chosen[signature] = chosen
    return chosen


def _state_of_torch() -> tuple[object, ...] | None:
    """Settings of torch that its choice depends on; ``None`` where this torch does not say."""
    if _priorities is None:
        return None
    return (
        torch.are_deterministic_algorithms_enabled(), _replaced(), *_priorities(),
        *[enabled() for enabled in _enabled],
    )  # fmt: skip


def check_backend(op: str, options: AttentionOptions, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ``ValueError`` unless the backend can do the call, as far as shapes and options say."""
    backend = options.backend
    if backend == "auto" or (backend == "triton" and q.is_cuda):
        return
    if backend not in BACKENDS:
        raise ValueError(f"{op}: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    # Calls without elements are left to this package's kernels.
    call = describe(options, q, k, v)
    why = refusal(backend, call._replace(empty=False))
    varies = backend == "cudnn" or (backend == "fa4" and call.capability // 10 == 12)
    if why is None and varies and torch.are_deterministic_algorithms_enabled():
        why = "its backward is not deterministic, which torch.use_deterministic_algorithms asks for"
    if why is not None:
        raise ValueError(f"{op}: backend={backend!r} cannot do this call: {why}; use 'auto'")


def describe(options: AttentionOptions, q: Tensor, k: Tensor, v: Tensor, *, aligned: bool = True) -> Call:
    (sq, b, _, d), sk, o = q.shape, k.shape[0], options
    window = (not o.causal and o.right is not None) or (o.left is not None and o.left + 1 < sk)
    return Call(
        "cuda" if q.is_cuda else q.device.type, _capability(q), q.dtype, b, d, v.shape[3], o.causal, sq != sk,
        window, o.cu_seqlens is not None, o.key_ranges is not None, o.softcap > 0.0, o.dropout_seed is not None,
        o.softmax_scale > 0.0, 0 in q.shape or sk == 0, aligned,
    )  # fmt: skip


def _capability(q: Tensor) -> int:
    return _of_device(q.device) if q.is_cuda else 0


@functools.cache
def _of_device(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _aligned(*tensors: Tensor) -> bool:
    """Whether memory and strides of tensors with adjacent elements of a head are multiples of 16 bytes."""
    return all(
        math.gcd(*(t.stride(i) for i in range(3) if t.shape[i] > 1)) * t.element_size() % 16 == 0
        and t.data_ptr() % 16 == 0
        for t in tensors
    )


def _preferred(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str | None:
    """The choice of torch's ``scaled_dot_product_attention``, which knows versions, GPUs and what is enabled."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    causal, scale = options.causal and q.shape[2] == k.shape[2], options.softmax_scale
    grouped = q.shape[1] != k.shape[1]
    try:
        return _OF_TORCH.get(torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped))
    except RuntimeError:  # no kernel that ``sdpa_kernel`` allows can do the call
        return None


def _replaced() -> bool:
    """Whether ``activate_flash_attention_impl`` put another implementation behind torch's flash attention."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current is not None and current() not in (None, "FA2")
