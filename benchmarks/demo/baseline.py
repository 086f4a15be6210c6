"""The transformer of ``parallel_ops.models`` in plain PyTorch, as its users write it today.

    attention   F.scaled_dot_product_attention          norms   F.layer_norm, F.rms_norm
    MLP         F.gelu, F.silu                          loss    F.cross_entropy of the logits in fp32

It is what the fused model is compared with, eager and compiled whole. Parameters have the names and shapes of
``Transformer``, so state dicts of the two load into each other.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_ops.models import TransformerConfig
from parallel_ops.models.rotary_scaling import rotary_angles


def _norm(config: TransformerConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layer_norm" else nn.RMSNorm
    return kind(config.hidden_size, config.norm_eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``[b, heads, s, d]`` rotated by ``[s, d]``, the second half of a head against the first."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.d, self.dropout = config.resolved_head_dim, config.attention_dropout
        self.grouped = config.num_heads > config.resolved_num_kv_heads
        qkv_bias = config.bias if config.qkv_bias is None else config.qkv_bias
        self.q = nn.Linear(config.hidden_size, config.num_heads * self.d, qkv_bias)
        self.k, self.v = (
            nn.Linear(config.hidden_size, config.resolved_num_kv_heads * self.d, qkv_bias) for _ in range(2)
        )
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.d, config.norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )
        self.out = nn.Linear(config.num_heads * self.d, config.hidden_size, config.bias)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.d)) for f in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        if angles is not None:
            cos, sin = (a.to(q.dtype) for a in angles)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p, enable_gqa=self.grouped)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.activation = config.activation
        gated = config.activation == "swiglu"
        self.gate = nn.Linear(config.hidden_size, config.resolved_ffn_hidden_size, config.bias) if gated else None
        self.up = nn.Linear(config.hidden_size, config.resolved_ffn_hidden_size, config.bias)
        self.down = nn.Linear(config.resolved_ffn_hidden_size, config.hidden_size, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            y = F.silu(self.gate(x)) * self.up(x)
        else:
            y = F.gelu(self.up(x), approximate="none" if self.activation == "gelu_exact" else "tanh")
        out: Tensor = self.down(y)
        return out


class Layer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.norm_attention, self.attention = _norm(config), Attention(config)
        self.norm_mlp, self.mlp = _norm(config), MLP(config)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + F.dropout(self.attention(self.norm_attention(x), angles), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm_mlp(x)), self.dropout, self.training)


class PlainTransformer(nn.Module):
    """Same arguments, weights and results as ``Transformer`` on one rank.

    Raises:
        ValueError: a sliding window, which plain PyTorch has no fast attention for.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        if any(config.windows):
            raise ValueError("PlainTransformer: window must be None")
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.seq_length, config.hidden_size) if config.positions == "learned" else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = None if config.tied_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens.t())  # [b, s, h]
        angles = None
        if self.positions is not None:
            x = x + self.positions.weight[: x.shape[1]]
        else:
            cos, sin = rotary_angles(self.config, torch.arange(x.shape[1], device=x.device), x.shape[1])
            angles = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        x = F.dropout(x, self.config.dropout, self.training)
        for layer in self.layers:
            x = layer(x, angles)
        weight = self.tokens.weight if self.head is None else self.head.weight
        logits = F.linear(self.norm(x), weight)
        if targets is None:
            return logits.transpose(0, 1)
        wide = logits if logits.dtype is torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, 1), targets.t().flatten())
