"""Multi-token prediction: layers behind the last that predict the tokens after the next.

    h_0   = the output of the model's last norm
    h_k,i = norm_k layer_k(W_k [norm(E[t_i+k]), norm(h_k-1,i)])        k = 1 ... D, causal
    loss  = L_0 + weight / D sum_k L_k                                 L_k: the head's, of t_i+k+1 at token i

Each L_k is a sum divided by the number of targets of L_0, T in the source. Micro-batches count by these, so they add up
to one that has all their rows. Embedding and head are the model's. Source: DeepSeek-AI, arXiv:2412.19437, section 2.2;
h_0 is normed and W reads the embedding first, as in DeepSeek's published weights and in Megatron-core's
``multi_token_prediction``.
"""

from typing import Any

import torch
from torch import Tensor

from parallel_ops.layers import Norm, ParallelTransformerLayer
from parallel_ops.layers.replicated import ReplicatedLinear
from parallel_ops.models.context import IGNORE_INDEX


class PredictionLayer(ParallelTransformerLayer):
    """Layer ``k`` of the formula; its arguments are those of ``ParallelTransformerLayer``.

    Attributes:
        norm_embedding, norm_hidden, projection: what comes before the layer. norm: the norm behind it.
    """

    def __init__(self, hidden_size: int, num_heads: int, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, **options)
        where: dict[str, Any] = {name: options.get(name) for name in ("tp_mesh", "device", "dtype")}
        where["sequence_parallel"] = options.get("sequence_parallel", False)
        norm = options.get("norm", "layer_norm"), options.get("norm_eps", 1e-5)
        self.norm_embedding, self.norm_hidden, self.norm = (Norm(hidden_size, *norm, **where) for _ in range(3))
        self.projection = ReplicatedLinear(
            2 * hidden_size, hidden_size, init_method=options.get("init_method"), **where
        )  # fmt: skip

    def forward(self, x: Tensor, *args: Any, embedding: Tensor | None = None, **options: Any) -> Tensor:
        """``h_k`` of ``h_k-1`` and the ``embedding`` of the tokens ``k`` further on, all ``[s, b, hidden_size]``."""
        assert embedding is not None
        x = self.projection(torch.cat([self.norm_embedding(embedding), self.norm_hidden(x)], dim=-1))
        out: Tensor = self.norm(super().forward(x, *args, **options))
        return out


def further(tokens: Tensor, targets: Tensor, by: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The tokens and the targets ``by`` rows further on, ``[s, b]``.

    Targets are -100 where there are none, and where a token between is of another document.
    """
    rows, by = torch.arange(tokens.shape[0], device=tokens.device), min(by, tokens.shape[0])
    after = (rows + by).clamp(max=tokens.shape[0] - 1)
    ignored = rows >= tokens.shape[0] - by
    if cu_seqlens is not None:
        document = torch.bucketize(rows, cu_seqlens.to(rows.dtype), right=True)
        ignored |= document != document[after]
    return tokens[after], targets[after].masked_fill(ignored[:, None], IGNORE_INDEX)
