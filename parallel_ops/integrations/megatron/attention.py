"""The core of attention for Megatron's layer specs."""

import copy
from typing import Any

import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from parallel_ops import ops
from parallel_ops.context_parallel import ring_attention


class CoreAttention(DotProductAttention):
    """Attention without all scores in memory, and context parallelism, which Megatron's own has with Transformer Engine
    only: ``ring_attention`` over the zigzag parts that Megatron gives its ranks.

    Masks that are given are honoured, also by causal attention, at the cost of torch's attention with a mask; so leave
    one out that says nothing else (``--no-create-attention-mask-in-dataloader``). Packed sequences (``thd``) need no
    padding between documents. Megatron's code runs for windows that reach forward, and for sinks with a mask.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        shares_sequence = config.context_parallel_size > 1
        if shares_sequence:
            config = copy.copy(config)
            config.context_parallel_size = 1  # which Megatron's core insists on, and reads for nothing else
        super().__init__(config, *args, **kwargs)
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
        window, (sq, sk) = self.scale_mask_softmax.window_size, (query.shape[0], key.shape[0])
        causal = self.attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        if window is not None:
            causal, attention_mask = True, None  # as in Megatron's softmax
        packed = packed_seq_params is not None
        covered = attention_bias is None and (not packed or _covered(packed_seq_params))
        if window is not None:
            covered = covered and window[0] >= 0 and window[1] == 0 and sq <= sk
        elif attention_mask is not None and not packed:
            covered = covered and self.softmax_offset is None
        else:
            covered = covered and (not causal or sq in (1, sk))
        if not covered or (self.cp_group is not None and (packed or attention_mask is not None)):
            if self.cp_group is not None:
                raise ValueError(
                    "CoreAttention: context parallelism takes neither attention masks nor packed sequences nor windows "
                    "that reach forward; use Transformer Engine's for those"
                )
            return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
        options: dict[str, Any] = {
            "causal": causal and (sq > 1 or self.cp_group is not None),
            # With query-key layer scaling Megatron divides by the layer's number here, and multiplies in the softmax.
            "scale": self.softmax_scale * (self.scale_mask_softmax.scale or 1.0),
            "dropout_p": self.attention_dropout.p if self.training else 0.0,
        }
        if window is not None:
            options["window"] = window[0] + 1
        if packed:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
            options["cu_seqlens"] = packed_seq_params.cu_seqlens_q
            return self._attend(query, key, value, None, **options).squeeze(1)
        return self._attend(query, key, value, attention_mask, **options)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        if options["dropout_p"] > 0.0 and not self.config.sequence_parallel:
            # Ranks hold different heads, so they draw from the generator that differs between them.
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return self._out(q, k, v, mask, options)
        return self._out(q, k, v, mask, options)

    def _out(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        if mask is not None:
            q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=~mask.bool(), dropout_p=options["dropout_p"], scale=options["scale"],
                enable_gqa=q.shape[1] != k.shape[1],
            ).permute(2, 0, 1, 3)  # fmt: skip
        elif self.cp_group is not None:
            out = ring_attention(q, k, v, group=self.cp_group, sink=self.softmax_offset, **options)
        else:
            out = ops.flash_attention(q, k, v, sink=self.softmax_offset, **options)
        return out.flatten(2)


def _covered(packed: Any) -> bool:
    """Documents that follow each other, the same of queries and keys."""
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    alike = packed.cu_seqlens_kv is None or packed.cu_seqlens_kv is packed.cu_seqlens_q
    return bool(packed.qkv_format == "thd" and alike and (padded is None or padded is packed.cu_seqlens_q))
