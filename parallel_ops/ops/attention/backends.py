"""Which kernels compute a call of attention: this package's or torch's.

    backend    what it is                                  calls that it takes
    triton     this package's kernels on CUDA              all
    flash      torch's flash attention: FlashAttention-2,  float16 and bfloat16; d = d_v, a multiple of 8, at most 256
               or what ``torch.nn.attention.               (128 on GPUs other than compute capability 8.0, 9.x and
               activate_flash_attention_impl`` put in      10.x); full and, with sq = sk, causal; a window; documents of
               its place. On CPUs torch's own              a batch of 1. On CPUs any dtype, full or causal
    cudnn      cuDNN's attention, as torch calls it        float16 and bfloat16; d and d_v multiples of 8, at most 128;
                                                           full and, with sq = sk, causal

None of torch's takes a soft cap or this package's dropout, whose mask does not depend on how the call is sharded. A
sink is added to the result of any.

``auto`` is torch's own choice for its ``scaled_dot_product_attention`` where that is one of the two, and else this
package's kernels. So it follows ``torch.nn.attention.sdpa_kernel`` too. FlashAttention-2 itself is not taken on GPUs of
compute capability 9.x, where the Triton kernels are faster forward and as fast backward (316 and 455, 284 and 284
TFLOP/s on an H100 at 1 x 8192 x 32 x 8 x 128, docs/performance.md), and nowhere for windows and documents. On CPUs
``auto`` is this package's kernels.

torch's backwards add to dq by atomics, in another order on each run. With ``torch.use_deterministic_algorithms(True)``
``auto`` is therefore this package's kernels alone, which give the same bits on every run.

With the logger ``parallel_ops.attention`` at level DEBUG each choice is logged.
"""

import functools
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from parallel_ops.ops.attention.options import BACKENDS, AttentionOptions

logger = logging.getLogger("parallel_ops.attention")

_HALF = (torch.float16, torch.bfloat16)
_OF_TORCH = {int(SDPBackend.FLASH_ATTENTION.value): "flash", int(SDPBackend.CUDNN_ATTENTION.value): "cudnn"}


# Cache of backend choices, by call and state of torch; choosing takes the host longer than a launch. Cleared when full.
_MOST_CHOICES = 1024
_chosen: dict[tuple[object, ...], str] = {}
_priorities: Callable[[], list[int]] | None = getattr(torch._C, "_get_sdp_priority_order", None)
_enabled: tuple[Callable[[], bool], ...] = (
    torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled, torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)  # fmt: skip


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
    for has, what in (
        (call.softcap, "a soft cap"),
        (call.dropout, "dropout, whose mask is this package's"),
        (call.causal and call.shifted, "causal attention with sq different from sk"),
        (not call.causal and call.window, "a window that is not causal"),
        (call.ranges, "key_ranges"),
        (not call.positive_scale, "a scale of 0 or less"),
        (call.empty, "empty tensors"),
    ):
        if has:
            return f"it does not take {what}"
    if backend == "cudnn":
        return _cudnn_refusal(call, on_cpu)
    return _flash_refusal(call, on_cpu)


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


def select(call: Call, preferred: str | None, *, deterministic: bool, replaced: bool) -> str:
    """The backend of ``auto``.

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
        asked = not deterministic and _may_be_torchs(call) and (replaced or not (call.window or call.documents))
        preferred = _preferred(q, k, v, options) if asked else None
        chosen = select(call, preferred, deterministic=deterministic, replaced=replaced)
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
    why = refusal(backend, describe(options, q, k, v)._replace(empty=False))
    if why is None and backend == "cudnn" and torch.are_deterministic_algorithms_enabled():
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
