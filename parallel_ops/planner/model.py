"""The shape of a decoder-only transformer, its parameters and its floating-point operations.

Notation: h hidden size, l layers, a heads, d head width, f MLP width, V vocabulary, s sequence length, b batch.

    parameters of a GPT   P = 12 l h^2 (1 + 13 / 12h + (V + s) / 12lh) + 2h            arXiv:2104.04473, eq. 2
    forward FLOPs         24 b s l h^2 (1 + s / 6h + V / 12lh) for that GPT            arXiv:2104.04473, eq. 3

Both are counted matrix by matrix, which covers grouped queries, gated MLPs, experts and latent attention. A multiply
and an add count as two. Attention counts all s^2 scores, also where a causal mask drops half of them: that is the
convention of the published utilisation figures.
"""

from dataclasses import dataclass
from functools import cached_property

from parallel_ops.planner.checks import check_choice, check_counts, check_figures
from parallel_ops.planner.precision import FROZEN_BYTES
from parallel_ops.planner.speed import hashed_once


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: queries and keys/values pass through low-rank projections (arXiv:2405.04434).

    Attributes:
        query_rank, key_value_rank: widths of the two compressed vectors; no query rank (0) for queries made of the
            hidden vector.
        head: width of the part of a head without position.
        rope_head: width of the rotary part of a head; all key heads share it.
        value_head: width of a value head.
    """

    query_rank: int
    key_value_rank: int
    head: int
    rope_head: int
    value_head: int

    def __post_init__(self) -> None:
        check_counts(self, ("query_rank",), at_least=0)
        check_counts(self, ("key_value_rank", "head", "rope_head", "value_head"))


@hashed_once
@dataclass(frozen=True, kw_only=True)
class Model:
    """Shape of a decoder-only transformer, GPT or Llama style, dense or mixture of experts.

    Attributes:
        num_layers, hidden_size, num_heads, vocab_size: positive.
        seq_length: tokens of one training sequence.
        num_kv_heads: groups of grouped-query attention; must divide ``num_heads``. 0 for ``num_heads``.
        head_dim: width of a head. 0 for ``hidden_size / num_heads``, which must then be an integer.
        ffn_hidden_size: width of the MLP after its activation; 0 for ``4 * hidden_size``.
        gated: SwiGLU, with a third matrix.
        bias: which linear layers have one: ``"all"``, ``"qkv"`` or ``"none"``.
        norm: ``"layer"`` (weight and bias) or ``"rms"`` (weight).
        positions: ``"learned"`` (a table of ``seq_length`` rows) or ``"rotary"``.
        tied_embeddings: input and output embedding are one matrix.
        dropout: dropout on attention and hidden activations. Its masks are kept for the backward pass.
        experts: routed experts of a mixture-of-experts layer; 0 for a dense model.
        experts_per_token: routed experts that each token uses.
        shared_experts: experts that every token uses.
        expert_ffn: width of each expert; 0 for ``ffn_hidden_size``.
        dense_layers: the first layers that have no experts.
        expert_nodes: the most nodes that a token is routed to; 0 for no limit.
        latent: latent attention in place of separate key and value projections.
        window: keys that a query of a layer with a sliding window sees; 0 for all.
        full_every: with a window, one of so many layers sees all keys; 0 for none.
        documents: length of the packed document that the average token is in (the mean of squared lengths over the mean
            length), inside of which attention stays; 0 for whole sequences.
        lengths: lengths of documents and their numbers, with which ``documents`` are shared among ranks; none if only
            their mean is known.
        lora_rank: rank of adapters, which alone are trained (``memory/adapters.py``); 0 to train all parameters.
        frozen: format of frozen linears, ``"16bit"`` or ``"nf4"``.

    Raises:
        ValueError, TypeError: naming the field that is wrong.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    seq_length: int
    num_kv_heads: int = 0
    head_dim: int = 0
    ffn_hidden_size: int = 0
    gated: bool = False
    bias: str = "all"
    norm: str = "layer"
    positions: str = "learned"
    tied_embeddings: bool = True
    dropout: bool = True
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    expert_ffn: int = 0
    dense_layers: int = 0
    expert_nodes: int = 0
    latent: LatentAttention | None = None
    window: int = 0
    full_every: int = 0
    documents: float = 0.0
    lengths: tuple[tuple[int, int], ...] = ()
    lora_rank: int = 0
    frozen: str = "16bit"

    def __post_init__(self) -> None:
        check_counts(self, ("num_layers", "hidden_size", "num_heads", "vocab_size", "seq_length"))
        widths = ("num_kv_heads", "head_dim", "ffn_hidden_size", "expert_ffn")
        experts = ("experts", "experts_per_token", "shared_experts", "dense_layers", "expert_nodes")
        check_counts(self, (*widths, *experts, "window", "full_every", "lora_rank"), at_least=0)
        check_figures(self, ("documents",), zero=True)
        check_choice(self, "bias", ("all", "qkv", "none"))
        check_choice(self, "norm", ("layer", "rms"))
        check_choice(self, "positions", ("learned", "rotary"))
        check_choice(self, "frozen", tuple(FROZEN_BYTES))
        if self.frozen == "nf4" and not self.lora_rank:
            raise ValueError("Model: frozen=nf4 needs lora_rank: weights of 4 bits are not trained")
        if not self.head_dim and self.hidden_size % self.num_heads:
            raise ValueError(
                f"Model: hidden_size ({self.hidden_size}) must be a multiple of num_heads ({self.num_heads})"
            )
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_heads)
        object.__setattr__(self, "ffn_hidden_size", self.ffn_hidden_size or 4 * self.hidden_size)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"Model: num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.experts:
            object.__setattr__(self, "expert_ffn", self.expert_ffn or self.ffn_hidden_size)
            if not 1 <= self.experts_per_token <= self.experts:
                allowed = f"between 1 and experts ({self.experts})"
                raise ValueError(f"Model: experts_per_token must be {allowed}, got {self.experts_per_token}")
        elif self.experts_per_token or self.shared_experts or self.expert_ffn or self.dense_layers:
            raise ValueError("Model: experts_per_token, shared_experts, expert_ffn and dense_layers need experts")
        if self.dense_layers > self.num_layers:
            raise ValueError(
                f"Model: dense_layers must be at most num_layers ({self.num_layers}), got {self.dense_layers}"
            )

    @property
    def expert_kind(self) -> str:
        """``"biased"`` if experts have biases, ``"plain"`` for others, empty for a dense model."""
        return ("biased" if self.bias == "all" else "plain") if self.experts else ""

    def is_sparse(self, layer: int) -> bool:
        """Whether layer ``layer``, counted from 0, has experts."""
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def sparse_layers(self) -> int:
        """Number of layers with experts."""
        return self.num_layers - self.dense_layers if self.experts else 0

    @cached_property
    def norm_width(self) -> int:
        """Parameters of one norm."""
        return self.hidden_size * (2 if self.norm == "layer" else 1)

    @cached_property
    def query_width(self) -> int:
        """Width of all query heads."""
        head = self.latent.head + self.latent.rope_head if self.latent else self.head_dim
        return self.num_heads * head

    @cached_property
    def value_width(self) -> int:
        """Width of the attention output of all heads."""
        return self.num_heads * (self.latent.value_head if self.latent else self.head_dim)

    @cached_property
    def key_value_width(self) -> int:
        """Combined width of the keys and values that attention reads."""
        return self.query_width + self.value_width if self.latent else 2 * self.num_kv_heads * self.head_dim

    @cached_property
    def attention_weights(self) -> int:
        """Weights of the projections of one attention block."""
        h = self.hidden_size
        if self.latent is None:
            return h * (self.query_width + self.key_value_width) + self.value_width * h
        m = self.latent
        down = h * (m.query_rank + m.key_value_rank + m.rope_head)
        return down + self.latent_weights + self.value_width * h

    @cached_property
    def latent_weights(self) -> int:
        """Weights that expand the compressed vectors of latent attention; 0 without it."""
        if self.latent is None:
            return 0
        m = self.latent
        keys = m.key_value_rank * self.num_heads * (m.head + m.value_head)
        return (m.query_rank or self.hidden_size) * self.query_width + keys

    @cached_property
    def mlp_weights(self) -> int:
        """Weights of one dense MLP."""
        return (3 if self.gated else 2) * self.hidden_size * self.ffn_hidden_size

    @cached_property
    def expert_weights(self) -> int:
        """Weights of one expert."""
        return (3 if self.gated else 2) * self.hidden_size * self.expert_ffn

    @cached_property
    def attention_parameters(self) -> int:
        """Parameters of one attention block and the norm before it."""
        norms = self.norm_width + (self.latent.query_rank + self.latent.key_value_rank if self.latent else 0)
        bias = 0 if self.bias == "none" else self.query_width + self.key_value_width
        bias += self.hidden_size if self.bias == "all" else 0
        return self.attention_weights + norms + bias

    @cached_property
    def mlp_parameters(self) -> int:
        """Parameters of one dense MLP and the norm before it."""
        bias = self.ffn_hidden_size * (2 if self.gated else 1) + self.hidden_size if self.bias == "all" else 0
        return self.mlp_weights + self.norm_width + bias

    @cached_property
    def router_parameters(self) -> int:
        """Parameters of one sparse MLP that are not split over expert parallelism: router, shared experts, norm."""
        return self.hidden_size * self.experts + self.shared_experts * self.expert_weights + self.norm_width

    def whole_keys(self, tp: int) -> int:
        """Parameters of keys and values that ``tp`` tensor-parallel ranks do not split: all, where heads are fewer."""
        if self.latent is not None or self.num_kv_heads % tp == 0:
            return 0
        return (self.hidden_size + (self.bias != "none")) * self.key_value_width

    def whole_in_layer(self, sparse: bool, tp: int) -> int:
        """Parameters of a layer that ``tp`` tensor-parallel ranks do not split: norms, biases that are added after a
        sum over the ranks, routers, ``whole_keys``, and what makes the compressed vectors of latent attention."""
        found = 2 * self.norm_width + (self.hidden_size * (1 if sparse else 2) if self.bias == "all" else 0)
        found += self.whole_keys(tp) + (self.hidden_size * self.experts if sparse else 0)
        if (m := self.latent) is not None:
            found += m.query_rank + m.key_value_rank
            found += self.hidden_size * (m.query_rank + m.key_value_rank + m.rope_head)
        return found

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters before the first layer."""
        return self.hidden_size * (self.vocab_size + (self.seq_length if self.positions == "learned" else 0))

    @cached_property
    def head_parameters(self) -> int:
        """Parameters after the last layer. Includes the output embedding, also where it is tied to the input's."""
        return self.norm_width + self.hidden_size * self.vocab_size

    @cached_property
    def parameters(self) -> int:
        """All parameters."""
        dense = (self.num_layers - self.sparse_layers) * self.mlp_parameters
        sparse = self.sparse_layers * (self.router_parameters + self.experts * self.expert_weights)
        shared = self.hidden_size * self.vocab_size if self.tied_embeddings else 0
        ends = self.embedding_parameters + self.head_parameters - shared
        return self.num_layers * self.attention_parameters + dense + sparse + ends

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return self.parameters - self.sparse_layers * (self.experts - self.experts_per_token) * self.expert_weights

    @cached_property
    def attention_flops(self) -> int:
        """Forward FLOPs of the scores and their matmul with the values, per token and layer: 4 s h for a GPT."""
        return 2 * self.seq_length * (self.query_width + self.value_width)

    def attended(self, keys: float) -> float:
        """Share of the causal scores over ``keys`` keys that are computed, on average over the layers.

        A window of w leaves w (k - w / 2) of the k^2 / 2 scores, documents of d tokens d / s of those of a sequence.
        """
        inside = min(1.0, self.documents / self.seq_length) if self.documents else 1.0
        keys = min(keys, self.documents or keys)
        if not self.window or keys <= self.window:
            return inside
        near = 2 * self.window * (keys - self.window / 2) / keys**2
        whole = 1 / self.full_every if self.full_every else 0.0
        return inside * (whole + (1 - whole) * near)

    @cached_property
    def head_flops(self) -> int:
        """Forward FLOPs of the output embedding, per token."""
        return 2 * self.hidden_size * self.vocab_size

    def layer_flops(self, layer: int) -> int:
        """Forward FLOPs of layer ``layer``, per token."""
        if self.is_sparse(layer):
            mlp = (self.experts_per_token + self.shared_experts) * self.expert_weights + self.hidden_size * self.experts
        else:
            mlp = self.mlp_weights
        return 2 * (self.attention_weights + mlp) + self.attention_flops

    @cached_property
    def forward_flops(self) -> int:
        """Forward FLOPs of the model, per token. A step without recomputation takes three times as many."""
        dense = self.num_layers - self.sparse_layers
        sparse = self.sparse_layers * self.layer_flops(self.num_layers - 1) if self.sparse_layers else 0
        return (dense * self.layer_flops(0) if dense else 0) + sparse + self.head_flops
