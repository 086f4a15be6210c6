"""Core attention: a replacement of Megatron's own, and a module for layer specs, which supports context parallelism."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from parallel_ops import ops
from parallel_ops.context_parallel import ring_attention

Function = Callable[..., Any]


def core_attention(original: Function, exact: bool) -> Function:
    """``DotProductAttention.forward`` without all scores in memory; see ``functions`` for the arguments."""

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        out = None
        # Megatron's dropout draws torch's masks, and its rows without a visible key are uniform.
        if not (exact and (attention_mask is not None or _dropout_p(self) > 0.0)):
            out = _attend(self, query, key, value, attention_mask, attention_bias, packed_seq_params)
        if out is not None:
            return out
        return original(self, query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)

    return forward


class CoreAttention(DotProductAttention):
    """Attention without all scores in memory, and with context parallelism (``ring_attention`` over Megatron's zigzag
    split), which Megatron supports only with Transformer Engine.

    A given mask is applied, also by causal attention, at the cost of all scores in memory (on GPUs: of torch's
    attention with a mask). So leave out a mask that is only causal (``--no-create-attention-mask-in-dataloader``).
    Windows that reach forward cost the same. Packed sequences (``thd``) need no padding between documents.
    """

    def __init__(
        self, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        shares_sequence = config.context_parallel_size > 1
        if shares_sequence:
            config = copy.copy(config)
            config.context_parallel_size = 1  # required by Megatron's class, which reads it for nothing else
        super().__init__(config, *args, **kwargs)
        if v_channels is not None:  # latent attention gives the widths of heads, which Megatron's class does not take
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        self.cp_group = None
        if shares_sequence:
            shared = getattr(kwargs.get("pg_collection"), "cp", None)
            self.cp_group = parallel_state.get_context_parallel_group() if shared is None else shared

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """``[sq, b, np, d]`` and ``[sk, b, ng, d]`` to ``[sq, b, np d]``; packed ``[t, np, d]`` to ``[t, np d]``."""
        out = _attend(self, query, key, value, attention_mask, attention_bias, packed_seq_params, self.cp_group)
        if out is not None:
            return out
        if self.cp_group is not None:
            raise ValueError(
                "CoreAttention: context parallelism takes neither attention masks nor packed sequences nor windows "
                "that reach forward; use Transformer Engine's for those"
            )
        return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)


def _attend(
    core: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, packed: Any,
    cp_group: Any = None,
) -> Tensor | None:  # fmt: skip
    """``None`` if Megatron's own code must run: attention biases, some layouts of packed sequences."""
    window, (sq, sk) = core.scale_mask_softmax.window_size, (q.shape[0], k.shape[0])
    causal = core.attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
    if bias is not None or (packed is not None and not _covered(packed)):
        return None
    if window is not None:
        causal = True  # as in Megatron's softmax
        if min(window) < 0 or sq > sk:
            return None
    elif mask is None and causal and sq not in (1, sk):
        return None
    ahead = window is not None and window[1] > 0
    if (ahead and packed is not None) or (cp_group is not None and (packed is not None or mask is not None or ahead)):
        return None
    # With query-key layer scaling Megatron divides by the layer's number here, and multiplies in the softmax.
    scale = core.softmax_scale * (core.scale_mask_softmax.scale or 1.0)
    if (mask is not None and packed is None) or ahead:
        return _with_mask(core, q, k, v, mask, window, scale)
    options: dict[str, Any] = {
        "causal": causal and (sq > 1 or cp_group is not None),
        "softmax_scale": scale,
        "dropout_p": _dropout_p(core),
        "sink": core.softmax_offset,
    }
    if window is not None:
        options["window_size"] = window[0], 0
    if packed is not None:
        q, k, v = (t.unsqueeze(1) for t in (q, k, v))
        options["cu_seqlens"] = packed.cu_seqlens_q
    if cp_group is not None:
        out = _with_rank_generator(core, lambda: ring_attention(q, k, v, group=cp_group, **options))
    else:
        out = _with_rank_generator(core, lambda: ops.flash_attention(q, k, v, **options))
    return out.flatten(2) if packed is None else out.flatten(2).squeeze(1)


def _with_mask(
    core: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: tuple[int, int] | None, scale: float
) -> Tensor:
    """Attention under any mask, or a window that reaches forward.

    On a GPU a mask is applied by torch's attention, which keeps no scores; on a CPU that is slower.
    """
    p, sink, (sq, b, heads, _) = _dropout_p(core), core.softmax_offset, q.shape
    if q.is_cuda and mask is not None and window is None and sink is None:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        return _with_rank_generator(
            core,
            lambda: F.scaled_dot_product_attention(
                q, k, v, attn_mask=~mask.bool(), dropout_p=p, scale=scale, enable_gqa=k.shape[1] != heads
            ),
        ).permute(2, 0, 1, 3).flatten(2)  # fmt: skip
    if q.dtype is torch.float16:  # the product could overflow
        q, scale = q * scale, 1.0
    k, v = (t if t.shape[2] == heads else t.repeat_interleave(heads // t.shape[2], dim=2) for t in (k, v))
    q, k, v = (t.reshape(t.shape[0], b * heads, -1).transpose(0, 1) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(b, heads, sq, -1)
    probs = ops.scaled_masked_softmax(scores, mask, scale, window=window, sink=sink)
    if p > 0.0:
        probs = _with_rank_generator(core, lambda: ops.bias_dropout_add(probs, None, None, p))
    out = torch.bmm(probs.flatten(0, 1), v)
    return out.view(b, heads, sq, -1).permute(2, 0, 1, 3).flatten(2)


def _dropout_p(core: Any) -> float:
    return core.attention_dropout.p if core.training else 0.0


def _with_rank_generator(core: Any, attention: Callable[[], Tensor]) -> Tensor:
    """Runs ``attention`` with the generator that differs between ranks, since they hold different heads."""
    if _dropout_p(core) == 0.0 or core.config.sequence_parallel:
        return attention()
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return attention()


def _covered(packed: Any) -> bool:
    """Whether documents are adjacent, and the same for queries and keys."""
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    alike = packed.cu_seqlens_kv is None or packed.cu_seqlens_kv is packed.cu_seqlens_q
    return bool(packed.qkv_format == "thd" and alike and (padded is None or padded is packed.cu_seqlens_q))
