"""A GPT as Megatron-LM lays it out: activations ``[s, b, h]``, norm first.

    x  = E[token] (+ P[position], learned)
    x  = dropout(W_o attention(norm_1(x)) + b_o) + x        for each layer
    x  = dropout(W_2 act(W_1 norm_2(x) + b_1) + b_2) + x
    loss = cross entropy of W_v norm_f(x)                   W_v = E when the embeddings are tied

    attention: softmax(q k^T / sqrt(d), causal) v           scores [b, np, s, s], kept for backward
               q and k rotated by their positions first, where these are not learned

Biases that an elementwise op follows are not added by the matrix product: ``W_1`` hands its bias to bias-GeLU (or
bias-SwiGLU), ``W_o`` and ``W_2`` theirs to bias-dropout-add. There is no dropout on attention probabilities. The loss
takes the last linear with it, so that a fused one never holds the logits.
Sources: Radford et al. 2019 (GPT-2, the initialisation), Shoeybi et al., arXiv:1909.08053 (the layout), Su et al.,
arXiv:2104.09864 (rotary positions).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_ops.layers import ColumnParallelLinear
from parallel_ops.models.ops import FUSED, Ops


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of a GPT.

    Attributes:
        vocab_size, seq_length, layers, hidden, heads: positive; ``hidden`` divides evenly by ``heads``.
        ffn_hidden: width of the MLP after its activation; ``None`` for ``4 * hidden``.
        dropout: probability, on the embeddings and on each output projection; ``0 <= dropout < 1``.
        activation: ``"gelu"`` (tanh approximation) or ``"swiglu"`` (whose first projection is twice as wide).
        positions: ``"learned"`` (an embedding) or ``"rotary"`` (half-rotated, over the whole head, whose size is
            even).
        norm: ``"layer_norm"`` or ``"rms_norm"`` (which has no bias).
        rotary_base: the wavelength of the slowest rotary pair, in 2 pi positions.
        tied_embeddings: the output layer shares the token embedding's weight.
        init_std: standard deviation of the initial weights; output projections take ``init_std / sqrt(2 layers)``.

    Raises:
        ValueError: naming the field that is wrong.
    """

    vocab_size: int
    seq_length: int
    layers: int
    hidden: int
    heads: int
    ffn_hidden: int | None = None
    dropout: float = 0.0
    activation: str = "gelu"
    positions: str = "learned"
    norm: str = "layer_norm"
    rotary_base: float = 10_000.0
    tied_embeddings: bool = True
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "seq_length", "layers", "hidden", "heads", "ffn_hidden"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"GPTConfig: {name} must be at least 1, got {value}")
        if self.hidden % self.heads:
            raise ValueError(f"GPTConfig: hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"GPTConfig: dropout must be at least 0 and below 1, got {self.dropout}")
        for name, first, second in (
            ("activation", "gelu", "swiglu"),
            ("positions", "learned", "rotary"),
            ("norm", "layer_norm", "rms_norm"),
        ):
            if getattr(self, name) not in (first, second):
                raise ValueError(f"GPTConfig: {name} must be {first!r} or {second!r}, got {getattr(self, name)!r}")
        if self.positions == "rotary" and self.hidden // self.heads % 2:
            raise ValueError(f"GPTConfig: rotary positions need an even head size, got {self.hidden // self.heads}")
        if not self.rotary_base > 0:
            raise ValueError(f"GPTConfig: rotary_base must be positive, got {self.rotary_base}")

    @property
    def ffn_width(self) -> int:
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden


class Norm(nn.Module):
    """Layer norm or RMS norm of the last dimension; ones and zeros at first."""

    def __init__(self, config: GPTConfig, ops: Ops) -> None:
        super().__init__()
        self.eps, self.ops = config.norm_eps, ops
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.bias = nn.Parameter(torch.zeros(config.hidden)) if config.norm == "layer_norm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return self.ops.rms_norm(x, self.weight, self.eps)
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


def rotary_angles(length: int, size: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 to ``length - 1`` for heads of ``size``, ``[length, size / 2]`` each, fp32."""
    wavelengths = base ** (torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] / wavelengths
    return angles.cos(), angles.sin()


def check_tokens(config: GPTConfig, tokens: Tensor, targets: Tensor | None) -> None:
    """ValueError for tokens or targets that a GPT of this shape cannot take."""
    if tokens.dim() != 2 or not 1 <= tokens.shape[0] <= config.seq_length:
        raise ValueError(
            f"GPT: tokens must have shape [s, b] with s from 1 to {config.seq_length}, got {list(tokens.shape)}"
        )
    if targets is not None and targets.shape != tokens.shape:
        raise ValueError(f"GPT: targets must have shape {list(tokens.shape)}, got {list(targets.shape)}")


class SelfAttention(nn.Module):
    """Causal multi-head attention, ``[s, b, h] -> [s, b, h]``, without the output projection's bias, returned apart."""

    def __init__(self, config: GPTConfig, ops: Ops) -> None:
        super().__init__()
        self.heads, self.ops = config.heads, ops
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        s, b, h = x.shape
        d = h // self.heads
        # [s, b, 3h] -> three of [s, b, np, d], all views.
        q, k, v = self.qkv(x).view(s, b, self.heads, 3 * d).split(d, dim=-1)
        if angles is not None:
            q, k = self.ops.rotary_embedding(q, *angles), self.ops.rotary_embedding(k, *angles)
        q, k, v = (t.view(s, b * self.heads, d).transpose(0, 1) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)).view(b, self.heads, s, s)
        weights = self.ops.scaled_causal_softmax(scores, 1 / math.sqrt(d))
        context = torch.bmm(weights.view(b * self.heads, s, s).to(v.dtype), v)
        return F.linear(context.transpose(0, 1).reshape(s, b, h), self.out.weight), self.out.bias


class MLP(nn.Module):
    """Two projections around an activation, ``[s, b, h] -> [s, b, h]``; the second one's bias is returned apart."""

    def __init__(self, config: GPTConfig, ops: Ops) -> None:
        super().__init__()
        gated = config.activation == "swiglu"
        self.activation = ops.bias_swiglu if gated else ops.bias_gelu
        parts = 2 if gated else 1
        # On one rank a plain linear, but the state dict has the halves of a gated one apart, as on several ranks.
        self.up = ColumnParallelLinear(config.hidden, parts * config.ffn_width, group=None, parts=parts)
        self.out = nn.Linear(config.ffn_width, config.hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert self.up.bias is not None
        y = self.activation(F.linear(x, self.up.weight), self.up.bias)
        return F.linear(y, self.out.weight), self.out.bias


class Layer(nn.Module):
    """One transformer layer, ``[s, b, h] -> [s, b, h]``."""

    def __init__(self, config: GPTConfig, ops: Ops) -> None:
        super().__init__()
        self.dropout, self.ops = config.dropout, ops
        self.norm_attention = Norm(config, ops)
        self.attention = SelfAttention(config, ops)
        self.norm_mlp = Norm(config, ops)
        self.mlp = MLP(config, ops)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        y, bias = self.attention(self.norm_attention(x), angles)
        x = self.ops.bias_dropout_add(y, bias, x, self.dropout, training=self.training)
        y, bias = self.mlp(self.norm_mlp(x))
        return self.ops.bias_dropout_add(y, bias, x, self.dropout, training=self.training)


class GPT(nn.Module):
    """A GPT that calls the ops it is given.

    Args:
        config: its shape.
        ops: ``FUSED`` (this package's) or ``PLAIN`` (PyTorch composites). The parameters do not depend on it: the same
            ``torch.manual_seed`` gives the same weights, and state dicts are interchangeable.

    Runs in the dtype of its parameters, or in fp32 parameters under ``torch.autocast``.
    """

    def __init__(self, config: GPTConfig, ops: Ops = FUSED) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.tokens = nn.Embedding(config.vocab_size, config.hidden)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.seq_length, config.hidden) if learned else None
        self.layers = nn.ModuleList(Layer(config, ops) for _ in range(config.layers))
        self.norm = Norm(config, ops)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self.reset_parameters()
        if config.tied_embeddings:
            self.head.weight = self.tokens.weight

    def reset_parameters(self) -> None:
        """Normal weights, zero biases; output projections narrower, so that the residual sum keeps its scale."""
        narrow = self.config.init_std / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | ColumnParallelLinear | nn.Embedding):
                nn.init.normal_(module.weight, std=narrow if name.endswith(".out") else self.config.init_std)
            if isinstance(module, nn.Linear | ColumnParallelLinear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the mean loss where targets are given.

        Args:
            tokens: ``[s, b]`` int64, ``1 <= s <= seq_length``.
            targets: ``[s, b]`` int64, the token that follows each.

        Returns:
            Logits ``[s, b, vocab_size]``, or the mean cross entropy in nats, a float32 scalar (float64 for a float64
            model).

        Raises:
            ValueError: tokens not ``[s, b]`` or longer than ``seq_length``, or targets of another shape.
        """
        check_tokens(self.config, tokens, targets)
        x, angles = self.tokens(tokens), None
        if self.positions is None:
            size = self.config.hidden // self.config.heads
            angles = rotary_angles(tokens.shape[0], size, self.config.rotary_base, tokens.device)
        else:
            x = x + self.positions.weight[: tokens.shape[0], None]
        x = F.dropout(x, self.config.dropout, self.training)
        for layer in self.layers:
            x = layer(x, angles)
        x = self.norm(x)
        if targets is None:
            logits: Tensor = self.head(x)
            return logits
        return self.ops.linear_cross_entropy(x, self.head.weight, targets)
