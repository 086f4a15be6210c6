"""The matmuls of a training step alone: a lower bound of the step time."""

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from parallel_ops.models import TransformerConfig
from parallel_ops.train.config import Settings
from parallel_ops.train.parallelize_model import PRECISIONS
from parallel_ops.train.planner_bridge import uses_cuda


class Timed(NamedTuple):
    """A step without a model."""

    seconds: float
    loss: float = math.nan


class Products:
    """Every matmul of a step of a run, forward and backward, on matrices allocated once."""

    def __init__(self, settings: Settings) -> None:
        self.device = device = torch.device("cuda" if uses_cuda(settings) else "cpu")
        dtype = PRECISIONS[settings.plan.dtype]
        self._work = [
            ([torch.randn(count, *size, device=device).to(dtype) for size in ((m, k), (n, k), (m, n))], times)
            for count, m, n, k, times in _shapes(settings.config, settings.plan.global_batch)
        ]

    def step(self) -> Timed:
        """Computes ``x w^T`` and, for its gradients, ``dy w`` and ``dy^T x``."""
        start = time.perf_counter()
        for (x, w, dy), times in self._work:
            for _ in range(times):
                torch.bmm(x, w.transpose(1, 2))
                torch.bmm(dy, w)
                torch.bmm(dy.transpose(1, 2), x)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return Timed(time.perf_counter() - start)


def _shapes(config: TransformerConfig, sequences: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(matrices, rows, columns, inner, times) of each kind of matmul in the forward.

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
