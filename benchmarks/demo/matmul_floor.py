"""The matrix products of a training step alone: a lower bound of the step time."""

import time
from collections.abc import Iterator

import torch

from parallel_ops.models import TransformerConfig


class Products:
    """Every matrix product of a step, forward and backward, on matrices allocated once.

    Args:
        config: The model. sequences: Sequences in a step. dtype: Dtype of the products.
    """

    def __init__(self, config: TransformerConfig, sequences: int, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self._work = [
            (
                torch.randn(count, m, k, device=device).to(dtype),
                torch.randn(count, n, k, device=device).to(dtype),
                torch.randn(count, m, n, device=device).to(dtype),
                times,
            )
            for count, m, n, k, times in _shapes(config, sequences)
        ]

    def seconds(self) -> float:
        """Computes ``x w^T`` and, for its gradients, ``dy w`` and ``dy^T x``; returns the time."""
        start = time.perf_counter()
        for x, w, dy, times in self._work:
            for _ in range(times):
                torch.bmm(x, w.transpose(1, 2))
                torch.bmm(dy, w)
                torch.bmm(dy.transpose(1, 2), x)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start


def _shapes(config: TransformerConfig, sequences: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(matrices, rows, columns, inner, times) of each kind of product in the forward.

    Causal attention needs half of the scores: half of the queries are counted, with all keys.
    """
    tokens, d, s = sequences * config.seq_length, config.resolved_head_dim, config.seq_length
    wide = (config.num_heads + 2 * config.resolved_num_kv_heads) * d
    parts = 2 if config.activation == "swiglu" else 1
    yield 1, tokens, wide, config.hidden_size, config.num_layers
    yield 1, tokens, config.hidden_size, config.num_heads * d, config.num_layers
    yield 1, tokens, parts * config.resolved_ffn_hidden_size, config.hidden_size, config.num_layers
    yield 1, tokens, config.hidden_size, config.resolved_ffn_hidden_size, config.num_layers
    yield 1, tokens, config.vocab_size, config.hidden_size, 1
    yield sequences * config.num_heads, max(1, s // 2), s, d, config.num_layers  # q k^T
    yield sequences * config.num_heads, max(1, s // 2), d, s, config.num_layers  # of the probabilities and v
