"""The shape of a decoder-only transformer, its parameters and its floating-point operations.

Notation: h hidden size, l layers, a heads, d head width, f MLP width, V vocabulary, s sequence length, b batch.

    parameters of a GPT   P = 12 l h^2 (1 + 13 / 12h + (V + s) / 12lh) + 2h            arXiv:2104.04473, eq. 2
    forward FLOPs         24 b s l h^2 (1 + s / 6h + V / 12lh) for that GPT            arXiv:2104.04473, eq. 3

Both are counted matrix by matrix, which covers grouped queries, gated MLPs, experts and latent attention. A multiply
and an add count as two. Attention counts all s^2 scores, also where a causal mask drops half of them: that is the
convention of the published utilisation figures.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from parallel_ops.planner.model.layer import LayerShape
from parallel_ops.planner.model.mixers import ATTENTION, KINDS
from parallel_ops.planner.speed import hashed_once


class LayerKind(NamedTuple):
    """Layers of one kind: ``shape``, a model of which all mixers are of that kind, and whether they have experts."""

    shape: "Model"
    sparse: bool


@hashed_once
@dataclass(frozen=True, kw_only=True)
class Model(LayerShape):
    """Shape of a decoder-only transformer, GPT or Llama style, dense or mixture of experts.

    Fields and errors: ``ModelFields``. A model of several kinds of layers has the figures of one of them in the
    ``shape`` of ``kinds``.
    """

    @property
    def expert_kind(self) -> str:
        """``"biased"`` if experts have biases, ``"plain"`` for others, empty for a dense model."""
        return ("biased" if self.bias == "all" else "plain") if self.experts else ""

    def is_sparse(self, layer: int) -> bool:
        """Whether layer ``layer``, counted from 0, has experts."""
        return self.experts > 0 and layer >= self.dense_layers and KINDS[self._name(layer)][1]

    @property
    def all_layers(self) -> int:
        """Number of layers with those of multi-token prediction, which are the last."""
        return self.num_layers + self.prediction_layers

    @cached_property
    def hybrid(self) -> tuple[str, ...]:
        """Kinds of layers that are not attention over all keys or a window with an MLP."""
        return tuple(sorted(set(self.layers) - set(ATTENTION)))

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of the model's layers, in the order in which they first come."""
        layers = range(self.all_layers)
        names = set(map(self._name, layers))
        shapes = {kind: self if self.layers == (kind,) else replace(self, layers=(kind,)) for kind in names}
        return tuple(dict.fromkeys(LayerKind(shapes[self._name(layer)], self.is_sparse(layer)) for layer in layers))

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """The index in ``kinds`` of each layer."""
        index = {(kind.shape.layers[0], kind.sparse): number for number, kind in enumerate(self.kinds)}
        return tuple(index[self._name(layer), self.is_sparse(layer)] for layer in range(self.all_layers))

    @property
    def windows(self) -> tuple[int, ...]:
        """Keys that a query of each layer sees; 0 for all."""
        return tuple(self.window if self._name(layer) == "window" else 0 for layer in range(self.num_layers))

    def _name(self, layer: int) -> str:
        return "mtp" if layer >= self.num_layers else self.layers[layer % len(self.layers)]

    @cached_property
    def kind_counts(self) -> tuple[int, ...]:
        """Number of layers of each of ``kinds``."""
        return tuple(map(self.kind_of.count, range(len(self.kinds))))

    @cached_property
    def sparse_layers(self) -> int:
        """Number of layers with experts."""
        return sum(map(self.is_sparse, range(self.all_layers)))

    @cached_property
    def mlp_layers(self) -> int:
        """Number of layers with a dense MLP."""
        return sum(
            n for n, kind in zip(self.kind_counts, self.kinds, strict=True) if kind.shape.has_mlp and not kind.sparse
        )

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters before the first layer."""
        return self.hidden_size * (self.vocab_size + (self.seq_length if self.positions == "learned" else 0))

    @cached_property
    def head_parameters(self) -> int:
        """Parameters after the last layer. Includes the output embedding, also where it is tied to the input's."""
        streams = self.residual_streams
        mixed = streams * (streams * self.hidden_size + 1) + 1 if streams > 1 else 0
        return self.norm_width + self.hidden_size * self.vocab_size + mixed

    @cached_property
    def parameters(self) -> int:
        """All parameters."""
        shared = self.hidden_size * self.vocab_size if self.tied_embeddings else 0
        found = self.embedding_parameters + self.head_parameters - shared
        for count, (shape, sparse) in zip(self.kind_counts, self.kinds, strict=True):
            found += count * (shape.layer_parameters(sparse) + sparse * self.experts * self.expert_weights)
        return found

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return self.parameters - self.sparse_layers * (self.experts - self.experts_per_token) * self.expert_weights

    @cached_property
    def all_attention_flops(self) -> float:
        """``attention_flops`` of all layers."""
        return sum(n * kind.shape.attention_flops for n, kind in zip(self.kind_counts, self.kinds, strict=True))

    @cached_property
    def head_flops(self) -> int:
        """Forward FLOPs of the output embedding, per token, for the next token and each further one."""
        return 2 * self.hidden_size * self.vocab_size * (1 + self.prediction_layers)

    @cached_property
    def forward_flops(self) -> float:
        """Forward FLOPs of the model, per token. A step without recomputation takes three times as many."""
        layers = (n * kind.shape.layer_flops(kind.sparse) for n, kind in zip(self.kind_counts, self.kinds, strict=True))
        return sum(layers) + self.head_flops
