"""Parameters, widths and floating-point operations of one layer."""

from dataclasses import dataclass
from functools import cached_property

from parallel_ops.planner.model.fields import ModelFields
from parallel_ops.planner.model.imbalance import rank_load
from parallel_ops.planner.model.mixers import ATTENTION, KINDS, Linear


@dataclass(frozen=True, kw_only=True)
class LayerShape(ModelFields):
    """Figures of one layer, of the kind that is the first of ``layers``."""

    @cached_property
    def mixer(self) -> str:
        """What mixes the tokens; empty in a layer that is an MLP."""
        return KINDS[self.layers[0]][0]

    @cached_property
    def has_mlp(self) -> bool:
        """Whether an MLP follows, or is the layer."""
        return KINDS[self.layers[0]][1]

    @cached_property
    def blocks(self) -> int:
        """Number of mixers and MLPs, 1 or 2, each with a norm before it."""
        return bool(self.mixer) + self.has_mlp

    @cached_property
    def ahead(self) -> bool:
        """Whether the layer is one of multi-token prediction."""
        return self.layers[0] == "mtp"

    @cached_property
    def norms(self) -> int:
        """Number of norms."""
        return self.blocks + 3 * self.ahead

    @cached_property
    def norm_width(self) -> int:
        """Parameters of one norm."""
        return self.hidden_size * (2 if self.norm == "layer" else 1)

    @cached_property
    def query_width(self) -> int:
        """Width of all query heads."""
        if self.mixer == "recurrent" and self.recurrent:
            return self.recurrent.groups * self.recurrent.state
        head = self.latent.head + self.latent.rope_head if self.latent else self.head_dim
        return self.num_heads * head

    @cached_property
    def value_width(self) -> int:
        """Width of the attention output of all heads."""
        if self.mixer == "recurrent" and self.recurrent:
            return self.recurrent.inner
        return self.num_heads * (self.latent.value_head if self.latent else self.head_dim)

    @cached_property
    def key_value_width(self) -> int:
        """Combined width of the keys and values that attention reads."""
        if self.mixer == "recurrent" or self.compressed is not None:
            return self.query_width + self.value_width if self.mixer == "recurrent" else self.head_dim
        return self.query_width + self.value_width if self.latent else 2 * self.num_kv_heads * self.head_dim

    @cached_property
    def mixer_linears(self) -> tuple[Linear, ...]:
        """The linears of the mixer, and the projection before it in a layer of multi-token prediction."""
        h, m = self.hidden_size, self.latent
        if self.mixer == "recurrent":
            return self.recurrent.linears(h) if self.recurrent else ()
        if not self.mixer:
            return ()
        if self.compressed is not None:
            return self.compressed.linears(self.mixer, h, self.num_heads, self.head_dim)
        out = Linear(self.value_width, h, split="inputs")
        before = (Linear(2 * h, h, split=""),) if self.ahead else ()
        if m is None:
            gate = self.value_width if self.attention_gate else 0
            return *before, Linear(h, self.query_width + self.key_value_width + gate), out
        return (
            *before,
            Linear(h, m.query_rank + m.key_value_rank + m.rope_head, split=""),
            Linear(m.query_rank or h, self.query_width),
            Linear(m.key_value_rank, self.num_heads * (m.head + m.value_head)),
            out,
        )

    @cached_property
    def attention_weights(self) -> int:
        """Weights of the projections of one mixer."""
        return sum(each.inputs * each.outputs * each.number for each in self.mixer_linears)

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
        """Parameters of one mixer and the norm before it."""
        if not self.mixer:
            return 0
        found = self.attention_weights + self.norm_width
        if self.mixer == "recurrent" and self.recurrent:
            return found + self.recurrent.small_parameters
        if self.compressed is not None:
            return found + self.compressed.small_parameters(self.mixer, self.num_heads, self.head_dim)
        found += self.latent.query_rank + self.latent.key_value_rank if self.latent else 0
        found += 0 if self.bias == "none" else self.query_width + self.key_value_width
        return found + (self.hidden_size if self.bias == "all" else 0)

    @cached_property
    def mlp_parameters(self) -> int:
        """Parameters of one dense MLP and the norm before it."""
        if not self.has_mlp:
            return 0
        bias = self.ffn_hidden_size * (2 if self.gated else 1) + self.hidden_size if self.bias == "all" else 0
        return self.mlp_weights + self.norm_width + bias

    @cached_property
    def router_parameters(self) -> int:
        """Parameters of one sparse MLP that are not split over expert parallelism: router, shared experts, norm."""
        return self.hidden_size * self.experts + self.shared_experts * self.expert_weights + self.norm_width

    @cached_property
    def connections(self) -> int:
        """Parameters of the hyper-connections around one block: maps from the streams to what mixes them, offsets and
        scales."""
        n = self.residual_streams
        return (2 * n + n * n) * (n * self.hidden_size + 1) + 3 if n > 1 else 0

    def expert_load(self, ep: int, capacity_factor: float) -> float:
        """Rows that the experts of the fullest of ``ep`` ranks compute, over the mean. With a ``capacity_factor`` all
        have as many, else those that ``expert_imbalance`` gives it."""
        return capacity_factor or rank_load(self.expert_imbalance, self.experts, ep)

    def whole_keys(self, tp: int) -> int:
        """Parameters of keys and values that ``tp`` tensor-parallel ranks do not split: all, where heads are fewer."""
        if not self.scored or self.latent is not None or self.num_kv_heads % tp == 0:
            return 0
        return (self.hidden_size + (self.bias != "none")) * self.key_value_width

    def frozen_weights(self, sparse: bool) -> int:
        """Weights of the linears of a layer, without router and routed experts."""
        mlp = self.shared_experts * self.expert_weights if sparse else self.mlp_weights if self.has_mlp else 0
        return self.attention_weights + mlp

    def layer_parameters(self, sparse: bool) -> int:
        """Parameters of a layer, without routed experts."""
        mlp = self.router_parameters if sparse else self.mlp_parameters
        norms = (self.norms - self.blocks) * self.norm_width
        return self.attention_parameters + mlp + norms + self.blocks * self.connections

    def whole_in_layer(self, sparse: bool, tp: int) -> int:
        """Parameters of a layer that ``tp`` tensor-parallel ranks do not split: norms, biases that are added after a
        sum over the ranks, routers, ``whole_keys``, hyper-connections, and linears of the mixer that all ranks have."""
        found = self.norms * self.norm_width + self.blocks * self.connections
        found += self.hidden_size * (1 if sparse else 2) if self.bias == "all" else 0
        found += self.whole_keys(tp) + (self.hidden_size * self.experts if sparse else 0)
        found += sum(each.inputs * each.outputs for each in self.mixer_linears if not each.split)
        if self.compressed is not None and self.mixer:
            found += self.compressed.small_parameters(self.mixer, self.num_heads, self.head_dim) - self.num_heads
        return found + (self.latent.query_rank + self.latent.key_value_rank if self.latent else 0)

    @cached_property
    def scored(self) -> bool:
        """Whether the mixer is attention over a matrix of scores, all or those of a window."""
        return self.mixer in ATTENTION and self.compressed is None

    @cached_property
    def attention_flops(self) -> float:
        """Forward FLOPs of the scores and their matmul with the values, per token: 4 s h for a GPT; of a recurrence, or
        of the keys that compressed attention sees."""
        if self.scored:
            return 2 * self.seq_length * (self.query_width + self.value_width)
        return self.mixed_flops(self.seq_length)

    def mixed_flops(self, keys: float) -> float:
        """``attention_flops`` of mixers without a matrix of scores, over ``keys`` keys."""
        if self.mixer == "recurrent" and self.recurrent:
            return self.recurrent.flops
        if self.compressed is None or not self.mixer:
            return 0
        return self.compressed.flops(self.mixer, keys, self.window, self.query_width)

    def attended(self, keys: float) -> float:
        """Share of the causal scores over ``keys`` keys that are computed.

        A window of w leaves w (k - w / 2) of the k^2 / 2 scores, documents of d tokens d / s of those of a sequence.
        """
        inside = min(1.0, self.documents / self.seq_length) if self.documents else 1.0
        keys = min(keys, self.documents or keys)
        if self.mixer != "window" or not self.window or keys <= self.window:
            return inside
        return inside * 2 * self.window * (keys - self.window / 2) / keys**2

    def layer_flops(self, sparse: bool) -> float:
        """Forward FLOPs of a layer with or without experts, per token."""
        if sparse:
            mlp = (self.experts_per_token + self.shared_experts) * self.expert_weights + self.hidden_size * self.experts
        else:
            mlp = self.mlp_weights if self.has_mlp else 0
        mixed = self.blocks * (self.connections if self.residual_streams > 1 else 0)
        return 2 * (self.attention_weights + mlp + mixed) + self.attention_flops
